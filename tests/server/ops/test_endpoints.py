"""Health, readiness, metrics, the log, and what happens when a client hangs up."""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
import time

import httpx
import pytest
from asgi_server import wait_until
from prometheus_client.parser import text_string_to_metric_families

from plait.runtime.errors import RuntimeGone
from plait.runtime.server.app import create_app
from plait.runtime.server.ops.liveness import LivenessProbe
from plait.runtime.server.ops.request_log import _JsonLines
from plait.runtime.server.settings import server_settings

BODY = {"model": "default", "prompt": "One, two, three,", "max_tokens": 4, "temperature": 0}
LONG = {**BODY, "max_tokens": 2000, "ignore_eos": True}


def metrics(address):
    text = httpx.get(f"{address}/metrics").text
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_health_and_readiness_generate_nothing(serve, engine) -> None:
    address, _ = serve()
    steps = engine.client.status().steps
    assert httpx.get(f"{address}/health").json() == {"status": "ok"}
    assert httpx.get(f"{address}/ready").json() == {"ready": True}
    assert engine.client.status().steps == steps


class Silent:
    """A client whose runtime answers when it is let to."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.num_asked = 0

    async def astatus(self):
        import asyncio

        self.num_asked += 1
        while not self.may.is_set():
            await asyncio.sleep(0.005)
        return "status"


def test_a_loop_that_is_silent_for_too_long_is_not_healthy() -> None:
    import asyncio

    async def go():
        client = Silent()
        liveness = LivenessProbe(lambda: client, 0.4)
        other_probe = LivenessProbe(lambda: client, 0.2)
        assert not await other_probe.is_alive()
        early = await asyncio.gather(*(liveness.query_status(0.05) for _ in range(20)))
        assert early == [None] * 20 and client.num_asked == 2
        assert not await liveness.is_alive()
        client.may.set()
        await asyncio.sleep(0.05)
        assert await liveness.is_alive() and await liveness.query_status() == "status"

        def gone():
            raise RuntimeGone("gone")

        assert not await LivenessProbe(gone, 10).is_alive()

    asyncio.run(go())


def test_metrics_count_what_ran(serve, engine) -> None:
    address, _ = serve()
    before = metrics(address)
    for _ in range(2):
        assert httpx.post(f"{address}/v1/completions", json=BODY, timeout=60).status_code == 200
    fits = {**BODY, "regex": " (constantinople|kathmandu)", "max_tokens": 30}
    assert httpx.post(f"{address}/v1/completions", json=fits, timeout=60).status_code == 200
    assert httpx.post(f"{address}/v1/completions", json={**BODY, "n": 0}).status_code == 400
    assert httpx.post(f"{address}/v1/what-is-this-{time.time()}", json={}).status_code == 404
    after = metrics(address)

    def grown(name, **labels):
        at = (name, *sorted(labels.items()))
        return after[at] - before.get(at, 0)

    model = {"model_name": "SmolLM2-135M-Instruct.Q4_1"}
    assert grown("plait_request_seconds_count", route="/v1/completions", status="200") == 3
    assert grown("plait_request_seconds_count", route="/v1/completions", status="400") == 1
    assert grown("plait_request_seconds_count", route="other", status="404") == 1
    assert grown("plait_time_to_first_token_seconds_count") == grown("plait_queue_seconds_count") == 3
    assert grown("plait_grammar_compile_seconds_count") == 1
    assert grown("plait_rejections_total", reason="invalid_request") == 2
    sampled, forced = grown("plait_sampled_tokens_total"), grown("plait_forced_tokens_total")
    assert sampled >= 8 and forced >= 1
    assert grown("vllm:generation_tokens_total", **model) == sampled + forced
    assert grown("plait_inter_token_seconds_count") == sampled + forced - 3
    prompt = grown("plait_prompt_tokens_total")
    assert prompt == grown("vllm:prefix_cache_queries_total", **model) > 0
    assert 0 < grown("plait_prefix_hit_tokens_total") < prompt
    assert grown("plait_computed_tokens_total") >= prompt - grown("plait_prefix_hit_tokens_total")
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc"):
        assert after[f"vllm:{name}", ("model_name", model["model_name"])] == 0
    assert after["plait_runtime_up",] == 1 and after["plait_requests_in_flight",] == 0


def test_labels_are_bounded(serve) -> None:
    address, state = serve()
    with httpx.Client(base_url=address) as plain:
        for number in range(50):
            plain.get(f"/v1/models/{number}")
            plain.get(f"/{number}", headers={"x-request-id": str(number)})
            plain.request("PROPFIND", f"/health?{number}")
    routes = {route for route, _ in state.metrics.requests.counts}
    assert routes == {"/v1/models/{model:path}", "other", "/health"}


def test_status_lists_what_runs(serve, idle) -> None:
    address, _ = serve()
    with httpx.stream("POST", f"{address}/v1/completions", json={**LONG, "stream": True}, timeout=60) as answer:
        parts = answer.iter_raw()  # kept: the stream ends with it
        next(parts)
        now = httpx.get(f"{address}/status").json()
        (running,) = now["requests"]
        assert running["id"] == answer.headers["x-request-id"] and running["route"] == "/v1/completions"
        assert running["tokens"] >= 1 and now["in_flight"] == now["runtime"]["running_calls"] == 1
        before = now["runtime"]["sampled_tokens"]
        assert wait_until(lambda: httpx.get(f"{address}/status").json()["runtime"]["sampled_tokens"] > before)
    assert wait_until(lambda: httpx.get(f"{address}/status").json()["requests"] == [])


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_pages_at_once(serve, engine, idle, stream) -> None:
    address, state = serve()
    host, port = address.removeprefix("http://").split(":")
    body = json.dumps({**LONG, "n": 3, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        assert wait_until(lambda: engine.client.status().running_calls == 3)
        assert engine.client.status().held_pages > 0
    assert wait_until(lambda: engine.client.status().held_pages == 0)  # how soon: benchmarks/serving_rejections.py
    assert wait_until(lambda: state.in_flight.num_admitted == 0)
    assert wait_until(lambda: state.metrics.aborts.values.get(("client_gone",)) == 1)


ENDLESS = {
    "/v1/messages": {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4000,
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "string", "minLength": 20000}}},
    },
    "/api/chat": {"messages": [{"role": "user", "content": "hi"}], "format": {"type": "string", "minLength": 20000}},
    "/generate": {"text": "Once", "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}},
    "/v1/programs": {"program": [{"text": "Once"}, {"gen": {"max_tokens": 2000, "ignore_eos": True}}]},
}


@pytest.mark.parametrize("path", ENDLESS)
def test_a_client_that_hangs_up_is_no_fault(serve, engine, idle, caplog, path) -> None:
    address, state = serve()
    host, port = address.removeprefix("http://").split(":")
    model = {} if path == "/generate" else {"model": "default"}
    body = json.dumps({**model, **ENDLESS[path], "stream": False}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        assert wait_until(lambda: engine.client.status().running_calls == 1)
    assert wait_until(lambda: state.metrics.aborts.values.get(("client_gone",)) == 1)
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


def test_a_line_per_request(serve, caplog) -> None:
    address, _ = serve()
    caplog.set_level(logging.INFO, "plait.requests")
    prompt = "A secret that no log may hold"
    headers = {"x-request-id": b"theirs\xa0" + b"x" * 500, "traceparent": f"00-{'a1' * 16}-{'b2' * 8}-01".encode()}
    request = {**BODY, "prompt": prompt}
    answer = httpx.post(f"{address}/v1/completions", json=request, headers=headers, timeout=60)
    httpx.get(f"{address}/health")
    httpx.post(f"{address}/v1/completions", content=b"{")
    assert wait_until(lambda: len(caplog.records) == 2)
    good, bad = (json.loads(_JsonLines().format(record)) for record in caplog.records)
    assert good["request_id"] == answer.headers["x-request-id"]
    assert good["client_request_id"] == ("theirs" + "x" * 500)[:128] and good["trace_id"] == "a1" * 16
    assert (good["method"], good["route"], good["status"], good["level"]) == ("POST", "/v1/completions", 200, "info")
    assert good["completion_tokens"] == 4 and good["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert 0 <= good["queue_s"] <= good["ttft_s"] <= good["wall_s"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", good["time"])
    assert (bad["status"], bad["error"]) == (400, "invalid_json")
    assert "secret" not in json.dumps([good, bad])


def test_the_log_holds_bodies_where_that_is_asked_for(serve, caplog) -> None:
    address, _ = serve(log_prompts=True)
    caplog.set_level(logging.INFO, "plait.requests")
    httpx.post(f"{address}/v1/completions", json={**BODY, "prompt": "word " * 2000, "n": 0})
    assert wait_until(lambda: caplog.records)
    body = json.loads(_JsonLines().format(caplog.records[0]))["body"]
    assert "word word" in body and len(body) == 4096


def test_aborting_all_that_runs_answers_every_client(serve, engine, idle) -> None:
    """What the server does at its drain deadline."""
    address, state = serve()
    answers = {}

    def ask(name, body):
        answers[name] = httpx.post(f"{address}/v1/completions", json=body, timeout=60)

    threads = [
        threading.Thread(target=ask, args=("whole", LONG)),
        threading.Thread(target=ask, args=("stream", {**LONG, "stream": True})),
    ]
    for thread in threads:
        thread.start()
    assert wait_until(lambda: sum(r.num_tokens > 2 for r in list(state.in_flight.records)) == 2)
    state.admission.is_draining = True
    assert state.in_flight.abort_all() == 2
    for thread in threads:
        thread.join(10)
    assert answers["whole"].status_code == 503 and answers["whole"].json()["error"]["code"] == "aborted"
    assert answers["whole"].headers["retry-after"] == "1"
    last = answers["stream"].text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "aborted"
    assert wait_until(lambda: state.metrics.aborts.values.get(("drain",)) == 2)
    refused = httpx.post(f"{address}/v1/completions", json=BODY)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"


class Gone:
    """A backend whose runtime has died."""

    num_restarts = 3

    def __init__(self, client) -> None:
        self.real, self.is_gone = client, False

    @property
    def client(self):
        if self.is_gone:
            raise RuntimeGone("the runtime process has ended")
        return self.real


def test_without_a_runtime_every_answer_says_so(engine) -> None:
    from asgi_server import serve_app

    backend = Gone(engine.client)
    with serve_app(create_app(backend, server_settings())) as address:
        backend.is_gone = True
        for method, path in (("GET", "/health"), ("GET", "/ready"), ("POST", "/v1/completions"), ("GET", "/v1/models")):
            answer = httpx.request(method, f"{address}{path}", json=BODY if method == "POST" else None)
            assert answer.status_code == 503 and answer.headers["retry-after"] == "1", path
        now = metrics(address)
        assert now["plait_runtime_up",] == 0 and now["plait_runtime_restarts_total",] == 3
        status = httpx.get(f"{address}/status").json()
        assert status["runtime"] is None and not status["ready"] and status["model"]
        backend.is_gone = False
        assert httpx.get(f"{address}/health").status_code == 200
