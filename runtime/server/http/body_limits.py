"""Before any route: a body above the limit, or one that does not come, is refused while it comes; and whatever is
raised outside of the routes is an answer too.

Plain ASGI, so that nothing stands between a route and its client's disconnect.

Knows: ASGI messages. Must not know: routes, JSON.
"""

from __future__ import annotations

import asyncio

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.runtime.server.errors import OVERLOADED, TIMEOUT, ApiError, as_api_error
from plait.runtime.server.http.error_bodies import error_body
from plait.runtime.server.in_flight import DRAINED, current_request


class BodyLimitMiddleware:
    """Limits the body to `max_body_bytes`, and to `body_timeout_s` seconds from its beginning to its end."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, body_timeout_s: float, retry_after_s: int) -> None:
        self.app, self.max_body_bytes, self.body_timeout_s = app, max_body_bytes, body_timeout_s
        self.retry_after_s = retry_after_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def tracking_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            if _declared_length(scope) > self.max_body_bytes:
                raise self._too_large()
            await self.app(scope, self._limited(receive), tracking_send)
        except asyncio.CancelledError:
            record = current_request()
            if started or record is None or record.code != DRAINED:
                raise
            headers = {"Retry-After": str(self.retry_after_s)}
            text = "the server is being stopped"
            await send_error(ApiError(503, text, type=OVERLOADED, code=DRAINED, headers=headers), tracking_send)
        except Exception as error:
            answer = as_api_error(error, retry_after_s=self.retry_after_s)
            if started:
                raise  # too late for an answer: the connection is cut
            await send_error(answer, tracking_send)

    def _limited(self, receive: Receive) -> Receive:
        bytes_left, is_complete = self.max_body_bytes, False
        due = asyncio.get_running_loop().time() + self.body_timeout_s

        async def limited() -> Message:
            nonlocal bytes_left, is_complete
            if is_complete:  # what comes now is the disconnect, and may take as long as the answer
                return await receive()
            try:
                async with asyncio.timeout_at(due):
                    message = await receive()
            except TimeoutError:
                text = f"the body did not come within {self.body_timeout_s:g} s"
                raise ApiError(408, text, type=TIMEOUT, code="body_timeout") from None
            is_complete = not message.get("more_body")
            bytes_left -= len(message.get("body", b""))
            if bytes_left < 0:
                raise self._too_large()
            return message

        return limited

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self.max_body_bytes} bytes", code="body_too_large")


async def send_error(error: ApiError, send: Send) -> None:
    """Answers with an error and closes the connection: what follows on it may be the rest of a body."""
    record = current_request()
    if record is not None:
        record.code = record.code or error.code
    path, request_id = (record.path, record.request_id) if record is not None else ("", "")
    body = msgspec.json.encode(error_body(path, error, request_id))
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    raw = [(name.lower().encode(), value.encode()) for name, value in (headers | error.headers).items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def _declared_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else 0
    return 0
