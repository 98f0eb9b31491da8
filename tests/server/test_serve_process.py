"""`plait serve` as a process: what its signals do, and what the death of its runtime does."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import psutil
import pytest
from asgi_server import wait_until
from tiny_llama_gguf import write_small_model

from plait.runtime.errors import InputError, RuntimeGone
from plait.runtime.server import restarting_runtime
from plait.runtime.server.serve import _bind
from plait.runtime.server.settings import server_settings

pytestmark = pytest.mark.usefixtures("default_signals")
BODY = {"model": "default", "prompt": "One, two,", "max_tokens": 2}
LONG = {**BODY, "max_tokens": 900_000, "ignore_eos": True, "stream": True}


class Served:
    """A server process, its address, and what it logged."""

    def __init__(self, model, *flags: str, environment: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-P", "-m", "plait.cli", "serve", str(model), "--port", "0", *flags]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        said = self.process.stdout.readline()
        assert said.startswith("plait serves at "), self.process.stderr.read()
        self.address = said.split()[-1]
        self.lines: list[str] = []
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True)
        self._reader.start()

    def runtime(self) -> psutil.Process:
        (runtime,) = psutil.Process(self.process.pid).children()
        return runtime

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.address + path, timeout=10)

    def post(self, body) -> httpx.Response:
        return httpx.post(f"{self.address}/v1/completions", json=body, timeout=60)

    def streaming(self) -> tuple[threading.Thread, list[str]]:
        """A long answer that is being read."""
        events: list[str] = []

        def read() -> None:
            with httpx.stream("POST", f"{self.address}/v1/completions", json=LONG, timeout=60) as answer:
                events.extend(answer.iter_lines())

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        assert wait_until(lambda: any(each["tokens"] > 2 for each in self.get("/status").json()["requests"]), 20)
        return reader, events

    def ended(self, timeout_s: float = 20) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(5)
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self._reader.join(5)
        self.process.stderr.close()


@pytest.fixture(scope="module")
def endless_model(tmp_path_factory):
    """Answers of a million tokens: whatever has to happen while one runs will."""
    return write_small_model(tmp_path_factory.mktemp("models") / "endless.gguf", 1_000_000)


@pytest.fixture
def served(endless_model):
    running: list[Served] = []

    def start(*flags: str, **options) -> Served:
        running.append(Served(endless_model, *flags, **options))
        return running[-1]

    yield start
    for each in running:
        each.close()


def test_a_runtime_that_dies_or_hangs_and_a_drain_that_takes_too_long(served) -> None:
    server = served("--stuck-after", "1", "--drain-timeout", "1", "--log-format", "json")
    assert wait_until(lambda: server.get("/health").status_code == 200)

    runtime = server.runtime()
    runtime.suspend()
    assert wait_until(lambda: server.get("/health").status_code == 503)
    runtime.resume()
    assert wait_until(lambda: server.get("/health").status_code == 200)

    reader, events = server.streaming()
    runtime.kill()
    reader.join(10)
    last = json.loads([line for line in events if line][-1].removeprefix("data: "))
    assert last["error"]["code"] == "runtime_gone"
    refused = server.post(BODY)
    assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
    assert server.get("/health").status_code == server.get("/ready").status_code == 503
    assert wait_until(lambda: server.get("/health").status_code == 200, 60)
    assert server.post(BODY).status_code == 200
    assert wait_until(lambda: server.get("/ready").status_code == 200)
    assert "plait_runtime_restarts_total 1\n" in server.get("/metrics").text

    reader, events = server.streaming()
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.ended() == 0 and time.monotonic() - began > 1
    reader.join(5)
    assert json.loads([line for line in events if line][-1].removeprefix("data: "))["error"]["code"] == "aborted"
    logged = [json.loads(line) for line in server.lines]
    assert any(line.get("route") == "/v1/completions" and line["status"] == 200 for line in logged)
    assert not any("Traceback" in line for line in server.lines)


def test_running_requests_end_before_the_server_does(served) -> None:
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
    runtime.suspend()  # so that the request runs for as long as it takes us to see it
    asking = threading.Thread(target=ask)
    asking.start()
    assert wait_until(lambda: status()["in_flight"] == 1, 60)
    server.process.send_signal(signal.SIGTERM)
    assert wait_until(lambda: server.get("/ready").status_code == 503, 60)
    runtime.resume()
    asking.join(60)
    assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 8
    assert server.ended() == 0


def test_a_second_interrupt_does_not_wait(served) -> None:
    server = served("--drain-timeout", "600", "--max-queue", "1")
    reader, events = server.streaming()
    server.process.send_signal(signal.SIGINT)
    assert wait_until(lambda: server.get("/ready").status_code == 503)
    refused = server.post(BODY)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGINT)
    assert server.ended() == 130
    reader.join(5)
    assert "aborted" in [line for line in events if line][-1]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--api-key", ""], "API key"),
        (["--api-key-file", "/nowhere"], "cannot read the API keys"),
        (["--cors-origin", "example.com"], "cors_origins"),
        (["--drain-timeout", "-1"], "drain_timeout_s"),
        (["--idle-timeout", "nan"], "idle_timeout_s"),
        (["--max-body-bytes", "1"], "max_body_bytes"),
        (["--max-queue", "-1"], "max_queue"),
    ],
)
def test_wrong_flags_are_refused_at_once(flags, said, capsys) -> None:
    from plait.cli import main

    assert main(["serve", *flags]) == 1
    assert said in capsys.readouterr().err


class Dying:
    """A runtime that ends as soon as it has started."""

    def __init__(self, model_path, **settings) -> None:
        self.client = self
        self.is_closed = True

    def shutdown(self) -> None:
        """Nothing is left to end."""


@pytest.mark.parametrize("does_start", [True, False])
def test_a_runtime_that_cannot_stay_up_is_given_up_after_longer_and_longer_pauses(monkeypatch, does_start) -> None:
    starts = []

    def start(model_path, **settings):
        starts.append(time.monotonic())
        if len(starts) > 1 and not does_start:
            raise RuntimeGone("it does not start")
        return Dying(model_path)

    monkeypatch.setattr(restarting_runtime, "Runtime", start)
    monkeypatch.setattr(restarting_runtime, "POLL_INTERVAL_S", 0.001)
    monkeypatch.setattr(restarting_runtime, "INITIAL_BACKOFF_S", 0.02)
    monkeypatch.setattr(restarting_runtime, "MAX_FAILURES", 5)
    runtime = restarting_runtime.RestartingRuntime()
    assert wait_until(lambda: runtime.has_given_up)
    assert len(starts) == 6
    pauses = [after - before for before, after in itertools.pairwise(starts[1:])]
    for pause, least in zip(pauses, (0.02, 0.04, 0.08, 0.16), strict=True):
        assert pause >= least
    with pytest.raises(RuntimeGone):
        runtime.client  # noqa: B018
    runtime.shutdown()


class Joined(Dying):
    """A runtime that lives on, and notes in which loop it was joined."""

    def __init__(self, model_path, *, is_closed: bool) -> None:
        super().__init__(model_path)
        self.is_closed = is_closed
        self.loops: list[asyncio.AbstractEventLoop | None] = []

    def attach_to_loop(self) -> None:
        self.loops.append(asyncio.get_running_loop())

    def detach_from_loop(self) -> None:
        self.loops.append(None)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_loop_that_was_left_is_joined_by_no_later_runtime(monkeypatch, leaves) -> None:
    """A runtime is replaced while the loop is busy leaving: what it then finds to do must not join it again."""
    runtimes = [Joined(None, is_closed=False), Joined(None, is_closed=False)]
    starts = iter(runtimes)
    monkeypatch.setattr(restarting_runtime, "Runtime", lambda model_path, **settings: next(starts))
    monkeypatch.setattr(restarting_runtime, "POLL_INTERVAL_S", 0.001)
    runtime = restarting_runtime.RestartingRuntime()

    async def main() -> asyncio.AbstractEventLoop:
        runtime.attach_to_loop()
        runtimes[0].is_closed = True
        assert wait_until(lambda: runtime.num_restarts == 1)  # the loop stands still meanwhile
        if leaves:
            runtime.detach_from_loop()
        await asyncio.sleep(0.05)
        while not runtimes[1].loops:
            await asyncio.sleep(0.01)
        return asyncio.get_running_loop()

    loop = asyncio.run(main())
    assert runtimes[1].loops == ([None] if leaves else [loop])
    runtime.shutdown()


def test_a_port_that_another_server_takes_is_told_before_either_has_its_model() -> None:
    with _bind(server_settings(port=0)) as first, pytest.raises(InputError, match="cannot listen"):
        _bind(server_settings(port=first.getsockname()[1]))
