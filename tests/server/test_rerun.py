"""Requests whose runtime ended before their response began are run again, within their timeout, twice at most."""

from __future__ import annotations

import json
import threading
import time

import httpx
import pytest
from asgi_server import serve_app
from waiting import wait_until

from plait.runtime.errors import RuntimeGone
from plait.runtime.server import rerun
from plait.runtime.server.app import create_app
from plait.runtime.server.http import response
from plait.runtime.server.settings import server_settings

BODY = {"model": "default", "prompt": "One, two, three,", "max_tokens": 4, "temperature": 0}


class ClosedClient:
    """The client of a runtime that has ended: it has the model and the tokenizer, and opens no session."""

    is_closed, unanswered_s = True, 0.0

    def __init__(self, client) -> None:
        self.model, self.tokenizer = client.model, client.tokenizer
        self.num_sessions = 0

    def open_session(self, **options):
        self.num_sessions += 1
        raise RuntimeGone("the runtime process ended")

    async def astatus(self):
        raise RuntimeGone("the runtime process ended")


class EndingClient(ClosedClient):
    """The client of a runtime that ends with its first session."""

    is_closed = False

    def open_session(self, **options):
        self.is_closed = True
        return super().open_session(**options)


class Backend:
    """A backend that is replacing its runtime."""

    num_restarts, has_given_up = 0, False

    def __init__(self, client) -> None:
        self.client = client


@pytest.fixture
def lost(engine):
    """(address, backend, state) of a server without a runtime."""
    backend = Backend(ClosedClient(engine.client))
    app = create_app(backend, server_settings())
    with serve_app(app) as address:
        yield address, backend, app.state.plait


def ask_in_thread(address, body):
    answers = []

    def ask() -> None:
        start = time.monotonic()
        answer = httpx.post(f"{address}/v1/completions", json=body, timeout=60)
        answers.extend([answer, time.monotonic() - start])

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, answers


def test_request_waits_for_the_next_runtime(lost, engine) -> None:
    address, backend, _ = lost
    assert httpx.get(f"{address}/ready", timeout=60).json()["error"]["code"] == "runtime_gone"
    assert httpx.get(f"{address}/health", timeout=60).status_code == 200
    thread, answers = ask_in_thread(address, BODY)
    assert wait_until(lambda: backend.client.num_sessions == 1)
    backend.client = engine.client
    thread.join(60)
    assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 4


def test_wait_ends_with_the_timeout_of_the_request(lost) -> None:
    address, backend, _ = lost
    thread, answers = ask_in_thread(address, BODY | {"timeout": 0.3})
    thread.join(60)
    assert answers[0].status_code == 504 and answers[0].json()["error"]["code"] == "deadline_exceeded"
    assert answers[1] < rerun.MAX_WAIT_S / 2 and backend.client.num_sessions == 1


def test_wait_without_a_timeout_is_bounded(lost, monkeypatch) -> None:
    address, backend, _ = lost
    monkeypatch.setattr(rerun, "MAX_WAIT_S", 0.3)
    thread, answers = ask_in_thread(address, BODY)
    thread.join(60)
    assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "runtime_gone"
    assert answers[0].headers["retry-after"] == "1" and backend.client.num_sessions == 1


def test_request_that_lost_a_runtime_waits_as_long_as_a_start_may_take(lost, engine, monkeypatch) -> None:
    """If it were refused, its client would repeat it, and a request that ends runtimes would not be counted twice."""
    address, backend, _ = lost
    monkeypatch.setattr(rerun, "MAX_WAIT_S", 0.05)
    backend.client = EndingClient(engine.client)
    thread, answers = ask_in_thread(address, BODY)
    thread.join(0.5)
    assert backend.client.num_sessions == 1 and not answers
    backend.client = engine.client
    thread.join(60)
    assert answers[0].status_code == 200

    monkeypatch.setattr(rerun, "MAX_WAIT_OF_LOST_S", 0.05)
    backend.client = EndingClient(engine.client)
    thread, answers = ask_in_thread(address, BODY)
    thread.join(60)
    assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "runtime_gone"
    assert answers[0].headers["x-should-retry"] == "false" and "retry-after" not in answers[0].headers


def test_wait_ends_when_no_runtime_will_follow_and_at_shutdown(lost) -> None:
    address, backend, state = lost
    thread, answers = ask_in_thread(address, BODY)
    assert wait_until(lambda: backend.client.num_sessions == 1)
    backend.has_given_up = True
    thread.join(60)
    assert answers[0].json()["error"]["code"] == "runtime_gone"

    backend.has_given_up = False
    thread, answers = ask_in_thread(address, BODY)
    assert wait_until(lambda: any(record.num_runs == 2 for record in list(state.in_flight.records)))
    state.admission.is_draining = True
    assert state.in_flight.abort_all() == 1
    thread.join(60)
    assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "draining"


def test_stream_that_waits_ends_with_an_error_at_shutdown(lost, monkeypatch) -> None:
    """It has sent a comment, so that its status can no longer tell."""
    address, _, state = lost
    monkeypatch.setattr(response, "KEEP_ALIVE_INTERVAL_S", 0.05)
    with httpx.stream("POST", f"{address}/v1/completions", json=BODY | {"stream": True}, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines) == ": waiting"
        assert wait_until(lambda: any(record.num_runs == 2 for record in list(state.in_flight.records)))
        state.admission.is_draining = True
        assert state.in_flight.abort_all() == 1
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert [json.loads(event)["error"]["code"] for event in events] == ["draining"]
    assert wait_until(lambda: not state.in_flight.records)


def test_client_that_leaves_while_it_waits_is_forgotten(lost) -> None:
    address, _, state = lost
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{address}/v1/completions", json=BODY, timeout=httpx.Timeout(60, read=0.5))
    assert wait_until(lambda: not state.in_flight.records and not state.admission.queue.num_calls)


def test_backend_without_restarts_fails_at_once(engine) -> None:
    class Unreplaced:
        client = ClosedClient(engine.client)

    with serve_app(create_app(Unreplaced(), server_settings())) as address:
        answer = httpx.post(f"{address}/v1/completions", json=BODY, timeout=60)
        assert answer.json()["error"]["code"] == "runtime_gone"
        assert httpx.get(f"{address}/health", timeout=60).status_code == 503
