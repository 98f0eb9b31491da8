"""Steps on several threads: every item is computed once, phases do not overlap, late threads are not waited for."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
import threading
import time

import numpy as np
import pytest

from plait.kernels.cpu.kernel_args import KernelArgs, args_at, int64_matrix
from plait.kernels.cpu.parallel import thread_pool
from plait.kernels.cpu.parallel.atomics import SLEEPERS, SPINS_BEFORE_SLEEP, atomic_load, atomic_store, spin_pause
from plait.kernels.cpu.parallel.thread_pool import SERIAL_PART, ThreadKernel, ThreadPool
from plait.kernels.cpu.parallel.threads import (
    COUNTER_STRIDE,
    ThreadContext,
    barrier_wait,
    claim_work,
    items_per_claim,
    mark_done,
)
from plait.runtime.process import worker

VALUES, COUNTERS, DELAYS, ENTRIES = 0, 1, 2, 3
TIMEOUT_S = 120.0


def _run_phases(ctx, values, delays):
    """In each phase, item i becomes one more than item 7 i + 3 of the phase before."""
    phases, items = values.shape
    for phase in range(1, phases):
        count = items_per_claim(items, ctx)
        while True:
            first = claim_work(ctx.counters, phase, count)
            if first >= items:
                break
            last = min(items, first + count)
            for item in range(first, last):
                for _ in range(delays[0, (5 * phase + item) % delays.shape[1]]):
                    spin_pause()
                values[phase, item] += values[phase - 1, (7 * item + 3) % items] + 1
            mark_done(ctx.counters, phase, last - first)
        barrier_wait(ctx.counters, phase, items)


def phases(thread_id, threads, address):
    if thread_id == SERIAL_PART:
        return
    args = args_at(address, ENTRIES)
    ctx = ThreadContext(thread_id, threads, args[COUNTERS, 0], 0)
    _run_phases(ctx, int64_matrix(args, VALUES), int64_matrix(args, DELAYS))


def answer(thread_id, threads, address):
    """Waits for a number other than 0 in the first of the values, and then writes it to the second."""
    if thread_id == SERIAL_PART:
        values = args_at(address, ENTRIES)[VALUES, 0]
        for _ in range(1 << 27):  # some seconds
            if atomic_load(values):
                atomic_store(values + 8, atomic_load(values))
                break
            spin_pause()


phases_kernel, answer_kernel = ThreadKernel(phases), ThreadKernel(answer)


class Work:
    """Phases of items, and the counters by which threads share them."""

    def __init__(self, phases: int, items: int, delays: list[int]) -> None:
        self.args = KernelArgs(ENTRIES)
        self.values = np.zeros((phases, items), np.int64)
        self.counters = np.zeros((phases, 2 * COUNTER_STRIDE), np.int64)
        for entry, array in (
            (VALUES, self.values),
            (COUNTERS, self.counters),
            (DELAYS, np.array([delays], np.int64)),
        ):
            self.args.set(entry, array)

    def run(self, threads: int) -> None:
        self.values[:] = 0
        self.counters[:] = 0
        phases_kernel(self.args.descriptors, threads)

    def check(self) -> None:
        expected = np.arange(len(self.values))[:, None] * np.ones_like(self.values)
        assert np.array_equal(self.values, expected)
        assert (self.counters[1:, COUNTER_STRIDE] == self.values.shape[1]).all(), "finished items"
        assert not self.counters[:, COUNTER_STRIDE + 1].any(), "threads that still sleep"


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_every_item_is_computed_once_in_every_step(threads) -> None:
    """More threads than processors as well, and different amounts of work in successive steps."""
    for phases, items in ((2, 1), (40, 3), (7, 200), (2, 5)):
        work = Work(phases, items, [0])
        for _ in range(25):
            work.run(threads)
            work.check()


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_that_wait_long_sleep_and_are_woken(threads) -> None:
    """Some items take much longer than a thread spins."""
    work = Work(12, 8, [0, 0, 0, 3 * SPINS_BEFORE_SLEEP, 0, 0, 0, 0, 0, 8 * SPINS_BEFORE_SLEEP, 0])
    for _ in range(10):
        work.run(threads)
        work.check()


def test_a_step_does_not_wait_for_threads_that_have_not_begun() -> None:
    """Nobody serves this control block besides the caller."""
    work, pool = Work(30, 20, [0]), ThreadPool()
    thread_pool.launch(phases_kernel.address, work.args.descriptors, 4, pool.control)
    work.check()


def test_a_thread_that_wakes_up_after_the_step_does_nothing() -> None:
    work, pool = Work(3, 4, [0]), ThreadPool()
    thread_pool.launch(phases_kernel.address, work.args.descriptors, 2, pool.control)
    work.counters[:] = 0  # a thread that still took part would compute the items again
    pool.grow(2)
    gate = (ctypes.c_int64 * 1).from_address(pool.control + thread_pool.GATE)
    assert comes_true(lambda: gate[0] == thread_pool.CLOSED + 1)
    assert (work.values == [[0] * 4, [1] * 4, [2] * 4]).all()


def test_idle_threads_sleep() -> None:
    """A thread that waits for the next step takes no processor time."""
    pool = ThreadPool()
    pool.grow(3)
    address = pool.control + thread_pool.STEP + SLEEPERS
    sleepers = (ctypes.c_int64 * 1).from_address(address)
    assert comes_true(lambda: sleepers[0] == 2)


def test_other_threads_run_python_during_a_step(monkeypatch) -> None:
    monkeypatch.setattr(sys, "getswitchinterval", lambda: worker.SWITCH_S)
    work = Work(1, 2, [0])
    step = threading.Thread(target=answer_kernel, args=(work.args.descriptors, 1), daemon=True)
    answer_kernel.address  # noqa: B018 (compiles it)
    step.start()
    while step.is_alive() and not work.values[0, 1]:
        work.values[0, 0] += 1
        time.sleep(0.001)
    step.join(TIMEOUT_S)
    assert work.values[0, 1] > 0


@pytest.mark.parametrize("interval_s", [worker.SWITCH_S, 0.005])
def test_steps_of_several_threads_come_one_after_the_other(monkeypatch, interval_s) -> None:
    """They share the threads of the pool."""
    monkeypatch.setattr(sys, "getswitchinterval", lambda: interval_s)

    def run() -> None:
        work = Work(7, 20, [0, 2])
        for _ in range(100):
            work.run(3)
            work.check()
        done.append(work)

    done: list[Work] = []
    callers = [threading.Thread(target=run, daemon=True) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(TIMEOUT_S)
    assert len(done) == len(callers)


def test_a_forked_process_has_threads_of_its_own() -> None:
    Work(5, 9, [0]).run(3)
    process = multiprocessing.get_context("fork").Process(target=_run_in_child)
    process.start()
    process.join(TIMEOUT_S)
    assert process.exitcode == 0
    Work(5, 9, [0]).run(3)


def _run_in_child() -> None:
    work = Work(20, 9, [0, 4 * SPINS_BEFORE_SLEEP, 0])
    for _ in range(3):
        work.run(3)
        work.check()
    started = [thread for thread in threading.enumerate() if thread.name == thread_pool.THREAD_NAME]
    os._exit(0 if len(started) == 2 else 1)


def comes_true(condition) -> bool:
    deadline = time.monotonic() + TIMEOUT_S
    while not (is_true := condition()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return is_true
