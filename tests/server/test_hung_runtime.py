"""A runtime that is stopped: /ready, the metrics and the log say so, and after `--stuck-after` it is replaced."""

from __future__ import annotations

import threading

import httpx
import pytest
from served_process import Served
from waiting import wait_until

pytestmark = pytest.mark.usefixtures("default_signals")
BODY = {"model": "default", "prompt": "One, two,", "max_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def server(small_model):
    server = Served(small_model, "--stuck-after", "8")
    yield server
    server.close()


def test_hung_runtime_is_not_ready_until_it_answers_again(server) -> None:
    assert server.get("/ready").status_code == 200
    runtime = server.runtime()
    runtime.suspend()
    assert wait_until(lambda: server.get("/ready").status_code == 503)
    assert server.get("/ready").json()["error"]["code"] == "runtime_unhealthy"
    assert server.get("/health").status_code == 200
    assert wait_until(lambda: any("has not answered for 3.5 s" in line for line in server.lines))
    runtime.resume()
    assert wait_until(lambda: server.get("/ready").status_code == 200)
    assert server.runtime().pid == runtime.pid
    assert wait_until(lambda: any("answers again" in line for line in server.lines))


def test_hung_runtime_is_replaced_and_its_requests_are_run_again(server) -> None:
    expected = server.post(BODY).json()["choices"]
    runtime = server.runtime()
    runtime.suspend()
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(server.post(BODY)))
    asking.start()
    assert wait_until(lambda: "plait_runtime_unanswered_seconds 0\n" not in server.get("/metrics").text)
    asking.join(60)
    assert answers[0].status_code == 200 and answers[0].json()["choices"] == expected
    assert server.runtime().pid != runtime.pid and not runtime.is_running()
    metrics = server.get("/metrics").text
    assert "plait_runtime_restarts_total 1\n" in metrics and "plait_reruns_total 1\n" in metrics
    assert wait_until(lambda: any("has not answered for 8 s" in line for line in server.lines))
    assert any('"runs":2' in line for line in server.lines)
