"""OpenTelemetry spans, if its packages are installed: one per request, with a child span per call of the runtime.

The trace id of a request's `traceparent` is logged with or without OpenTelemetry.
https://www.w3.org/TR/trace-context/, https://opentelemetry.io/docs/specs/semconv/gen-ai/.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.runtime.call_reports import Usage
    from plait.runtime.server.in_flight import RequestRecord

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
MAX_CALL_SPANS = 16
MAX_CLIENT_ID_CHARS = 128
# in which coding agents name the conversation of a request: Claude Code, Codex, opencode
SESSION_HEADERS = ("x-claude-code-session-id", "session_id", "session-id", "x-session-id", "x-opencode-session")
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def trace_id(headers: dict[str, str]) -> str:
    """Returns the trace id of a `traceparent` header; "" if there is none or it is not well-formed.

    >>> trace_id({"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"})[:4]
    'aaaa'
    """
    match = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    return match[1] if match else ""


def client_id(text: str) -> str:
    """A client's own id as it may stand in logs and spans: printable, and cut.

    >>> client_id("a\\nb")
    'ab'
    """
    return "".join(filter(str.isprintable, text))[:MAX_CLIENT_ID_CHARS]


def session_id(headers: dict[str, str]) -> str:
    """The client's id of the conversation that a request belongs to; "" without one. It selects nothing.

    Only headers count: `metadata.user_id` of /v1/messages also names an account.
    """
    return client_id(next((headers[name] for name in SESSION_HEADERS if name in headers), ""))


class Tracing:
    """Creates the span of each request. Does nothing without OpenTelemetry."""

    def __init__(self) -> None:
        self._trace: Any = None
        if importlib.util.find_spec("opentelemetry") is not None:
            with contextlib.suppress(ImportError):  # the namespace exists, but without the API package
                from opentelemetry import propagate, trace

                self._trace, self._extract = trace, propagate.extract

    @property
    def is_active(self) -> bool:
        """Whether spans are exported."""
        return self._trace is not None and not self._has_no_exporter()

    @contextlib.contextmanager
    def span(self, headers: dict[str, str], record: RequestRecord) -> Iterator[None]:
        """Opens the span of one request, a child of its `traceparent`. The span ends with the block."""
        if not self.is_active:
            yield
            return
        tracer = self._trace.get_tracer("plait")
        began_ns = time.time_ns()
        name, kind = f"{record.method} {record.path}", self._trace.SpanKind.SERVER
        span = tracer.start_span(name, self._extract(headers), kind, start_time=began_ns)
        if span.is_recording() and (context := span.get_span_context()).is_valid:
            record.trace_id = f"{context.trace_id:032x}"
        try:
            with self._trace.use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
                yield
        finally:
            if span.is_recording():
                self._describe(tracer, span, record, began_ns)
            span.end()

    def _has_no_exporter(self) -> bool:
        """Whether no tracer provider is configured, so that spans would be lost."""
        return isinstance(self._trace.get_tracer_provider(), self._trace.ProxyTracerProvider)

    def _describe(self, tracer: Any, span: Any, record: RequestRecord, began_ns: int) -> None:
        span.update_name(f"{record.method} {record.route}")
        span.set_attributes(
            {
                "http.request.method": record.method,
                "http.route": record.route,
                "http.response.status_code": record.status,
                "plait.request_id": record.request_id,
            }
        )
        if record.code is not None:
            span.set_attribute("error.type", record.code)
        if record.adapter:
            span.set_attribute("plait.adapter", record.adapter)
        session = {"gen_ai.conversation.id": record.session_id} if record.session_id else {}
        span.set_attributes(session | _cache_share([usage for _, usage in record.usages()]))
        if record.status >= 500:
            span.set_status(self._trace.StatusCode.ERROR)
        context = self._trace.set_span_in_context(span)
        for call, usage in list(record.usages())[:MAX_CALL_SPANS]:
            start_ns = began_ns + int((call.started - record.start_time) * 1e9)
            child = tracer.start_span("plait.generate", context, start_time=start_ns)
            child.set_attributes(
                {
                    "gen_ai.usage.input_tokens": usage.prompt_tokens,
                    "gen_ai.usage.output_tokens": usage.completion_tokens,
                    "gen_ai.response.finish_reasons": [call.result(0).finish_reason],
                    **session,
                    **_cache_share([usage]),
                    "plait.forced_tokens": usage.forced_tokens,
                    "plait.queue_s": record.wait_s + usage.queue_s,
                    "plait.time_to_first_token_s": usage.ttft_s,
                }
            )
            if (miss := call.result(0).cache_miss) is not None:
                child.set_attribute("plait.cache_miss.position", miss.position)
                child.set_attribute("plait.cache_miss.reason", miss.reason)
            child.end(min(start_ns + int(usage.wall_s * 1e9), time.time_ns()))  # wall_s is of another clock


def _cache_share(usages: Sequence[Usage]) -> dict[str, Any]:
    """The prompt tokens that were cached, and their share of all; {} without a prompt."""
    prompt, cached = sum(usage.prompt_tokens for usage in usages), sum(usage.cached_tokens for usage in usages)
    return {"plait.cached_tokens": cached, "plait.cached_share": cached / prompt} if prompt else {}


def export_spans() -> bool:
    """Exports spans to OTEL_EXPORTER_OTLP_ENDPOINT, unless a tracer provider is already configured.

    Returns False if the variable is not set. Raises InputError if it is and the packages it needs are missing.
    """
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return False
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        packages = "opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http"
        raise InputError(f"an OpenTelemetry endpoint is set, which needs {packages} ({error})") from None
    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return True  # configured by opentelemetry-instrument or by the embedding program
    name = os.environ.get("OTEL_SERVICE_NAME", "plait")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return True
