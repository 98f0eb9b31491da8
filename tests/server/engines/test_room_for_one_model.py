"""`plait serve --models --keep 1`: models that take turns, streams in flight, Ollama's `keep_alive`, SIGTERM."""

from __future__ import annotations

import concurrent.futures
import json
import time

import httpx
import ollama
import pytest
from prometheus_scrape import scrape
from served_models import Models
from waiting import is_running, wait_until

ZERO = {"temperature": 0, "num_predict": 4}


@pytest.fixture(scope="module")
def narrow(folder):
    """Room for one of two models."""
    models = "tiny: tiny.gguf\nsmol:\npair: {model: tiny.gguf, replicas: 2, kv-memory-gb: 0.01}\n"
    narrow = Models(folder, models, "--keep", 1, "--log-format", "text", "--drain-timeout", 1)
    try:
        yield narrow
    finally:
        narrow.close()


def test_models_that_take_turns(narrow) -> None:
    texts = [narrow.text("tiny"), narrow.text("smol")]
    assert " Paris" in texts[1] and narrow.loaded() == {"smol"}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:  # mixed
        assert list(pool.map(narrow.text, ["tiny", "smol"] * 2)) == texts * 2
    assert len(narrow.runtimes()) == 1


def test_a_stream_is_not_ended_for_another_model(narrow) -> None:
    """The other model waits for it, and so do later requests of its own, which cannot keep it loaded for ever."""
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        with narrow.stream("tiny") as lines:
            waiting = pool.submit(narrow.text, "smol")
            assert wait_until(lambda: narrow.of("smol")["waiting"] == 1)
            later = pool.submit(narrow.text, "tiny")
            assert wait_until(lambda: narrow.of("tiny")["waiting"] == 1)
            late = narrow.ask("/v1/completions", model="smol", prompt="a", timeout=0.2)
            assert late.status_code == 504 and late.json()["error"]["code"] == "deadline_exceeded"
            body, patience = {"model": "smol", "prompt": "a", "stream": True}, httpx.Timeout(60, read=0.5)
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{narrow.address}/v1/completions", json=body, headers=narrow.http.headers, timeout=patience)
            assert wait_until(lambda: narrow.of("smol")["waiting"] == 1)  # the one that left does not
            for _ in range(3):
                assert next(line for line in lines if line).startswith("data: ")
            assert not waiting.done() and not later.done() and narrow.loaded() == {"tiny"}
        assert " Paris" in waiting.result() and later.result()
    assert wait_until(lambda: narrow.of("tiny")["requests"] == narrow.of("smol")["requests"] == 0)


def test_ollama_loads_keeps_and_unloads(narrow) -> None:
    client = ollama.Client(narrow.address, headers={"authorization": "Bearer a-key"})
    assert client.generate("smol", "", keep_alive="10m").done_reason == "load"
    (model,) = client.ps().models
    assert model.model == "smol:latest" and 500 < model.expires_at.timestamp() - time.time() <= 600
    assert {model.model for model in client.list().models} == {"tiny:latest", "smol:latest", "pair:latest"}
    assert client.chat("smol", [{"role": "user", "content": "Hi"}], options=ZERO, keep_alive=-1).done
    assert client.ps().models[0].expires_at is None
    assert client.generate("smol", "", keep_alive=0).done_reason == "unload"
    assert wait_until(lambda: narrow.runtimes() == [])
    assert client.generate("tiny:latest", "Hi", options=ZERO, keep_alive=0).done_reason == "length"
    assert wait_until(lambda: narrow.runtimes() == [])
    with pytest.raises(ollama.ResponseError, match="did you mean 'tiny'"):
        client.generate("tinny", "Hi")


def test_one_of_the_models_has_replicas(narrow) -> None:
    assert narrow.text("tiny") == narrow.text("pair")
    up = "plait_runtime_up", ("model", "pair"), ("replica", "1")
    assert wait_until(lambda: scrape(narrow.address)[up] == 1)  # a busy machine may let it wait for an answer
    assert wait_until(lambda: [one["state"] for one in narrow.of("pair")["replicas"]] == ["ready", "ready"])
    assert len(narrow.runtimes()) == 2
    metrics = scrape(narrow.address)
    placed = [metrics["plait_router_placed_total", ("model", "pair"), ("replica", number)] for number in "01"]
    assert sum(placed) == 1


def test_sigterm_ends_streams_waiting_requests_and_engines(narrow) -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        with narrow.stream("tiny") as lines:
            waiting = pool.submit(narrow.ask, "/v1/completions", model="smol", prompt="a")
            assert wait_until(lambda: narrow.of("smol")["waiting"] == 1)
            runtimes = narrow.runtimes()
            narrow.process.terminate()
            assert json.loads([line for line in lines if line][-1][6:])["error"]["code"] == "aborted"
        assert waiting.result().status_code == 503 and waiting.result().json()["error"]["code"] == "draining"
    assert narrow.wait() == 0 and wait_until(lambda: not any(is_running(runtime.pid) for runtime in runtimes))
