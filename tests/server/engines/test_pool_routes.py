"""The routes of a server with several models, over engines that are made up: what operators see, and timeouts."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_server import ScriptedServer

from plait.runtime.errors import CorruptModel, DeadlineExceeded
from plait.runtime.server.app import create_app
from plait.runtime.server.engines.engine_pool import EnginePool
from plait.runtime.server.engines.model_spec import ModelSpec
from plait.runtime.server.in_flight import RequestRecord
from plait.runtime.server.settings import server_settings

ASK = {"prompt": "hi", "max_tokens": 2}


class ScriptedEngine(ScriptedServer):
    """The client of a scripted scheduler, as an engine."""

    has_given_up = False
    num_restarts = 0

    def attach_to_loop(self) -> None:
        """Its replies need no loop."""

    detach_from_loop = shutdown = attach_to_loop


def start(model: str | None, stuck_after_s: float, settings: Any, name: str) -> Any:
    if name.startswith("bad"):
        raise CorruptModel(f"{name} is damaged")
    return ScriptedEngine()


def run(names: str, check: Any, **settings: Any) -> None:
    """Runs `check(http, pool)` against a server with these models."""
    server = server_settings(**settings)
    specs = [ModelSpec(name, name, Path(__file__), {}, name) for name in names.split()]

    async def serve() -> None:
        pool = EnginePool(specs, server, 2, start=start)
        pool.attach_to_loop()
        transport = httpx.ASGITransport(create_app(pool, server))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:
            await check(http, pool)
        pool.detach_from_loop()
        pool.shutdown()

    asyncio.run(serve())


def test_a_server_is_ready_as_long_as_one_model_can_be_asked() -> None:
    async def check(http: httpx.AsyncClient, pool: EnginePool) -> None:
        assert (await http.get("/ready")).status_code == 200
        for name in ("bad1", "bad2"):
            failed = await http.post("/v1/completions", json={**ASK, "model": name})
            assert failed.status_code == 503 and f"{name} is damaged" in failed.text
        ready = await http.get("/ready")
        assert ready.status_code == 503 and ready.json()["error"]["code"] == "model_start_failed"
        assert (await http.get("/health")).status_code == 200
        status = (await http.get("/status")).json()
        assert not status["ready"] and [model["status"] for model in status["models"]] == ["failed", "failed"]
        assert status["models"][0]["error"] == "bad1 is damaged" and status["runtime"] is None
        assert 'plait_model_failed_starts_total{model="bad1"} 1' in (await http.get("/metrics")).text
        assert (await http.post("/flush_cache")).status_code == 200

    run("bad1 bad2", check)

    async def check_mixed(http: httpx.AsyncClient, pool: EnginePool) -> None:
        assert (await http.post("/v1/completions", json={**ASK, "model": "bad"})).status_code == 503
        assert (await http.get("/ready")).status_code == 200
        assert (await http.post("/v1/completions", json={**ASK, "model": "good"})).json()["model"] == "good"

    run("bad good", check_mixed)


def test_nothing_is_left_of_requests_that_have_ended() -> None:
    """Also of refused ones: no use of a model, no place in a queue."""

    async def check(http: httpx.AsyncClient, pool: EnginePool) -> None:
        bodies = [
            {**ASK, "model": "a"},
            {**ASK, "model": "b", "temperature": "hot"},
            {**ASK, "model": "c"},
            {**ASK, "model": "bad"},
            {**ASK, "model": "b", "max_tokens": -1},
            {**ASK, "model": "b", "timeout": -1},
            {**ASK, "model": "b", "timeout": 1e300},
            {**ASK, "model": "a", "stream": True},
        ]
        answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies * 5))
        assert [answer.status_code for answer in answers] == [200, 400, 404, 503, 400, 400, 400, 200] * 5
        state = http._transport.app.state.plait  # type: ignore[attr-defined]
        assert state.in_flight.num_admitted == 0
        assert all(not model.num_running and not model.waiters for model in pool.models)
        assert all(model.queue.num_calls == 0 for model in pool.models)

    run("a b bad", check)


def test_a_full_queue_refuses_before_its_model_is_started() -> None:
    async def check(http: httpx.AsyncClient, pool: EnginePool) -> None:
        model = pool.models[0]
        for _ in range(3):
            model.queue.admit("")
        refused = await http.post("/v1/completions", json={**ASK, "model": "a"})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "queue_full"
        assert model.status == "unloaded"
        assert (await http.post("/v1/completions", json={**ASK, "model": "b"})).status_code == 200

    run("a b", check, max_running=1, max_queue=2)


def test_a_timeout_counts_from_the_wait_for_the_model() -> None:
    record = RequestRecord("POST", "/")
    assert record.limit_timeout(60.0) == 60.0
    record.start_deadline, record.wait_s = time.monotonic() + 5, 1.0
    left_s = record.limit_timeout(60.0)
    assert left_s is not None and 4 < left_s <= 5 and record.limit_timeout(1.0) == 1.0
    record.start_deadline = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        record.limit_timeout(60.0)


def test_the_wait_for_a_model_is_a_part_of_the_queue_time() -> None:
    may_start = threading.Event()

    def start_slowly(*of: Any, **options: Any) -> Any:
        may_start.wait(60)
        return start(*of, **options)

    async def check(http: httpx.AsyncClient, pool: EnginePool) -> None:
        pool._start = start_slowly
        for answer in (
            http.post("/v1/completions", json={**ASK, "model": "a"}),
            http.post("/tokenize", json={"prompt": "hi", "model": "a"}),  # it has no place
            http.get("/props", params={"model": "a"}),
        ):
            refused = await answer
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
            assert "0.2 s" in refused.text and refused.headers["retry-after"] == "1"
        may_start.set()
        while pool.models[0].engine_state != "loaded":
            await asyncio.sleep(0.01)
        assert pool.models[0].queue.num_calls == 0 and not pool.models[0].has_waiters

    run("a", check, max_queue_time_s=0.2)
