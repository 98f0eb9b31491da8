"""The event that ends a stream whose replica was lost, in the form of the stream's protocol."""

from __future__ import annotations

from typing import Any

import msgspec

from plait.runtime.server.errors import ApiError
from plait.runtime.server.http.error_bodies import anthropic_error, error_body
from plait.runtime.server.http.response import named_sse_event, sse_event


def stream_error(path: str, error: ApiError, request_id: str, num_events: int) -> bytes:
    """Returns the event. num_events: of the stream so far, which numbers an event of /v1/responses.

    >>> stream_error("/api/chat", ApiError(503, "gone"), "req-1", 3)
    b'{"error":"gone"}\\n'
    """
    if path.startswith("/api/"):
        return msgspec.json.encode(error_body(path, error, request_id)) + b"\n"
    if path.startswith("/v1/messages"):
        return named_sse_event("error", anthropic_error(error, request_id))
    if path == "/v1/programs":
        return named_sse_event("error", {"type": "error", **error.body()})
    if path == "/v1/responses":
        event: dict[str, Any] = {"type": "error", "code": error.code, "message": error.message, "param": None}
        return named_sse_event("error", event | {"sequence_number": num_events})
    return sse_event(error.body())
