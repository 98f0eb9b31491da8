"""A replica's side of one forwarded request: calls the endpoint and yields the frames of its answer.

Keys, limits, logs and metrics are the ingress's. What the endpoint sends while a frame is on its way, or soon after it,
goes into the next frame, so a slow connection and a busy replica have fewer and larger frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from plait.runtime.client.call import Call
from plait.runtime.errors import RuntimeGone
from plait.runtime.server.app_state import AppState
from plait.runtime.server.deployment.forwarded import (
    Accepted,
    Body,
    CallProgress,
    Event,
    ForwardedRequest,
    Lost,
    Start,
    encode_frame,
)
from plait.runtime.server.errors import as_api_error
from plait.runtime.server.http.admission import closing_response
from plait.runtime.server.in_flight import RequestRecord, set_current_request

POLL_S = 0.05  # of looking at calls that send nothing
REPORT_S = 0.5  # between two reports of a call's tokens, if nothing is sent meanwhile
FRAME_INTERVAL_S, MAX_FRAME_INTERVAL_S = 0.003, 0.1  # for each other answer: a frame costs Ray about a millisecond
MAX_WAITING_BYTES = 1 << 18  # of an answer that the ingress has not taken: the endpoint waits then


class ReplicaRun:
    """One request. `frames()` runs it; closing that generator ends its calls."""

    def __init__(self, app: ASGIApp, state: AppState, request: ForwardedRequest) -> None:
        self._app, self._state, self._request = app, state, request
        self._events: list[Event] = [Accepted()]
        self._num_waiting_bytes = 0
        self._changed, self._taken = asyncio.Event(), asyncio.Event()
        self._start: Start | None = None  # held back until the first part of the body
        self._has_started = False
        self._record = RequestRecord(
            request.method, request.path, request.request_id, tenant=request.tenant, route=request.path
        )
        self._record.is_background = request.is_background
        if request.deadline_s is not None:
            self._record.start_deadline = time.monotonic() + request.deadline_s
        self._reported: dict[int, tuple[int, bool]] = {}  # call -> tokens, and whether its end is reported
        self._last_report = self._next_frame = 0.0

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yields the frames of the answer, the first one at once."""
        task = asyncio.create_task(self._run())
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await self._wait(task)
                if self._events and (pause_s := self._next_frame - time.monotonic()) > 0:
                    await asyncio.wait({task}, timeout=pause_s)
                is_done = task.done()
                self._add_progress(is_forced=bool(self._events))
                if self._events:
                    events, self._events, self._num_waiting_bytes = self._events, [], 0
                    self._changed.clear()
                    self._taken.set()
                    if any(isinstance(event, Body) for event in events):
                        self._next_frame = time.monotonic() + self._frame_interval_s()
                    yield encode_frame(events)
                elif is_done:
                    task.result()
                    return
        finally:
            task.cancel()
            await asyncio.wait({task})

    def _frame_interval_s(self) -> float:
        """The least time between two frames with text, longer the more answers this replica sends side by side."""
        others = self._state.in_flight.num_admitted - 1
        return min(MAX_FRAME_INTERVAL_S, FRAME_INTERVAL_S * others)

    async def _wait(self, task: asyncio.Task[None]) -> None:
        if self._events or task.done():
            return
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait({changed, task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()

    async def _run(self) -> None:
        record, in_flight = self._record, self._state.in_flight
        record.task = asyncio.current_task()
        set_current_request(record)
        in_flight.records.add(record)
        in_flight.admit(record)
        try:
            await self._app(self._scope(), self._receive(), self._send)
        except Exception as error:
            if self._start is not None or self._has_started:
                raise  # too late for an error response
            api_error = as_api_error(error, retry_after_s=self._state.settings.retry_after_s)
            headers, body = closing_response(api_error, record)
            await self._send({"type": "http.response.start", "status": api_error.status, "headers": headers})
            await self._send({"type": "http.response.body", "body": body})
        finally:
            self._add_progress(is_forced=True)
            in_flight.end(record)

    def _scope(self) -> Scope:
        request = self._request
        return {
            "type": "http",
            "http_version": "1.1",
            "method": request.method,
            "scheme": "http",
            "path": request.path,
            "raw_path": request.path.encode(),
            "query_string": request.query,
            "root_path": "",
            "headers": request.headers,
            "state": {"tenant": request.tenant, "request_id": request.request_id},
            "app": None,  # set by the application
        }

    def _receive(self) -> Any:
        was_read = False

        async def receive() -> Message:
            nonlocal was_read
            if was_read:
                await asyncio.get_running_loop().create_future()  # a client that leaves cancels `frames`
            was_read = True
            return {"type": "http.request", "body": self._request.body, "more_body": False}

        return receive

    async def _send(self, message: Message) -> None:
        """Takes an ASGI message of the answer. Waits while much of it is not taken."""
        if message["type"] == "http.response.start":
            headers = [(bytes(name), bytes(value)) for name, value in message.get("headers", [])]
            self._start = Start(message["status"], headers, self._record.code)
            return
        if message["type"] != "http.response.body":
            return
        if self._start is not None:
            if self._start.status == 503 and self._record.code == RuntimeGone.kind:
                self._events.append(Lost(bytes(message.get("body", b"")).decode(errors="replace")[:500]))
                self._changed.set()
                return
            self._events.append(self._start)
            self._start, self._has_started = None, True
        elif not self._has_started:
            return  # the rest of the body of a lost request
        data = bytes(message.get("body", b""))
        self._events.append(Body(data, not message.get("more_body", False)))
        self._num_waiting_bytes += len(data)
        self._changed.set()
        while self._num_waiting_bytes > MAX_WAITING_BYTES:
            self._taken.clear()
            await self._taken.wait()

    def _add_progress(self, is_forced: bool) -> None:
        """Adds what the calls have done: their first token and end at once, tokens at most twice a second."""
        now = time.monotonic()
        is_due = is_forced or now >= self._last_report + REPORT_S
        for index, call in enumerate(self._record.calls):
            num_tokens, has_ended = self._reported.get(index, (-1, False))
            if has_ended:
                continue
            new_tokens = call.num_tokens - max(0, num_tokens)
            has_ended = call.done()
            if has_ended or (new_tokens and (is_due or num_tokens < 0)):
                self._events.append(_progress(index, call, new_tokens))
                self._reported[index] = call.num_tokens, has_ended
                self._last_report = now


def _progress(index: int, call: Call, num_tokens: int) -> CallProgress:
    if not call.done():
        return CallProgress(index, num_tokens)
    if call.failure is not None:
        return CallProgress(index, num_tokens, failure=(call.failure.kind, str(call.failure)))
    result = call.result(0)
    return CallProgress(index, num_tokens, result.usage, result.finish_reason, result.embedding_bytes is not None)
