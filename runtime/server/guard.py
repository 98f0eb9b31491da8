"""Before any route: every request gets an id of ours, a body above the limit is refused while it comes, and a fault
that nobody caught is an answer too.

Plain ASGI, so that nothing stands between a route and its client's disconnect.

Knows: ASGI messages. Must not know: routes, JSON.
"""

from __future__ import annotations

import logging
import secrets

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.runtime.server.errors import ApiError, as_api_error

log = logging.getLogger("plait.server")


class Guard:
    """Sets `scope["state"]["request_id"]` and the answer's `x-request-id`; limits the body to `max_body_bytes`."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self.app, self.max_body_bytes = app, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = "req-" + secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = request_id
        left, started = self.max_body_bytes, False

        async def limited() -> Message:
            nonlocal left
            message = await receive()
            if message["type"] == "http.request":
                left -= len(message.get("body", b""))
                if left < 0:
                    raise _TooLarge
            return message

        async def named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            if _declared_length(scope) > self.max_body_bytes:
                raise _TooLarge
            await self.app(scope, limited, named)
        except _TooLarge:
            text = f"the body is larger than {self.max_body_bytes} bytes"
            if not started:
                await _refuse(ApiError(413, text, code="body_too_large"), named)
        except Exception as error:
            answer = as_api_error(error)
            log.error("%s ended in status %d", request_id, answer.status)
            if started:
                raise  # too late for an answer: the connection is cut
            await _refuse(answer, named)


async def _refuse(error: ApiError, send: Send) -> None:
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": msgspec.json.encode(error.body())})


class _TooLarge(Exception):
    """The body went over the limit while it was read."""


def _declared_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else 0
    return 0
