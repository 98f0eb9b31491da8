"""The frames between a client and the scheduler: one struct per message, encoded by msgspec, never pickled.

Client to scheduler: Hello Open Append Generate Select Embed Fork Close Abort Inspect FlushCache.
Scheduler to client: Welcome Tokens Finished Failed Status.

Frames are lists, both ways: requests that were queued together, and all that one step has for a client. A frame is
bounded by the time that it takes to decode and carry out, since the scheduler does that between two steps: 256 requests
in 128 KiB; what is larger is alone in its frame and of a kind that may be, see `decode_client_messages`.

Ids are integers that the client counts up; the scheduler owns them per connection, so that no client can name
another's. Every call (Generate, Select, Embed, Inspect, FlushCache) gets exactly one Finished, Failed or Status.

Knows: the shape of a message. Must not know: sockets, tensors, text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from plait.constrained.specs import Spec
from plait.runtime.errors import InputError
from plait.runtime.sampling_params import SamplingParams

PROTOCOL = 5  # counts up whenever a frame changes its shape
MAX_FRAME_BYTES = 128 << 10
MAX_LARGE_MESSAGE_BYTES = {b"Generate": 8 << 20, b"Select": 256 << 10}  # of those that may be alone in a larger frame
MAX_MESSAGES_PER_FRAME = 256  # of one frame
MAX_APPEND_TOKENS = 1 << 14  # of one instruction; more are several
MAX_CHOICES = 1024
MAX_REPLACED = 8  # tokens at the end of a text that a Select may take back
MAX_FORK_CHILDREN = 4096
MAX_NAME_CHARS = 256  # characters of a tenant or cache salt
MAX_PRIORITY = 1_000_000

SelectMethod = Literal["token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"]
FinishReason = Literal["stop", "length"]
PoolingKind = Literal["last", "mean"]


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base of every frame."""


class Hello(Message, frozen=True):
    protocol: int


class Open(Message, frozen=True):
    """Starts an empty session. `tenant` and `cache_salt` choose the prefix cache it may share."""

    session: int
    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0
    program: int = 0  # sessions of one program share one fairness account; 0: a program of its own


class Append(Message, frozen=True):
    """Adds tokens to the session's text. Costs nothing until a call needs them."""

    session: int
    token_ids: Annotated[list[int], Meta(max_length=MAX_APPEND_TOKENS)]


class Generate(Message, frozen=True):
    """Samples tokens after the session's text; what is sampled becomes part of the text."""

    session: int
    call: int
    sampling: SamplingParams
    constraint: Spec | None = None


class Select(Message, frozen=True):
    """Scores each choice (token ids) after the session's text and appends the best one.

    `replaced`: so many of the text's last tokens are left out first. The choices begin with the bytes of these, where
    text and choice meet in a token.
    """

    session: int
    call: int
    choices: Annotated[list[list[int]], Meta(max_length=MAX_CHOICES)]
    method: SelectMethod = "token_length_normalized"
    timeout_s: float | None = None
    top_logprobs: int = 0  # how many of the likeliest tokens to tell at each position
    replaced: int = 0


class Embed(Message, frozen=True):
    """Makes one vector of the session's text, which stays as it is; the answer is `Finished.embedding`.

    `dimensions`: only so many of its first numbers are wanted (0: all). `normalize`: whether it is then scaled to the
    length 1 (None: where the model's files say so).
    """

    session: int
    call: int
    dimensions: int = 0
    normalize: bool | None = None
    timeout_s: float | None = None


class Fork(Message, frozen=True):
    """Opens sessions `children` that begin with this session's text as it is when the instruction is reached."""

    session: int
    children: Annotated[list[int], Meta(max_length=MAX_FORK_CHILDREN)]


class Close(Message, frozen=True):
    """Ends the session after its earlier instructions; its pages become ordinary cache."""

    session: int


class Abort(Message, frozen=True):
    """Ends one call, or with `call=None` the whole session, at once. Its calls fail with kind `aborted`."""

    session: int
    call: int | None = None


class Inspect(Message, frozen=True):
    """Asks for a `Status`."""

    call: int


class FlushCache(Message, frozen=True):
    """Drops every cached prefix that no running call needs; answered by a `Status`."""

    call: int


