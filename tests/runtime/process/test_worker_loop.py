"""The loop of the runtime process, and when it builds what constraints need."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest

from plait.runtime.errors import CorruptModel
from plait.runtime.process import idle_work, worker
from plait.runtime.process.idle_work import IDLE_S, POLL_S, START_S, IdleWork


class Pool:
    """A compile pool whose parts are built when the test says so."""

    def __init__(self, num_pieces: int) -> None:
        self.left, self.builds = num_pieces, self
        self.events: list[str] = []
        self.may_build = threading.Semaphore(0)
        self.error: Exception | None = None

    @property
    def warm_up_pieces(self) -> range:
        return range(self.left)

    def warm_up_piece(self) -> None:
        assert threading.current_thread() is not threading.main_thread()
        self.events.append("begins")
        assert self.may_build.acquire(timeout=60)
        self.left -= 1
        self.events.append("built")
        if self.error is not None:
            raise self.error

    def start_workers(self) -> None:
        self.events.append("processes")


@pytest.fixture
def clock(monkeypatch):
    clock, switch_s = SimpleNamespace(now=100.0), sys.getswitchinterval()
    monkeypatch.setattr(idle_work, "time", SimpleNamespace(monotonic=lambda: clock.now))
    yield clock
    sys.setswitchinterval(switch_s)


def build(pool: Pool, work: IdleWork) -> None:
    """Lets the part that was begun end."""
    pool.may_build.release()
    assert work._thread is not None
    work._thread.join(60)


def test_other_threads_give_the_interpreter_to_the_loop_at_once(clock) -> None:
    steps: list[float | None] = []
    loop = SimpleNamespace(compiler=Pool(1), has_work=False)
    transport = SimpleNamespace(should_stop=False)

    def step(timeout_s: float | None) -> None:
        steps.append(timeout_s)
        transport.should_stop = len(steps) == 2

    loop.step = step
    worker._run(loop, transport)
    assert sys.getswitchinterval() == worker.SWITCH_S < 0.001
    assert steps == [pytest.approx(START_S)] * 2


def test_parts_are_built_one_at_a_time_and_then_the_processes_start(clock) -> None:
    work = IdleWork(pool := Pool(2))
    work.go_on(is_busy=False)
    assert pool.events == [] and work.timeout_s() == pytest.approx(START_S), "the owner is about to ask"
    clock.now += START_S
    work.go_on(is_busy=False)
    work.go_on(is_busy=False)
    assert work.timeout_s() == POLL_S
    build(pool, work)
    work.go_on(is_busy=False)
    build(pool, work)
    assert pool.events == ["begins", "built"] * 2
    work.go_on(is_busy=False)
    work.go_on(is_busy=False)
    assert pool.events == ["begins", "built"] * 2 + ["processes"] and work.timeout_s() is None


def test_no_part_begins_while_sequences_run_and_shortly_after(clock) -> None:
    work = IdleWork(pool := Pool(2))
    clock.now += IDLE_S
    work.go_on(is_busy=True)
    clock.now += 0.9 * IDLE_S
    work.go_on(is_busy=False)
    assert pool.events == []
    clock.now += 0.1 * IDLE_S + 1e-6
    work.go_on(is_busy=False)
    work.go_on(is_busy=True)  # a sequence comes while the first part is built
    build(pool, work)
    work.go_on(is_busy=False)
    assert pool.events == ["begins", "built"] and 0 < work.timeout_s() <= IDLE_S
    clock.now += IDLE_S
    work.go_on(is_busy=False)
    build(pool, work)
    assert pool.events == ["begins", "built"] * 2


def test_a_tokenizer_that_cannot_be_built_ends_no_process(clock) -> None:
    work = IdleWork(pool := Pool(1))
    pool.error, clock.now = CorruptModel("the lists contradict each other"), clock.now + START_S
    work.go_on(is_busy=False)
    build(pool, work)
    work.go_on(is_busy=False)
    assert pool.events == ["begins", "built", "processes"]
