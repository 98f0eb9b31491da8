"""Frames of messages between a client and the scheduler: how they are encoded, grouped, limited and decoded.

A frame is a list of messages: those that a client queued together, or all replies of one step to one client. Since the
scheduler decodes and handles a frame between two steps, its size is limited: 256 messages in 128 KiB. A larger message
travels alone in its frame and must be of a kind in MAX_LARGE_MESSAGE_BYTES.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from plait.runtime.errors import InputError
from plait.runtime.messages import ClientMessage, Failed, ServerMessage

MAX_FRAME_BYTES = 128 << 10
MAX_LARGE_MESSAGE_BYTES = {b"Generate": 8 << 20, b"Select": 256 << 10}  # kinds that may exceed MAX_FRAME_BYTES alone
MAX_MESSAGES_PER_FRAME = 256

encode = msgspec.msgpack.Encoder().encode
T = TypeVar("T")
_decode_server_messages = msgspec.msgpack.Decoder(list[ServerMessage]).decode
_decode_client_messages = msgspec.msgpack.Decoder(
    Annotated[list[ClientMessage], Meta(max_length=MAX_MESSAGES_PER_FRAME)]
).decode
_split_server_frame = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_split_client_frame = msgspec.msgpack.Decoder(
    Annotated[list[msgspec.Raw], Meta(max_length=MAX_MESSAGES_PER_FRAME)]
).decode
_ARRAY32 = b"\xdd"  # MessagePack array header: this byte, then the length in 4 bytes, big-endian
_ONE_MESSAGE_PREFIX = _ARRAY32 + (1).to_bytes(4, "big")


def build_frame(messages: list[bytes]) -> bytes:
    """Builds a frame from encoded messages: an array header and the messages.

    >>> from plait.runtime.messages import Tokens
    >>> decode_server_messages(build_frame([encode(Tokens(1, [2])), encode(Tokens(3, [4]))]))[1].call
    3
    """
    return _ARRAY32 + len(messages).to_bytes(4, "big") + b"".join(messages)


def build_frames(messages: Iterable[bytes]) -> Iterator[bytes]:
    """Groups encoded messages into as few frames as possible. Only single-message frames may exceed MAX_FRAME_BYTES."""
    batch: list[bytes] = []
    size = len(_ONE_MESSAGE_PREFIX)
    for message in messages:
        if batch and (size + len(message) > MAX_FRAME_BYTES or len(batch) == MAX_MESSAGES_PER_FRAME):
            yield build_frame(batch)
            batch, size = [], len(_ONE_MESSAGE_PREFIX)
        batch.append(message)
        size += len(message)
    if batch:
        yield build_frame(batch)


def encode_client_message(request: ClientMessage) -> bytes:
    """Encodes a message for `build_frame`. Raises InputError if it exceeds the size limit of its kind."""
    message = encode(request)
    limit = MAX_LARGE_MESSAGE_BYTES.get(type(request).__name__.encode(), MAX_FRAME_BYTES - len(_ONE_MESSAGE_PREFIX))
    if len(message) > limit:
        raise InputError(f"a message of {len(message)} bytes is above the limit of {limit}")
    return message


def decode_client_messages(frame: bytes) -> list[ClientMessage]:
    """Decodes the messages of a frame. Raises msgspec.DecodeError for an invalid frame.

    A frame that is too large is refused undecoded. The size bounds the decoding time: integers are the most expensive
    content, and the lists of them have limited lengths.
    """
    _check_frame_size(frame)
    return _decode(_decode_client_messages, frame)


def decode_server_messages(frame: bytes) -> list[ServerMessage]:
    """Decodes the messages of a frame. Raises msgspec.DecodeError for an invalid frame."""
    return _decode(_decode_server_messages, frame)


def split_client_frame(frame: bytes) -> list[bytes]:
    """Splits a frame into one frame per message, without decoding them. Raises msgspec.DecodeError."""
    _check_frame_size(frame)
    return [build_frame([bytes(message)]) for message in _decode(_split_client_frame, frame)]


def split_server_frame(frame: bytes) -> list[bytes]:
    """Like `split_client_frame`, without its limits."""
    return [build_frame([bytes(message)]) for message in _decode(_split_server_frame, frame)]


def _decode(decode: Callable[[bytes], T], frame: bytes) -> T:
    """Decodes a frame. Every exception of the decoder becomes a msgspec.DecodeError.

    msgspec also raises UnicodeDecodeError, RecursionError and MemoryError, and passes on what a struct's
    `__post_init__` raises.
    """
    try:
        return decode(frame)
    except msgspec.DecodeError:
        raise
    except Exception as error:
        raise msgspec.DecodeError(f"{type(error).__name__}: {error}") from None


def _check_frame_size(frame: bytes) -> None:
    if len(frame) > MAX_FRAME_BYTES:
        header = MessageHeader.parse(frame)
        is_single = header is not None and frame.startswith(_ONE_MESSAGE_PREFIX)
        limit = MAX_LARGE_MESSAGE_BYTES.get(header.kind, 0) if header is not None and is_single else 0
        if not limit or len(frame) > limit + len(_ONE_MESSAGE_PREFIX):
            raise msgspec.DecodeError(f"a frame of {len(frame)} bytes is above the limit")


class MessageHeader(NamedTuple):
    """The kind of the first message of a frame, and its session id and call id as far as it has them."""

    kind: bytes
    ids: list[int]

    @classmethod
    def parse(cls, frame: bytes) -> MessageHeader | None:
        """Parses only the header; the rest of the frame may be invalid. Returns None if there is no header.

        >>> from plait.runtime.messages import Select
        >>> MessageHeader.parse(build_frame([encode(Select(7, 8, [[1]]))]))
        MessageHeader(kind=b'Select', ids=[7, 8])
        """
        if len(frame) < 8 or not frame.startswith(_ARRAY32) or frame[5] & 0xF0 != 0x90 or frame[6] & 0xE0 != 0xA0:
            return None
        offset = 7 + (frame[6] & 0x1F)
        kind = frame[7:offset]
        ids: list[int] = []
        while offset < len(frame) and len(ids) < 2:
            first_byte, size = frame[offset], _UINT_SIZES.get(frame[offset], 0)
            if not size and first_byte > 0x7F:
                break
            ids.append(int.from_bytes(frame[offset + 1 : offset + 1 + size], "big") if size else first_byte)
            offset += 1 + size
        return cls(kind, ids)


_UINT_SIZES = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}  # bytes after the first byte of a MessagePack unsigned integer


# -- frame decoder --------------------------------------------------------------------------------
# Decodes the frames of a peer, whatever they hold. An invalid message does not harm the others in its frame.

CALLS = (b"Generate", b"Select", b"Embed")  # their ids: session, call
REPLIES = (b"Tokens", b"Finished", b"Failed", b"Status")  # their first id: call
EVENTS = (b"BlockBatch", b"BlockSnapshot")  # numbered: whoever misses one asks for a snapshot


class DecodedFrame(NamedTuple):
    """The valid messages of a frame, the answers to its invalid calls, and the number of its invalid messages."""

    messages: list[ClientMessage]
    failures: list[Failed]
    num_invalid: int


def decode_client_frame(frame: bytes) -> DecodedFrame:
    """Decodes a frame of a client. Raises nothing."""
    try:
        return DecodedFrame(decode_client_messages(frame), [], 0)
    except msgspec.DecodeError as error:
        reason = str(error)
    try:
        frames = split_client_frame(frame)
    except msgspec.DecodeError:
        frames = [frame]
    if len(frames) == 1:
        return DecodedFrame([], _failure(MessageHeader.parse(frames[0]), reason), 1)
    parts = [decode_client_frame(single) for single in frames]
    return DecodedFrame(
        [message for part in parts for message in part.messages],
        [failure for part in parts for failure in part.failures],
        sum(part.num_invalid for part in parts),
    )


def _failure(header: MessageHeader | None, reason: str) -> list[Failed]:
    """Returns the answer to an invalid message if it is a call, so that its client does not wait for a result."""
    if header is None or header.kind not in CALLS or len(header.ids) != 2:
        return []
    return [Failed(header.ids[1], "invalid", f"the runtime refused this request: {reason:.200}")]


def decode_server_frame(frame: bytes) -> list[ServerMessage]:
    """Decodes a frame of the scheduler. An invalid reply becomes the failure of its call; an invalid event is dropped.

    Raises msgspec.DecodeError if the call of an invalid reply is unknown: some call would then wait for ever.
    """
    try:
        return decode_server_messages(frame)
    except msgspec.DecodeError as error:
        reason = str(error)
    frames = split_server_frame(frame)
    if len(frames) > 1:
        return [reply for single in frames for reply in decode_server_frame(single)]
    header = MessageHeader.parse(frames[0]) if frames else None
    if header is not None and header.kind in EVENTS:
        return []
    if header is None or header.kind not in REPLIES or not header.ids:
        raise msgspec.DecodeError(reason)
    return [Failed(header.ids[0], "internal", f"the runtime's reply could not be read: {reason:.200}")]
