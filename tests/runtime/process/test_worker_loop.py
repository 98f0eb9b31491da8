"""The loop of the runtime process: what it does first, and when it starts the compile processes."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest

from plait.runtime.process import worker


class Loop:
    """An engine loop and its transport. Each step takes `step_s`, or waits as long as it may if there is no message."""

    def __init__(self, clock: SimpleNamespace, step_s: float | None, num_steps: int) -> None:
        self.clock, self.step_s, self.num_steps = clock, step_s, num_steps
        self.events: list[str] = []
        self.busy_after = range(0)  # the numbers of steps after which a sequence runs
        self.compiler = self.vocabulary = self
        self.tokenized = threading.Event()

    @property
    def should_stop(self) -> bool:
        return self.num_steps == 0

    @property
    def has_work(self) -> bool:
        return self.events.count("step") in self.busy_after

    def step(self, timeout_s: float | None) -> None:
        self.num_steps -= 1
        self.events.append("waits" if timeout_s is None else "step")
        self.clock.now += (timeout_s or 0.0) if self.step_s is None else self.step_s

    def encode(self, text: str) -> list[int]:
        self.tokenized.set()
        return []

    def start_workers(self) -> None:
        self.events.append("start")


@pytest.fixture
def clock(monkeypatch):
    clock, switch_s = SimpleNamespace(now=100.0), sys.getswitchinterval()
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: clock.now))
    yield clock
    sys.setswitchinterval(switch_s)


def test_other_threads_give_the_interpreter_to_the_loop_at_once(clock) -> None:
    worker._run(loop := Loop(clock, None, 1), loop)
    assert sys.getswitchinterval() == worker.SWITCH_S < 0.001


@pytest.mark.parametrize(
    ("step_s", "expected"),
    [
        (None, ["step", "start", "waits", "waits"]),  # no message comes
        (worker.COMPILE_PROCESSES_AFTER_S / 2, ["step", "step", "start", "waits"]),  # messages and calls
        (10.0, ["step", "start", "waits", "waits"]),
    ],
)
def test_compile_processes_start_once_after_the_owner_could_connect(clock, step_s, expected) -> None:
    loop = Loop(clock, step_s, 3)
    worker._run(loop, loop)
    assert loop.events == expected and loop.tokenized.wait(60)


def test_compile_processes_start_when_no_sequence_has_run_for_a_moment(clock) -> None:
    loop = Loop(clock, worker.COMPILE_PROCESSES_AFTER_S / 2, 6)
    loop.busy_after = range(1, 4)
    worker._run(loop, loop)
    assert loop.events == ["step"] * 5 + ["start", "waits"]
