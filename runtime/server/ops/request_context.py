"""The outermost middleware: gives each request an id and a record, and counts, logs and traces the request at its end.

The server makes the id; an `x-request-id` of the client is only logged.
"""

from __future__ import annotations

import asyncio
import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.runtime.server.generation.cache_miss import is_wanted
from plait.runtime.server.http.response import KeepAlive
from plait.runtime.server.http.static_page import PAGE_FILES
from plait.runtime.server.in_flight import InFlightRequests, RequestRecord, set_current_request
from plait.runtime.server.ops.metrics import Metrics
from plait.runtime.server.ops.request_log import RequestLog
from plait.runtime.server.ops.tracing import Tracing, client_id, session_id, trace_id
from plait.runtime.server.settings import ServerSettings

BODY_PREVIEW_BYTES = 4096
ID_BYTES = 12
IDS_DRAWN_AT_ONCE = 256
# polled all the time, so only their errors are logged
UNLOGGED_ROUTES = PAGE_FILES.keys() | {"/health", "/ready", "/metrics", "/status"}


class RequestContextMiddleware:
    """Sets `scope["state"]["request_id"]` and the response's `x-request-id`.

    `paths`: the known paths without parameters, which may become labels of metrics.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        in_flight: InFlightRequests,
        metrics: Metrics,
        paths: frozenset[str],
    ) -> None:
        self.app, self.settings, self.in_flight, self.metrics, self.paths = app, settings, in_flight, metrics, paths
        self._ids: list[str] = []
        self.tracing = Tracing()
        self.request_log = RequestLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = _decoded_headers(scope)
        record = self._new_record(scope, headers)
        scope.setdefault("state", {})["request_id"] = record.request_id
        set_current_request(record)
        self.in_flight.records.add(record)
        with self.tracing.span(headers, record):
            try:
                await self.app(scope, self._observe_receive(receive, record), _observe_send(send, record))
            finally:
                self._end(scope, record)

    def _new_record(self, scope: Scope, headers: dict[str, str]) -> RequestRecord:
        """Returns the record of a request, with an id of its own."""
        path: str = scope["path"]
        return RequestRecord(
            method=scope["method"],
            path=path,
            request_id=self._next_id(),
            client_request_id=client_id(headers.get("x-request-id", "")),
            trace_id=trace_id(headers),
            wants_cache_miss=is_wanted(headers),
            session_id=session_id(headers),
            route=path if path in self.paths else "other",
            task=asyncio.current_task(),
            strict_fields=self.settings.strict_fields,
        )

    def _next_id(self) -> str:
        """Returns a random id. Many are drawn at once, for the system call takes longer than all else here."""
        if not self._ids:
            digits = secrets.token_hex(ID_BYTES * IDS_DRAWN_AT_ONCE)
            self._ids = [f"req-{digits[i : i + 2 * ID_BYTES]}" for i in range(0, len(digits), 2 * ID_BYTES)]
        return self._ids.pop()

    def _observe_receive(self, receive: Receive, record: RequestRecord) -> Receive:
        async def observed_receive() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                record.client_gone = record.end_time is None
            elif self.settings.log_prompts and len(record.body_preview) < BODY_PREVIEW_BYTES:
                record.body_preview = (record.body_preview + message.get("body", b""))[:BODY_PREVIEW_BYTES]
            return message

        return observed_receive

    def _end(self, scope: Scope, record: RequestRecord) -> None:
        """Counts and logs a request that has ended."""
        record.end_time = record.end_time or time.monotonic()
        record.route = getattr(scope.get("route"), "path", record.route)
        self.in_flight.end(record)
        self.metrics.observe_request(record)
        if record.route not in UNLOGGED_ROUTES or record.status >= 400:
            self.request_log.add(record)


def _decoded_headers(scope: Scope) -> dict[str, str]:
    """The request's headers as text; of those with one name the first."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}


def _observe_send(send: Send, record: RequestRecord) -> Send:
    """Records the status and the times of the first and last byte, and adds `x-request-id` to the headers."""

    async def observed_send(message: Message) -> None:
        if message["type"] == "http.response.start":
            record.status = message["status"]
            message["headers"] = [*message["headers"], (b"x-request-id", record.request_id.encode())]
        elif message["type"] == "http.response.body":
            if not isinstance(message.get("body"), KeepAlive):
                record.first_byte_time = record.first_byte_time or time.monotonic()
            if not message.get("more_body"):
                record.end_time = time.monotonic()
        await send(message)

    return observed_send
