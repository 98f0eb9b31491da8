"""Answers that end when their client goes: whole ones and streams, both watched for the disconnect.

A route computes its answer within `cancel_on_disconnect`, or hands an iterator of bytes to `EventStream`. When the client hangs
up, whatever runs is cancelled within one turn of the loop, and its `finally` blocks free the sessions.

Knows: ASGI, tasks. Must not know: what is computed, JSON shapes.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


class ClientDisconnected(Exception):
    """The client hung up before its answer was ready; nobody reads what is answered now."""


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response, encoded by msgspec."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The value of `work`; cancels it and raises ClientDisconnected when the client hangs up first.

    The request's body must have been read: what comes after it is the disconnect.
    """
    watcher = _DisconnectWatcher(request.receive)
    try:
        return await work
    finally:
        watcher.end()


class _DisconnectWatcher:
    """Until its `end()`, what this task waits for is cancelled when the client hangs up, as by a timeout."""

    def __init__(self, receive: Receive) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._receive, self._disconnected, self._task = receive, False, task
        self._listener = asyncio.ensure_future(self._listen())

    def end(self) -> None:
        """Raises ClientDisconnected in place of the cancellation that it caused. Call it in a `finally`."""
        self._listener.cancel()
        if self._disconnected:
            self._disconnected = False
            error = sys.exc_info()[1]
            if self._task.uncancel() <= 0 and isinstance(error, asyncio.CancelledError):
                raise ClientDisconnected from error

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._disconnected = True  # set in the same turn as the cancel, which is thrown where the task waits
        self._task.cancel()


async def stream_response(
    request: Request, events: AsyncGenerator[bytes, None], media_type: str = "text/event-stream"
) -> Response:
    """A response that streams `events`. It waits for the first, so that a refusal is still an ordinary answer."""
    watcher = _DisconnectWatcher(request.receive)
    try:
        first = await anext(events)
    except BaseException:
        try:
            await events.aclose()
        finally:
            watcher.end()
        raise
    return EventStream(first, events, media_type, watcher)


class FinalEvent(bytes):
    """The event that ends a stream: nothing is awaited after it, and the answer's end goes with it in one write."""


class EventStream(Response):
    """text/event-stream; `media_type` may be changed by a protocol whose lines are not events.

    `watcher` has begun with the wait for `first`; it ends with the stream.
    """

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        media_type: str,
        watcher: _DisconnectWatcher,
    ) -> None:
        self.first, self.events, self._watcher = first, events, watcher
        self.status_code, self.background = 200, None
        self.body = b""
        self.raw_headers = [
            (b"content-type", f"{media_type}; charset=utf-8".encode()),
            (b"cache-control", b"no-store"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnected):
            try:
                async with contextlib.aclosing(self.events):
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                    await self._send_events(send)
            finally:
                self._watcher.end()

    async def _send_events(self, send: Send) -> None:
        event = self.first
        while type(event) is not FinalEvent:
            await send({"type": "http.response.body", "body": event, "more_body": True})
            event = await anext(self.events, FinalEvent())
        await send({"type": "http.response.body", "body": event, "more_body": False})


def sse_event(value: Any) -> bytes:
    """One server-sent event with JSON data."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named_sse_event(name: str, value: Any) -> bytes:
    """A server-sent event with a name."""
    return b"event: " + name.encode() + b"\n" + sse_event(value)


async def joined(parts: AsyncIterator[list[bytes]]) -> AsyncGenerator[bytes, None]:
    """The events of one turn of the loop as one write."""
    async for part in parts:
        if part:
            yield b"".join(part)