ClientMessage = Hello | Open | Append | Generate | Select | Embed | Fork | Close | Abort | Inspect | FlushCache
SessionCall = Generate | Select | Embed


class EmbeddingInfo(msgspec.Struct, frozen=True, array_like=True):
    """What a model makes of a text: `size` numbers, pooled from the states behind its last norm: that of the last
    token, or the mean of all. `normalized`: its files want the vector's length to be 1. `prompt`: what they put before
    every text."""

    size: int
    pooling: PoolingKind
    normalized: bool
    prompt: str = ""


class Welcome(Message, frozen=True):
    """What a client must know of the model: where its tokenizer is and what fits.

    `embeddings`: None where it makes none, for the reason in `no_embeddings_reason`. `can_generate`: it has an output
    head.
    """

    protocol: int
    model_path: str
    vocab_size: int
    context_length: int
    server_pid: int
    embeddings: EmbeddingInfo | None = None
    no_embeddings_reason: str = ""
    can_generate: bool = True


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """What one call cost. prompt_tokens == cached_tokens + computed_tokens, whatever happened on the way.

    `cached_tokens`: prompt tokens whose KV was found (in the radix tree, or kept by the session itself).
    `computed_tokens`: prompt tokens that went through the model. `recomputed_tokens`: tokens computed a second
    time because the pool was full. `completion_tokens` are sampled or forced; `forced_tokens` of them were not
    sampled, and `drafted_tokens` were guessed from the text before the model confirmed them. Times in seconds:
    waiting to be admitted, until the first token, and in all; `compile_s`, a part of `queue_s`, was spent waiting for
    the call's own grammar.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    completion_tokens: int = 0
    forced_tokens: int = 0
    queue_s: float = 0.0
    ttft_s: float = 0.0
    wall_s: float = 0.0
    drafted_tokens: int = 0
    compile_s: float = 0.0


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One sampled token, its logprob, and the most likely tokens at that position with theirs."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class ChoiceScores(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of a Select. `token_logprobs[i][j]`: logprob of token j of choice i; scores decide.

    `top_logprobs[i][j]`: the likeliest tokens where token j of choice i stands, where that was asked for.
    """

    index: int
    scores: list[float]
    token_logprobs: list[list[float]]
    unconditional_logprobs: list[list[float]] | None = None
    top_logprobs: list[list[list[tuple[int, float]]]] | None = None


class Tokens(Message, frozen=True):
    """Tokens that now belong to the text, in order. Tokens a stop string may still cut off are held back."""

    call: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None


class Finished(Message, frozen=True):
    """The call ended with a value. `matched` is the stop string or stop token that ended it.

    `prompt_logprobs`: one for each token from `SamplingParams.prompt_logprobs_from` on, where that was asked for.
    `embedding`: an Embed's numbers, float32, little-endian.
    """

    call: int
    reason: FinishReason
    usage: Usage
    matched: str | int | None = None
    choice: ChoiceScores | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    embedding: bytes | None = None


class Failed(Message, frozen=True):
    """The call ended without a value; `kind` names a class in runtime/errors.py."""

    call: int
    kind: str
    text: str


class Status(Message, frozen=True):
    """A look at the scheduler. Page counts: free + cached + held == total (one page holds one token's KV).

    From `steps` on the counts only grow: see `scheduler.totals` for the four from `prompt_tokens` on. `spared_tokens`:
    tokens of cached KV that attention did not read again, because rows that share them read them once.
    """

    call: int
    sessions: int
    clients: int
    running_calls: int
    waiting_calls: int
    free_pages: int
    cached_pages: int
    held_pages: int
    total_pages: int
    steps: int
    computed_tokens: int
    retractions: int
    bad_frames: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    forced_tokens: int = 0
    spared_tokens: int = 0


ServerMessage = Welcome | Tokens | Finished | Failed | Status

