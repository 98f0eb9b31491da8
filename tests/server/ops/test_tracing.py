"""Spans of requests and calls, read from OpenTelemetry's in-memory exporter."""

from __future__ import annotations

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from waiting import wait_until

from plait.runtime.errors import InputError
from plait.runtime.server.ops import tracing

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"model": "default", "prompt": "One, two,", "max_tokens": 3, "n": 2, "stream": True}


@pytest.fixture
def spans(monkeypatch):
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return exporter


def test_request_is_a_child_span_of_its_traceparent(serve, spans) -> None:
    address, _ = serve()
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    answer = httpx.post(f"{address}/v1/completions", json=BODY, headers=headers, timeout=60)
    assert wait_until(lambda: len(spans.get_finished_spans()) == 3)
    *calls, request = spans.get_finished_spans()
    assert request.name == "POST /v1/completions" and request.kind == trace.SpanKind.SERVER
    assert f"{request.context.trace_id:032x}" == TRACE and f"{request.parent.span_id:016x}" == PARENT
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["plait.request_id"] == answer.headers["x-request-id"]
    for call in calls:
        assert call.name == "plait.generate" and call.parent.span_id == request.context.span_id
        assert call.attributes["gen_ai.usage.output_tokens"] == 3
        assert request.start_time <= call.start_time <= call.end_time <= request.end_time


@pytest.mark.parametrize("header", tracing.SESSION_HEADERS)
def test_spans_have_the_agents_session_and_the_share_of_the_cache(serve, spans, header) -> None:
    address, _ = serve()
    body = {"model": "default", "prompt": f"One, two, three, four, five: {header}", "max_tokens": 1}
    for _ in range(2):
        httpx.post(f"{address}/v1/completions", json=body, headers={header: "a-session\t" + "x" * 300}, timeout=60)
    assert wait_until(lambda: len(spans.get_finished_spans()) == 4)
    first_call, first, second_call, second = (span.attributes for span in spans.get_finished_spans())
    for attributes in (first_call, first, second_call, second):
        assert attributes["gen_ai.conversation.id"] == ("a-session" + "x" * 300)[:128]
    assert first["plait.cached_share"] == first_call["plait.cached_share"] < second["plait.cached_share"] < 1
    assert second["plait.cached_tokens"] == second_call["plait.cached_tokens"] > 8
    assert first_call["plait.cache_miss.reason"] in ("new_prefix", "diverged", "extended")
    assert second_call["plait.cache_miss.reason"] == "outputs"
    assert second_call["plait.cache_miss.position"] == second_call["gen_ai.usage.input_tokens"] - 1


def test_no_session_is_made_up(serve, spans) -> None:
    address, _ = serve()
    body = {"model": "default", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    body["metadata"] = {"user_id": "user_1_account_2_session_3"}
    assert httpx.post(f"{address}/v1/messages", json=body, timeout=60).status_code == 200
    assert wait_until(lambda: len(spans.get_finished_spans()) == 2)
    attributes = [span.attributes for span in spans.get_finished_spans()]
    assert not any("gen_ai.conversation.id" in one or "session_3" in str(dict(one)) for one in attributes)


def test_refused_request_has_an_error_status(serve, spans) -> None:
    address, state = serve()
    state.admission.is_draining = True
    httpx.post(f"{address}/v1/completions", json=BODY, headers={"traceparent": "00-junk"}, timeout=60)
    assert wait_until(lambda: spans.get_finished_spans())
    (request,) = spans.get_finished_spans()
    assert request.parent is None and request.status.status_code == trace.StatusCode.ERROR
    assert request.attributes["error.type"] == "draining"


@pytest.mark.parametrize(
    "header", ["", "00-" + "0" * 32 + f"-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE.upper()}-{PARENT}-01"]
)
def test_malformed_traceparents_are_ignored(header) -> None:
    assert tracing.trace_id({"traceparent": header}) == ""
    assert tracing.trace_id({"traceparent": f"00-{TRACE}-{PARENT}-00"}) == TRACE


def test_requests_run_without_opentelemetry(serve, monkeypatch) -> None:
    monkeypatch.setattr(tracing.importlib.util, "find_spec", lambda name: None)
    address, _ = serve()
    assert httpx.post(f"{address}/v1/completions", json={**BODY, "max_tokens": 1}, timeout=60).status_code == 200


def test_endpoint_without_the_exporter_package_is_an_error(monkeypatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert tracing.export_spans() is False
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(InputError, match="opentelemetry-sdk"):
        tracing.export_spans()
