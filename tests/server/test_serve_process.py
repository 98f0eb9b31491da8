"""`plait serve` as a process: signals, flags, and restarts of its runtime."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import threading
import time

import httpx
import psutil
import pytest
from served_process import Served
from tiny_llama_gguf import write_small_model
from waiting import wait_until

from plait.runtime.errors import InputError, NotRestarted, RuntimeGone
from plait.runtime.server.engines import restarting_runtime
from plait.runtime.server.listener import bind_listener, port_of

pytestmark = pytest.mark.usefixtures("default_signals")
BODY = {"model": "default", "prompt": "One, two,", "max_tokens": 2}


@pytest.fixture(scope="module")
def endless_model(tmp_path_factory):
    """A model whose answers have a million tokens, so that they run until they are aborted."""
    return write_small_model(tmp_path_factory.mktemp("models") / "endless.gguf", 1_000_000)


@pytest.fixture
def served(endless_model):
    servers: list[Served] = []

    def start(*flags: str, **options) -> Served:
        servers.append(Served(endless_model, *flags, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def last_error_code(events: list[str]) -> str:
    """The code of the error that ends a stream."""
    return json.loads([line for line in events if line][-1].removeprefix("data: "))["error"]["code"]


def test_restart_then_exceeded_drain_timeout(served) -> None:
    """Two behaviours of one server process, since a start takes seconds."""
    server = served("--drain-timeout", "1", "--log-format", "json")
    assert wait_until(lambda: server.get("/ready").status_code == 200)

    reader, events = server.streaming()
    server.runtime().kill()
    reader.join(60)
    assert last_error_code(events) == "runtime_gone"
    assert server.get("/health").status_code == 200
    restarted = "plait_runtime_restarts_total 1\n"
    assert server.get("/ready").status_code == 503 or restarted in server.get("/metrics").text
    assert server.post(BODY).status_code == 200  # it waits for the next runtime
    assert server.get("/ready").status_code == 200
    assert restarted in server.get("/metrics").text

    reader, events = server.streaming()
    start = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0 and time.monotonic() - start > 1
    reader.join(60)
    assert last_error_code(events) == "aborted"
    logged = [json.loads(line) for line in server.lines]
    assert any(line.get("route") == "/v1/completions" and line["status"] == 200 for line in logged)
    assert not any("Traceback" in line for line in server.lines)


def test_sigterm_waits_for_running_requests(served) -> None:
    server = served(environment={"PLAIT_API_KEY": "secret"})
    headers = {"authorization": "Bearer secret"}
    assert server.get("/status").status_code == 401
    body = {**BODY, "max_tokens": 8, "ignore_eos": True}
    answers = []

    def ask() -> None:
        answers.append(httpx.post(f"{server.address}/v1/completions", json=body, headers=headers, timeout=60))

    def status():
        return httpx.get(f"{server.address}/status", headers=headers, timeout=60).json()

    runtime = server.runtime()
    runtime.suspend()  # so that the request is still running when SIGTERM arrives
    asking = threading.Thread(target=ask)
    asking.start()
    assert wait_until(lambda: status()["in_flight"] == 1)
    server.process.send_signal(signal.SIGTERM)
    assert wait_until(lambda: server.get("/ready").status_code == 503, 60)
    runtime.resume()
    asking.join(60)
    assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 8
    assert server.wait() == 0


def test_second_sigint_skips_the_drain(served) -> None:
    server = served("--drain-timeout", "600", "--max-queue", "1")
    reader, events = server.streaming()
    server.process.send_signal(signal.SIGINT)
    assert wait_until(lambda: server.get("/ready").status_code == 503)
    refused = server.post(BODY)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGINT)
    assert server.wait() == 130
    reader.join(60)
    assert "aborted" in [line for line in events if line][-1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--api-key", ""], "API key"),
        (["--api-key-file", "/nowhere"], "cannot read the API keys"),
        (["--cors-origin", "example.com"], "--cors-origin must be"),
        (["--drain-timeout", "-1"], "--drain-timeout must be a number from 0"),
        (["--idle-timeout", "nan"], "--idle-timeout must be"),
        (["--max-body-bytes", "1"], "--max-body-bytes must be an integer from 1024"),
        (["--max-queue", "-1"], "--max-queue must be"),
        (["--max-restarts", "-1"], "--max-restarts must be"),
    ],
)
def test_wrong_flags_are_refused(flags, message, capsys) -> None:
    from plait.cli import main

    assert main(["serve", *flags]) == 1
    assert message in capsys.readouterr().err


class DeadRuntime:
    """A runtime that dies as soon as it has started."""

    def __init__(self, model_path, **settings) -> None:
        self.client = self
        self.is_closed = True

    disconnect_reason, unanswered_s = "it ended", 0.0

    def set_liveness_check(self, interval_s, unresponsive_after_s) -> None:
        """Does nothing: there is no process."""

    def shutdown(self, grace_s=0.0) -> None:
        """Does nothing: there is no process."""


@pytest.mark.parametrize("error", [None, RuntimeGone("it does not start"), OSError("no space"), ValueError("odd")])
@pytest.mark.parametrize("max_restarts", [0, 1, 6])
def test_restarts_back_off_and_end_after_max_restarts(monkeypatch, error, max_restarts) -> None:
    starts = []

    def start(model_path, **settings):
        starts.append(time.monotonic())
        if len(starts) > 1 and error is not None:
            monkeypatch.setattr(restarting_runtime, "STABLE_AFTER_S", 0.0)  # as if that had taken over a minute
            raise error
        return DeadRuntime(model_path)

    monkeypatch.setattr(restarting_runtime, "Runtime", start)
    monkeypatch.setattr(restarting_runtime, "POLL_INTERVAL_S", 0.001)
    monkeypatch.setattr(restarting_runtime, "INITIAL_BACKOFF_S", 0.02)
    monkeypatch.setattr(restarting_runtime, "MAX_BACKOFF_S", 0.1)
    runtime = restarting_runtime.RestartingRuntime(max_restarts=max_restarts)
    assert wait_until(lambda: runtime.has_given_up)
    assert len(starts) == 1 + max_restarts and runtime.num_restarts == (0 if error else max_restarts)
    pauses = [after - before for before, after in itertools.pairwise(starts[1:])]
    for pause, backoff in zip(pauses, (0.02, 0.04, 0.08, 0.1, 0.1), strict=False):
        assert pause >= backoff
    with pytest.raises(NotRestarted, match=f"max-restarts {max_restarts}"):
        runtime.client  # noqa: B018
    assert wait_until(lambda: not runtime._thread.is_alive()), "nothing goes on"
    runtime.shutdown()


def test_the_longest_restart_takes_ten_seconds(monkeypatch) -> None:
    """The pauses of a hundred restarts, without waiting for them. A small model starts in a second."""
    pauses = []
    monkeypatch.setattr(restarting_runtime, "Runtime", lambda model_path, **settings: DeadRuntime(model_path))
    runtime = restarting_runtime.RestartingRuntime(max_restarts=0)
    runtime._thread.join(60)
    runtime._max_restarts, runtime._end_reason = 100, None
    monkeypatch.setattr(runtime._closing, "wait", lambda pause_s: pauses.append(pause_s))
    for _ in range(100):
        runtime._replace()
    assert pauses[:6] == [0.0, 0.5, 1.0, 2.0, 4.0, 5.0] and max(pauses) == 5.0
    assert not runtime.has_given_up
    runtime._replace()
    assert runtime.has_given_up and len(pauses) == 100


def test_a_runtime_that_ran_for_a_minute_begins_a_new_row(monkeypatch) -> None:
    monkeypatch.setattr(restarting_runtime, "Runtime", lambda model_path, **settings: DeadRuntime(model_path))
    monkeypatch.setattr(restarting_runtime, "POLL_INTERVAL_S", 0.001)
    monkeypatch.setattr(restarting_runtime, "STABLE_AFTER_S", 0.0)
    runtime = restarting_runtime.RestartingRuntime(max_restarts=1)
    assert wait_until(lambda: runtime.num_restarts > 20) and not runtime.has_given_up
    runtime.shutdown()


def test_beyond_max_restarts_the_server_stays_and_says_why(served) -> None:
    server = served("--max-restarts", "1", "--drain-timeout", "1")
    server.runtime().kill()
    assert wait_until(lambda: "plait_runtime_restarts_total 1\n" in server.get("/metrics").text)
    assert server.post(BODY).status_code == 200
    assert server.get("/health").status_code == 200
    server.runtime().kill()
    assert wait_until(lambda: server.get("/health").status_code == 503)
    for answer in (server.get("/health"), server.get("/ready"), server.post(BODY)):
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "runtime_gone"
        assert "limit of restarts in a row is reached (--max-restarts 1)" in answer.json()["error"]["message"]
    assert "retry-after" not in server.post(BODY).headers
    assert psutil.Process(server.process.pid).children() == []
    assert server.get("/status").json()["ready"] is False
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0


class FakeRuntime(DeadRuntime):
    """A runtime that records the loops it was attached to."""

    def __init__(self, model_path, *, is_closed: bool) -> None:
        super().__init__(model_path)
        self.is_closed = is_closed
        self.loops: list[asyncio.AbstractEventLoop | None] = []

    def attach_to_loop(self) -> None:
        self.loops.append(asyncio.get_running_loop())

    def detach_from_loop(self) -> None:
        self.loops.append(None)


@pytest.mark.parametrize("detaches", [False, True])
def test_replacement_is_attached_unless_the_loop_was_detached(monkeypatch, detaches) -> None:
    """The runtime is replaced while the loop is blocked, and the loop is detached before it runs the callback."""
    runtimes = [FakeRuntime(None, is_closed=False), FakeRuntime(None, is_closed=False)]
    starts = iter(runtimes)
    monkeypatch.setattr(restarting_runtime, "Runtime", lambda model_path, **settings: next(starts))
    monkeypatch.setattr(restarting_runtime, "POLL_INTERVAL_S", 0.001)
    runtime = restarting_runtime.RestartingRuntime()

    async def main() -> asyncio.AbstractEventLoop:
        runtime.attach_to_loop()
        runtimes[0].is_closed = True
        assert wait_until(lambda: runtime.num_restarts == 1)  # blocks the loop
        if detaches:
            runtime.detach_from_loop()
        await asyncio.sleep(0.05)
        while not runtimes[1].loops:
            await asyncio.sleep(0.01)
        return asyncio.get_running_loop()

    loop = asyncio.run(main())
    assert runtimes[1].loops == ([None] if detaches else [loop])
    runtime.shutdown()


def test_port_in_use_is_refused_before_a_model_is_loaded() -> None:
    with bind_listener("127.0.0.1", 0, 15.0) as first, pytest.raises(InputError, match="cannot listen"):
        bind_listener("127.0.0.1", port_of(first), 15.0)