encode = msgspec.msgpack.Encoder().encode
decode_server_messages = msgspec.msgpack.Decoder(list[ServerMessage]).decode
_decode_client_messages = msgspec.msgpack.Decoder(
    Annotated[list[ClientMessage], Meta(max_length=MAX_MESSAGES_PER_FRAME)]
).decode
_split = msgspec.msgpack.Decoder(Annotated[list[msgspec.Raw], Meta(max_length=MAX_MESSAGES_PER_FRAME)]).decode
_ARRAY32 = b"\xdd"  # MessagePack's header of a list: this, and how many in four bytes
_ONE_MESSAGE_PREFIX = _ARRAY32 + (1).to_bytes(4, "big")


def build_frame(messages: list[bytes]) -> bytes:
    """The frame of messages that are encoded already: a list in MessagePack is a header, then one after the other.

    >>> decode_server_messages(build_frame([encode(Tokens(1, [2])), encode(Tokens(3, [4]))]))[1].call
    3
    """
    return _ARRAY32 + len(messages).to_bytes(4, "big") + b"".join(messages)


def build_frames(messages: Iterable[bytes]) -> Iterator[bytes]:
    """Requests as few frames, none above the limit but those of one request."""
    taken: list[bytes] = []
    size = len(_ONE_MESSAGE_PREFIX)
    for message in messages:
        if taken and (size + len(message) > MAX_FRAME_BYTES or len(taken) == MAX_MESSAGES_PER_FRAME):
            yield build_frame(taken)
            taken, size = [], len(_ONE_MESSAGE_PREFIX)
        taken.append(message)
        size += len(message)
    if taken:
        yield build_frame(taken)


def encode_client_message(request: ClientMessage) -> bytes:
    """A request as it stands in a frame. InputError for one that the scheduler would not take."""
    message = encode(request)
    most = MAX_LARGE_MESSAGE_BYTES.get(type(request).__name__.encode(), MAX_FRAME_BYTES - len(_ONE_MESSAGE_PREFIX))
    if len(message) > most:
        raise InputError(f"a message of {len(message)} bytes is above the limit of {most}")
    return message


def decode_client_messages(frame: bytes) -> list[ClientMessage]:
    """The requests of a frame. msgspec.DecodeError for what is none, and, undecoded, for what is too large.

    Bytes bound the time: integers take the most, and lists of them are bounded by their number.
    """
    _check_frame_size(frame)
    requests: list[ClientMessage] = _decode_client_messages(frame)
    return requests


def split_frame(frame: bytes) -> list[bytes]:
    """The requests of a frame, each as a frame of its own, not decoded. Raises as `decode_client_messages` does."""
    _check_frame_size(frame)
    return [build_frame([bytes(message)]) for message in _split(frame)]


def _check_frame_size(frame: bytes) -> None:
    if len(frame) > MAX_FRAME_BYTES:
        head = MessageHeader.parse(frame)
        most = (
            0
            if head is None or not frame.startswith(_ONE_MESSAGE_PREFIX)
            else MAX_LARGE_MESSAGE_BYTES.get(head.kind, 0) + len(_ONE_MESSAGE_PREFIX)
        )
        if len(frame) > most:
            raise msgspec.DecodeError(f"a frame of {len(frame)} bytes is above the limit")


class MessageHeader(NamedTuple):
    """What the first request of a frame is, and the numbers of its session and its call, as far as it has them."""

    kind: bytes
    ids: list[int]

    @classmethod
    def parse(cls, frame: bytes) -> MessageHeader | None:
        """Read without the rest, which may be anything. None where nothing there looks like a request.

        >>> Head.of(build_frame([encode(Select(7, 8, [[1]]))]))
        Head(kind=b'Select', numbers=[7, 8])
        """
        if len(frame) < 8 or not frame.startswith(_ARRAY32) or frame[5] & 0xF0 != 0x90 or frame[6] & 0xE0 != 0xA0:
            return None
        at = 7 + (frame[6] & 0x1F)
        head = frame[7:at]
        ids: list[int] = []
        while at < len(frame) and len(ids) < 2:
            first, size = frame[at], _UINT_SIZES.get(frame[at], 0)
            if not size and first > 0x7F:
                break
            ids.append(int.from_bytes(frame[at + 1 : at + 1 + size], "big") if size else first)
            at += 1 + size
        return cls(head, ids)


_UINT_SIZES = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}  # of MessagePack's unsigned integers behind their first byte
