"""Answers the requests of an ingress: runs their endpoints up to the first call, and forwards them to a replica.

What an endpoint answers without a call (errors, /v1/models, /tokenize) is answered here. A request whose replica is
lost before anything was sent is forwarded again (`server/rerun.py`); a stream that had begun ends with its error.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from plait.runtime.errors import RuntimeGone
from plait.runtime.server.app_state import request_id, tenant_of
from plait.runtime.server.deployment.forwarded import (
    Body,
    CallProgress,
    ForwardedRequest,
    Lost,
    Start,
    decode_frame,
    encode,
)
from plait.runtime.server.deployment.forwarded_calls import ForwardedCalls
from plait.runtime.server.deployment.planned_prompt import PlannedPrompt, planned_prompt
from plait.runtime.server.deployment.replica_directory import RemoteReplica, ReplicaDirectory, ReplicaPort
from plait.runtime.server.deployment.stream_errors import stream_error
from plait.runtime.server.errors import as_api_error
from plait.runtime.server.http.response import EventStream, FinalEvent, cancel_on_disconnect, stream_response
from plait.runtime.server.in_flight import RequestRecord, current_request
from plait.runtime.server.rerun import MAX_RUNS, run_again_if_lost
from plait.runtime.tokenizer.detokenizer import Detokenizer

TO_ALL = frozenset({"/flush_cache", "/abort_request"})  # concern every replica
TO_ALL_TIMEOUT_S = 10.0
SILENT = "the replica of this request does not answer"
HOP_HEADERS = frozenset({b"connection", b"transfer-encoding", b"x-request-id"})  # are this server's own

Endpoint = Callable[[Request], Awaitable[Response]]


class Forwarder:
    """Runs the endpoints of one ingress."""

    def __init__(self, directory: ReplicaDirectory, port: ReplicaPort) -> None:
        self._directory, self._port = directory, port

    async def run(self, endpoint: Endpoint, request: Request) -> Response:
        """Returns the answer of the endpoint, or of the replica on which it makes its calls."""
        body = _RecordedBody(request)
        if request.url.path in TO_ALL:
            return await self._ask_all(request, await request.body())
        plan = PlannedPrompt()
        token = planned_prompt.set(plan)
        local = asyncio.ensure_future(endpoint(request))  # has a copy of this context
        planned_prompt.reset(token)
        known = asyncio.ensure_future(plan.is_known.wait())
        try:
            await asyncio.wait({local, known}, return_when=asyncio.FIRST_COMPLETED)
            if not plan.is_known.is_set():
                return await local
        finally:
            known.cancel()
            local.cancel()
            await asyncio.wait({local})
        if not local.cancelled():
            local.exception()  # of the end of its calls; a failed check is raised before the first call
        record = current_request()
        assert record is not None and record.model is not None
        record.handles.clear()
        return await run_again_if_lost(request, lambda: self._forward(request, record, plan, body.data()))

    async def _forward(self, request: Request, record: RequestRecord, plan: PlannedPrompt, body: bytes) -> Response:
        replica, placements = self._directory.place(plan)
        calls = ForwardedCalls(Detokenizer(self._directory.client.tokenizer.vocabulary))
        record.handles.append(calls)
        answer = _Answer(self._port, self._directory, replica, _encoded(request, record, body), calls, record)

        def on_begin() -> None:
            for placement in placements:
                self._directory.router.first_token(placement)

        def on_end() -> None:
            self._directory.finish(placements, [usage.completion_tokens for usage in calls.usages])

        response = await stream_response(request, answer.events(on_begin, on_end))
        assert isinstance(response, EventStream) and answer.start is not None
        response.status_code = answer.start.status
        response.raw_headers = [header for header in answer.start.headers if header[0].lower() not in HOP_HEADERS]
        record.code = record.code or answer.start.code
        return response

    async def _ask_all(self, request: Request, body: bytes) -> Response:
        """Sends the request to all replicas. Returns the first answer that is an error, or else the last one."""
        record = current_request()
        assert record is not None
        data = _encoded(request, record, body)
        replicas = self._directory.listed()
        if not replicas:
            raise RuntimeGone("no replica of the model runs now")
        asked = (asyncio.wait_for(self._complete(replica, data), TO_ALL_TIMEOUT_S) for replica in replicas)
        answers = await cancel_on_disconnect(request, _all(asked))
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        if failed:
            text = f"{len(failed)} of {len(replicas)} replicas do not answer; the others did what was asked"
            raise RuntimeGone(text) from failed[0]
        responses = [answer for answer in answers if isinstance(answer, Response)]
        return next((response for response in responses if response.status_code >= 400), responses[-1])

    async def _complete(self, replica: RemoteReplica, data: bytes) -> Response:
        start, parts = None, list[bytes]()
        async with contextlib.aclosing(self._port.answer(replica.id, data)) as frames:
            async for frame in frames:
                for event in decode_frame(frame):
                    start = event if isinstance(event, Start) else start
                    if isinstance(event, Body):
                        parts.append(event.data)
                    elif isinstance(event, Lost):
                        raise RuntimeGone(event.reason)
        if start is None:
            raise RuntimeGone("the replica ended before it answered")
        response = Response(b"".join(parts), start.status)
        response.raw_headers = [header for header in start.headers if header[0].lower() not in HOP_HEADERS]
        return response


async def _all(work: Iterable[Awaitable[Response]]) -> list[Response | BaseException]:
    return list(await asyncio.gather(*work, return_exceptions=True))


def _encoded(request: Request, record: RequestRecord, body: bytes) -> bytes:
    deadline_s = None if record.deadline == float("inf") else max(0.001, record.deadline - time.monotonic())
    return encode(
        ForwardedRequest(
            request.method,
            request.url.path,
            request.scope["query_string"],
            [(bytes(name), bytes(value)) for name, value in request.scope["headers"] if name not in _SECRET],
            body,
            request_id(request),
            tenant_of(request),
            record.is_background,
            deadline_s,
        )
    )


_SECRET = frozenset({b"authorization", b"x-api-key", b"cookie"})  # were checked here


class _Answer:
    """The answer of a replica to one request. start: status and headers, known with the first part of the body."""

    def __init__(
        self,
        port: ReplicaPort,
        directory: ReplicaDirectory,
        replica: RemoteReplica,
        data: bytes,
        calls: ForwardedCalls,
        record: RequestRecord,
    ) -> None:
        self._port, self._directory, self._replica, self._data = port, directory, replica, data
        self._calls, self._record = calls, record
        self.start: Start | None = None
        self._next_frame: asyncio.Future[bytes] | None = None  # waited for before the first part of the body
        self._is_silent = False
        self._num_events = 0

    def _on_silence(self) -> None:
        """Gives up the replica, if nothing of the answer has come and another replica may be tried."""
        if self.start is None and self._record.num_runs < MAX_RUNS and self._next_frame is not None:
            self._is_silent = True
            self._next_frame.cancel()

    async def events(self, on_begin: Callable[[], None], on_end: Callable[[], None]) -> AsyncGenerator[bytes, None]:
        """Yields the parts of the body. Raises RuntimeGone for a replica that is lost before the first one."""
        self._replica.on_silence.add(self._on_silence)
        has_begun = False
        try:
            async with contextlib.aclosing(self._port.answer(self._replica.id, self._data)) as frames:
                while (frame := await self._next(frames)) is not None:
                    part = self._part(frame)
                    if not has_begun and self._calls.has_begun:
                        has_begun = True
                        on_begin()
                    if part:
                        yield part
                    if type(part) is FinalEvent:
                        return
            raise RuntimeGone("the replica ended before its answer was complete")
        except Exception as error:
            yield self._failed(error)
        finally:
            self._replica.on_silence.discard(self._on_silence)
            on_end()

    async def _next(self, frames: AsyncGenerator[bytes, None]) -> bytes | None:
        if self.start is not None:
            return await anext(frames, None)
        self._next_frame = asyncio.ensure_future(anext(frames, b""))
        try:
            return await self._next_frame or None
        except asyncio.CancelledError:
            if not self._is_silent:
                raise
            raise RuntimeGone(SILENT) from None

    def _failed(self, error: Exception) -> bytes:
        """Returns the event that ends a stream. Raises the error of an answer that is no stream, or has not begun."""
        lost = error if isinstance(error, RuntimeGone) else RuntimeGone(_reason(error))
        if not self._is_silent:
            self._directory.lose(self._replica)
        if self.start is None:
            raise lost from error
        if not self._is_stream():
            raise error
        api_error = as_api_error(lost)
        self._record.code = self._record.code or api_error.code
        return FinalEvent(stream_error(self._record.path, api_error, self._record.request_id, self._num_events))

    def _part(self, frame: bytes) -> bytes:
        """Takes a frame. Returns what it has of the body; the end of it as a FinalEvent."""
        data, is_last = bytearray(), False
        for event in decode_frame(frame):
            if isinstance(event, CallProgress):
                self._calls.on_progress(event)
            elif isinstance(event, Lost):
                raise RuntimeGone(event.reason)
            elif isinstance(event, Start):
                self.start = event
            elif isinstance(event, Body):
                data += event.data
                is_last = event.is_last
        self._num_events += data.count(b"\n\n")
        return FinalEvent(data) if is_last else bytes(data)

    def _is_stream(self) -> bool:
        assert self.start is not None
        types = [value for name, value in self.start.headers if name.lower() == b"content-type"]
        return any(b"event-stream" in value or b"ndjson" in value for value in types)


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"the replica was lost: {(lines or [type(error).__name__])[-1]:.200}"


class _RecordedBody:
    """Keeps the body of a request while its endpoint reads it."""

    def __init__(self, request: Request) -> None:
        self._parts: list[bytes] = []
        receive = request._receive

        async def recorded() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                self._parts.append(message.get("body", b""))
            return message

        request._receive = recorded

    def data(self) -> bytes:
        """The body so far."""
        return b"".join(self._parts)
