"""Runs a line of a batch as a request to its endpoint: the same code answers it as a request over HTTP.

The ASGI application is called with the line's body. Between the context that gives each request its id, record and log
line, and the endpoints, `BackgroundMiddleware` takes the place of admission: a line was authenticated when its batch
was created, and is admitted as a request is that comes alone. It takes no room from requests: it counts neither in the
queue nor among the requests of its key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.runtime.server.http.call_queue import PARTICLES
from plait.runtime.server.in_flight import InFlightRequests, RequestRecord, RequestSize, current_request

SetCalls = Callable[[int], None]


@dataclass
class LineAnswer:
    """The response to one line."""

    status: int = 500
    request_id: str = ""
    body: bytes = b""
    _parts: list[bytes] = field(default_factory=list)

    async def send(self, message: Message) -> None:
        """Takes an ASGI message of the response."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = {name.lower(): value for name, value in message["headers"]}
            self.request_id = headers.get(b"x-request-id", b"").decode("latin-1")
        elif message["type"] == "http.response.body":
            self._parts.append(message.get("body", b""))
            if not message.get("more_body"):
                self.body = b"".join(self._parts)


async def run_line(app: ASGIApp, path: str, body: bytes, tenant: str, label: str, set_calls: SetCalls) -> LineAnswer:
    """Returns the response to a POST of `body`. A cancellation ends its calls.

    label: for the log, as the client's request id. set_calls(n): is called when the number of its calls is known.
    """
    answer, was_read = LineAnswer(), False

    async def receive() -> Message:
        nonlocal was_read
        if was_read:
            await asyncio.get_running_loop().create_future()  # the client of a line never disconnects
        was_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-type", b"application/json"), (b"x-request-id", label.encode())]
    scope: dict[str, Any] = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [*headers, (b"content-length", str(len(body)).encode())],
        "state": {"tenant": tenant, "set_calls": set_calls},
        "app": None,  # set by the application
    }
    await app(scope, receive, answer.send)
    return answer


class BackgroundMiddleware:
    """Marks the current request as one of a batch. Its endpoints are behind it, admission is not."""

    def __init__(self, app: ASGIApp, in_flight: InFlightRequests) -> None:
        self.app, self.in_flight = app, in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = current_request()
        assert record is not None
        record.tenant, record.is_background = scope["state"]["tenant"], True
        record.strict_fields = True  # the warnings of a batch's answers would be read too late
        record.route = f"batch {record.path}"
        record.reserve_calls = partial(self._reserve_calls, record, scope["state"]["set_calls"])
        self.in_flight.admit(record)
        await self.app(scope, receive, send)

    def _reserve_calls(self, record: RequestRecord, set_calls: SetCalls, size: RequestSize) -> None:
        """Counts the calls of a line. Raises ApiError 400 if its particles exceed a limit, as for a request alone."""
        if size.num_key_requests > 1:
            assert record.model is not None
            record.model.queue.check_alone(size.num_rows, "particles", PARTICLES)
        set_calls(size.num_rows)
