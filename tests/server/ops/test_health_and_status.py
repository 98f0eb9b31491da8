"""/health, /ready and /status: of a running server, of one whose runtime is stuck or gone, and at shutdown."""

from __future__ import annotations

import asyncio
import json
import threading

import httpx
from asgi_server import serve_app
from prometheus_scrape import scrape
from waiting import wait_until

from plait.runtime.errors import RuntimeGone
from plait.runtime.server.app import create_app
from plait.runtime.server.engines.status_query import StatusQuery
from plait.runtime.server.settings import server_settings

BODY = {"model": "default", "prompt": "One, two, three,", "max_tokens": 4, "temperature": 0}
LONG = {**BODY, "max_tokens": 2000, "ignore_eos": True}


def test_health_and_readiness_generate_nothing(serve, engine) -> None:
    address, _ = serve()
    steps = engine.client.status().steps
    assert httpx.get(f"{address}/health", timeout=60).json() == {"status": "ok"}
    assert httpx.get(f"{address}/ready", timeout=60).json() == {"ready": True}
    assert engine.client.status().steps == steps


class StuckClient:
    """A client whose status queries are answered once `resumed` is set."""

    def __init__(self) -> None:
        self.resumed = threading.Event()
        self.num_queries = 0

    async def astatus(self):
        self.num_queries += 1
        while not self.resumed.is_set():
            await asyncio.sleep(0.005)
        return "status"


def test_concurrent_status_queries_are_one() -> None:
    async def run():
        client = StuckClient()
        query = StatusQuery(lambda: client)
        statuses = await asyncio.gather(*(query.status(0.05) for _ in range(20)))
        assert statuses == [None] * 20 and client.num_queries == 1
        client.resumed.set()
        assert await query.status() == "status"

    asyncio.run(run())


def test_status_lists_the_running_requests(serve, idle) -> None:
    address, _ = serve()
    with httpx.stream("POST", f"{address}/v1/completions", json={**LONG, "stream": True}, timeout=60) as response:
        chunks = response.iter_raw()  # a reference, since the stream is closed with its iterator
        next(chunks)
        status = httpx.get(f"{address}/status", timeout=60).json()
        (running,) = status["requests"]
        assert running["id"] == response.headers["x-request-id"] and running["route"] == "/v1/completions"
        assert running["tokens"] >= 1 and status["in_flight"] == status["runtime"]["running_calls"] == 1
        before = status["runtime"]["sampled_tokens"]
        assert wait_until(
            lambda: httpx.get(f"{address}/status", timeout=60).json()["runtime"]["sampled_tokens"] > before
        )
    assert wait_until(lambda: httpx.get(f"{address}/status", timeout=60).json()["requests"] == [])


def test_aborted_requests_get_an_error_and_new_ones_are_refused(serve, idle) -> None:
    """As at the deadline of a graceful shutdown."""
    address, state = serve()
    responses = {}

    def ask(name, body):
        responses[name] = httpx.post(f"{address}/v1/completions", json=body, timeout=60)

    threads = [
        threading.Thread(target=ask, args=("complete", LONG)),
        threading.Thread(target=ask, args=("stream", {**LONG, "stream": True})),
    ]
    for thread in threads:
        thread.start()
    assert wait_until(lambda: sum(r.num_tokens > 2 for r in list(state.in_flight.records)) == 2)
    state.admission.is_draining = True
    assert state.in_flight.abort_all() == 2
    for thread in threads:
        thread.join(60)
    assert responses["complete"].status_code == 503 and responses["complete"].json()["error"]["code"] == "aborted"
    assert responses["complete"].headers["retry-after"] == "1"
    last_event = responses["stream"].text.strip().split("\n\n")[-1]
    assert json.loads(last_event.removeprefix("data: "))["error"]["code"] == "aborted"
    assert wait_until(lambda: state.metrics.aborts.values.get(("drain",)) == 2)
    refused = httpx.post(f"{address}/v1/completions", json=BODY, timeout=60)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"


class DyingBackend:
    """A backend whose runtime can die."""

    num_restarts = 3

    def __init__(self, client) -> None:
        self.live_client, self.is_gone = client, False

    @property
    def client(self):
        if self.is_gone:
            raise RuntimeGone("the runtime process has ended")
        return self.live_client


def test_without_a_runtime_requests_get_503_and_metrics_say_so(engine) -> None:
    backend = DyingBackend(engine.client)
    with serve_app(create_app(backend, server_settings())) as address:
        backend.is_gone = True
        for method, path in (("GET", "/health"), ("GET", "/ready"), ("POST", "/v1/completions"), ("GET", "/v1/models")):
            response = httpx.request(method, f"{address}{path}", json=BODY if method == "POST" else None, timeout=60)
            assert response.status_code == 503 and response.headers["retry-after"] == "1", path
        metrics = scrape(address)
        assert metrics["plait_runtime_up",] == 0 and metrics["plait_runtime_restarts_total",] == 3
        status = httpx.get(f"{address}/status", timeout=60).json()
        assert status["runtime"] is None and not status["ready"] and status["model"]
        backend.is_gone = False
        assert httpx.get(f"{address}/health", timeout=60).status_code == 200
