"""Around everything else: gives each request its id and its record, and at its end counts, logs and traces it.

Plain ASGI. The id is ours; what a client sends as `x-request-id` is only logged.

Knows: ASGI messages and who reads a record. Must not know: routes, limits, JSON.
"""

from __future__ import annotations

import asyncio
import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.runtime.server.in_flight import InFlight, Record, enter
from plait.runtime.server.metrics import Metrics
from plait.runtime.server.page_files import FILES
from plait.runtime.server.request_log import log_request
from plait.runtime.server.tracing import Tracing, trace_id

THEIR_ID_CHARS = 128
BODY_START_BYTES = 4096
QUIET = FILES.keys() | {"/health", "/ready", "/metrics", "/status"}  # asked all the time; logged where it went wrong


class Observer:
    """Sets `scope["state"]["request_id"]` and the answer's `x-request-id`. `paths`: those that may be labels."""

    def __init__(
        self,
        app: ASGIApp,
        in_flight: InFlight,
        metrics: Metrics,
        paths: frozenset[str],
        log_prompts: bool,
    ) -> None:
        self.app, self.in_flight, self.metrics, self.paths, self.log_prompts = (
            app,
            in_flight,
            metrics,
            paths,
            log_prompts,
        )
        self.tracing = Tracing()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        record = self._record(scope, headers)
        scope.setdefault("state", {})["request_id"] = record.request_id
        enter(record)
        self.in_flight.records.add(record)
        with self.tracing.span(scope, headers, record):
            try:
                await self.app(scope, self._listening(receive, record), _noting(send, record))
            finally:
                self._end(scope, record)

    def _record(self, scope: Scope, headers: dict[str, str]) -> Record:
        path: str = scope["path"]
        return Record(
            method=scope["method"],
            path=path,
            request_id="req-" + secrets.token_hex(12),
            their_id="".join(filter(str.isprintable, headers.get("x-request-id", "")))[:THEIR_ID_CHARS],
            trace_id=trace_id(headers),
            route=path if path in self.paths else "other",
            task=asyncio.current_task(),
        )

    def _listening(self, receive: Receive, record: Record) -> Receive:
        async def listen() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                record.client_gone = record.ended is None
            elif self.log_prompts and len(record.body_start) < BODY_START_BYTES:
                record.body_start = (record.body_start + message.get("body", b""))[:BODY_START_BYTES]
            return message

        return listen

    def _end(self, scope: Scope, record: Record) -> None:
        record.ended = record.ended or time.monotonic()
        record.route = getattr(scope.get("route"), "path", record.route)
        self.in_flight.end(record)
        self.metrics.end(record)
        if record.route not in QUIET or record.status >= 400:
            log_request(record)


def _noting(send: Send, record: Record) -> Send:
    """Notes the status, and when the first and the last byte went."""

    async def note(message: Message) -> None:
        if message["type"] == "http.response.start":
            record.status = message["status"]
            message["headers"] = [*message["headers"], (b"x-request-id", record.request_id.encode())]
        elif message["type"] == "http.response.body":
            record.first_byte = record.first_byte or time.monotonic()
            if not message.get("more_body"):
                record.ended = time.monotonic()
        await send(message)

    return note
