"""JSON responses and event streams whose work is cancelled when the client disconnects.

A route computes a response within `cancel_on_disconnect`, or passes an iterator of bytes to `stream_response`. On a
disconnect the work is cancelled within one iteration of the event loop, and its `finally` blocks free the sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from plait.runtime.server.in_flight import current_request

T = TypeVar("T")

YIELD_AFTER_BYTES = 1 << 18  # of an answer that is encoded in pieces
EVENT_STREAM = "text/event-stream"
KEEP_ALIVE_INTERVAL_S = 10.0  # of a stream that waits for its first event


class KeepAlive(bytes):
    """What a stream sends while it waits for its first event, so that nobody takes the connection for dead."""


COMMENT = KeepAlive(b": waiting\n\n")  # which clients of server-sent events ignore


class ClientDisconnected(Exception):
    """The client disconnected before its response was ready. No response to it is ever read."""


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Returns a JSON response, encoded by msgspec."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def encoded(value: T) -> T:
    """Returns a part of an answer as JSON, of which the answer's encoder copies the bytes.

    An answer may have very many of them, and each call of the encoder holds the interpreter's lock.
    """
    return cast(T, msgspec.Raw(msgspec.json.encode(value)))


async def json_response_in_pieces(value: Any) -> Response:
    """Returns a JSON response. The items of a large list, such as choices, are encoded one at a time.

    The event loop serves others between them. The list is the value, or a field of it if the value is a struct.
    """
    if isinstance(value, list):
        return json_response(await _encoded_items(value))
    if isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        lists = {name: await _encoded_items(items) for name, items in fields.items() if isinstance(items, list)}
        value = msgspec.structs.replace(value, **lists) if lists else value
    return json_response(value)


async def _encoded_items(items: list[Any]) -> list[Any]:
    """The items as JSON; numbers, and an empty list, as they are."""
    if not items or not isinstance(items[0], msgspec.Struct):
        return items
    parts, num_bytes = [], 0
    for item in items:
        parts.append(msgspec.Raw(msgspec.json.encode(item)))
        num_bytes += len(parts[-1])
        if num_bytes > YIELD_AFTER_BYTES:
            num_bytes = 0
            await asyncio.sleep(0)
    return parts


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Returns the value of `work`. Cancels it and raises ClientDisconnected if the client disconnects first.

    The request's body must have been read: the next ASGI message is then the disconnect.
    """
    watcher = _DisconnectWatcher(request.receive)
    try:
        return await work
    finally:
        watcher.end()


class _DisconnectWatcher:
    """Cancels the current task when the client disconnects, until `end()`; like `asyncio.timeout`."""

    def __init__(self, receive: Receive) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._receive, self._disconnected, self._task = receive, False, task
        self._listener = asyncio.ensure_future(self._listen())

    def end(self) -> None:
        """Stops watching; call it in a `finally`. Raises ClientDisconnected in place of the watcher's cancellation."""
        self._listener.cancel()
        if self._disconnected:
            self._disconnected = False
            error = sys.exc_info()[1]
            if self._task.uncancel() <= 0 and isinstance(error, asyncio.CancelledError):
                raise ClientDisconnected from error

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._disconnected = True  # together with the cancellation, which is raised where the task waits
        self._task.cancel()


Events = AsyncGenerator[bytes, None]
BegunEvents = tuple[bytes, Events]
"""The first event, and the generator of those that follow."""


async def begin_events(events: Events) -> BegunEvents:
    """Waits for the first event. Closes the generator if there is none."""
    try:
        return await anext(events), events
    except BaseException:
        await events.aclose()
        raise


async def stream_response(
    request: Request,
    begin: Coroutine[Any, Any, BegunEvents],
    fail: Callable[[Exception], bytes],
    media_type: str = EVENT_STREAM,
    keep_alive: KeepAlive = COMMENT,
) -> Response:
    """Returns a response that streams what `begin` returns.

    Waits for the first event, so that an error before it is still answered with its own status: for
    KEEP_ALIVE_INTERVAL_S if it is a stream of events. Then it sends `keep_alive` in each such time, and `fail(error)`
    is the event of an error.
    """
    watcher = _DisconnectWatcher(request.receive)
    beginning = asyncio.ensure_future(begin)
    try:
        record = current_request()
        left_s = max(0.0, KEEP_ALIVE_INTERVAL_S - (record.wait_s if record is not None else 0.0))
        await asyncio.wait({beginning}, timeout=left_s if media_type == EVENT_STREAM else None)
        if beginning.done():
            beginning.result()  # raises the error of a request that has failed
        return EventStream(beginning, fail, media_type, watcher, keep_alive)
    except BaseException:
        try:
            await _end_beginning(beginning)
        finally:
            watcher.end()
        raise


async def _end_beginning(beginning: asyncio.Future[BegunEvents]) -> None:
    """Cancels the wait for the first event; closes the generator if it has come."""
    beginning.cancel()
    with contextlib.suppress(BaseException):
        _, events = await asyncio.shield(beginning)
        await events.aclose()


class FinalEvent(bytes):
    """The last event of a stream. It is written together with the end of the response."""


class EventStream(Response):
    """Streams `keep_alive` until `beginning` is done, then its events.

    `watcher` has been running since before, and ends with the stream.
    """

    def __init__(
        self,
        beginning: asyncio.Future[BegunEvents],
        fail: Callable[[Exception], bytes],
        media_type: str,
        watcher: _DisconnectWatcher,
        keep_alive: KeepAlive,
    ) -> None:
        self._beginning, self._fail, self._watcher, self._keep_alive = beginning, fail, watcher, keep_alive
        self.status_code, self.background = 200, None
        self.body = b""
        self.raw_headers = [
            (b"content-type", f"{media_type}; charset=utf-8".encode()),
            (b"cache-control", b"no-store"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnected):
            try:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                while not self._beginning.done():
                    await send({"type": "http.response.body", "body": self._keep_alive, "more_body": True})
                    await asyncio.wait({self._beginning}, timeout=KEEP_ALIVE_INTERVAL_S)
                try:
                    first, events = self._beginning.result()
                except Exception as error:
                    await send({"type": "http.response.body", "body": self._fail(error), "more_body": False})
                else:
                    await self._send_events(send, first, events)
            finally:
                await _end_beginning(self._beginning)
                self._watcher.end()

    async def _send_events(self, send: Send, event: bytes, events: Events) -> None:
        while type(event) is not FinalEvent:
            await send({"type": "http.response.body", "body": event, "more_body": True})
            event = await anext(events, FinalEvent())
        await send({"type": "http.response.body", "body": event, "more_body": False})


def sse_event(value: Any) -> bytes:
    """Encodes a server-sent event with JSON data."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named_sse_event(name: str, value: Any) -> bytes:
    """Encodes a server-sent event with a name and JSON data."""
    return b"event: " + name.encode() + b"\n" + sse_event(value)
