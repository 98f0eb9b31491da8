"""Decodes the frames of a peer, whatever they hold. An invalid message does not harm the others in its frame."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from plait.runtime.messages import ClientMessage, Failed, ServerMessage
from plait.runtime.transport.frames import (
    MessageHeader,
    decode_client_messages,
    decode_server_messages,
    split_client_frame,
    split_server_frame,
)

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
