"""Answers that end when their client goes: whole ones and streams, both watched for the disconnect.

A route computes its answer within `unless_gone`, or hands an iterator of bytes to `EventStream`. When the client hangs
up, whatever runs is cancelled within one turn of the loop, and its `finally` blocks free the sessions.

Knows: ASGI, tasks. Must not know: what is computed, JSON shapes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


class ClientGone(Exception):
    """The client hung up before its answer was ready; nobody reads what is answered now."""


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response, encoded by msgspec."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The value of `work`; cancels it and raises ClientGone when the client hangs up first.

    The request's body must have been read: what comes after it is the disconnect.
    """
    async with _Listening(request.receive):
        return await work


class _Listening:
    """A block that ends with ClientGone when the client hangs up: what it waits for is cancelled, as by a timeout."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self._is_gone = receive, False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._inside = task
        self._listener = asyncio.ensure_future(self._listen())

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._listener.cancel()
        if self._is_gone and self._inside.uncancel() <= 0 and kind is asyncio.CancelledError:
            raise ClientGone from error

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True  # set in the same turn as the cancel, which is thrown where the block waits
        self._inside.cancel()


async def stream_answer(
    request: Request, events: AsyncGenerator[bytes, None], media_type: str = "text/event-stream"
) -> Response:
    """A response that streams `events`. It waits for the first, so that a refusal is still an ordinary answer."""
    try:
        first = await unless_gone(request, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events, media_type)


class EventStream(Response):
    """text/event-stream; `media_type` may be changed by a protocol whose lines are not events."""

    def __init__(
        self, first: bytes, events: AsyncGenerator[bytes, None], media_type: str = "text/event-stream"
    ) -> None:
        self.first, self.events = first, events
        self.status_code, self.background = 200, None
        self.body = b""
        self.init_headers({"content-type": f"{media_type}; charset=utf-8", "cache-control": "no-store"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self._head()})
        with contextlib.suppress(ClientGone):
            async with _Listening(receive):
                await self._pump(send)

    def _head(self) -> list[tuple[bytes, bytes]]:
        return [(name, value) for name, value in self.raw_headers if name != b"content-length"]

    async def _pump(self, send: Send) -> None:
        async with contextlib.aclosing(self.events):
            await send({"type": "http.response.body", "body": self.first, "more_body": True})
            async for event in self.events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def sse(value: Any) -> bytes:
    """One server-sent event with JSON data."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    """A server-sent event with a name."""
    return b"event: " + name.encode() + b"\n" + sse(value)


async def joined(parts: AsyncIterator[list[bytes]]) -> AsyncGenerator[bytes, None]:
    """The events of one turn of the loop as one write."""
    async for part in parts:
        if part:
            yield b"".join(part)
