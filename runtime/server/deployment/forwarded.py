"""What an ingress and a replica send each other about one HTTP request: the request, and the frames of its answer.

Both are MessagePack, so that Ray moves bytes only. A frame is a list of events in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from plait.runtime.messages import FinishReason, Usage

Headers = list[tuple[bytes, bytes]]


class _Event(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base class."""


class ForwardedRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An HTTP request that the ingress has admitted.

    request_id, tenant: as the ingress knows them. is_background: it is a line of a batch. deadline_s: seconds that are
    left of its timeout; None if it has none.
    """

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    request_id: str
    tenant: str
    is_background: bool = False
    deadline_s: float | None = None


class Accepted(_Event, frozen=True):
    """The replica has the request."""


class Lost(_Event, frozen=True):
    """The replica's runtime ended before anything of the answer was sent: another replica can answer."""

    reason: str


class Start(_Event, frozen=True):
    """Status and headers of the answer."""

    status: int
    headers: Headers
    code: str | None = None  # of an error response, for the log


class Body(_Event, frozen=True):
    """A part of the answer's body."""

    data: bytes
    is_last: bool


class CallProgress(_Event, frozen=True):
    """What a call of the request has done since the last event about it.

    index: of the call in the request. num_tokens: new ones. usage, reason: of a call that has ended with a value;
    failure: kind and text of one that failed.
    """

    index: int
    num_tokens: int = 0
    usage: Usage | None = None
    reason: FinishReason = "stop"
    is_embedding: bool = False
    failure: tuple[str, str] | None = None


Event = Accepted | Lost | Start | Body | CallProgress

encode = msgspec.msgpack.Encoder().encode
_events = msgspec.msgpack.Decoder(list[Event])
_request = msgspec.msgpack.Decoder(ForwardedRequest)


def encode_frame(events: Sequence[Event]) -> bytes:
    """Returns the events as one frame."""
    return encode(events)


def decode_frame(frame: bytes) -> list[Event]:
    """Returns the events of a frame. Raises msgspec.DecodeError for other bytes."""
    return _events.decode(frame)


def decode_request(data: bytes) -> ForwardedRequest:
    """Returns a request. Raises msgspec.DecodeError for other bytes."""
    return _request.decode(data)
