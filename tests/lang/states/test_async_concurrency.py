"""Concurrent programs on one event loop: thousands at once, no threads, max_concurrency, cancellation."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import contextmanager

import pytest
from async_samples import chat, plain_program, run
from scripted_scheduler import Gate

import plait
from plait import gen

pytestmark = pytest.mark.timeout(120)


def test_two_thousand_programs_run_on_one_loop(backend):
    count, gates = 2000, []
    all_sent = threading.Event()

    def answer(prompt, request):
        gates.append(Gate(f" {len(gates)}"))
        if len(gates) == count:
            all_sent.set()
        return gates[-1]

    backend.scheduler.answer = answer
    before = threading.active_count()

    @plait.function
    async def item(s, i):
        s += f"{i}:" + gen("x")
        return await s["x"]

    async def main():
        batch = asyncio.create_task(item.arun_batch([{"i": i} for i in range(count)]))
        while not all_sent.is_set():
            await asyncio.sleep(0.01)
        assert threading.active_count() <= before + 1, "programs hold no threads"
        for gate in list(gates):
            gate.open()
        return await batch

    states = run(main())
    assert sorted(state.ret_value for state in states) == sorted(f" {i}" for i in range(count))
    assert [state.text().split(":")[0] for state in states] == [str(i) for i in range(count)]
    assert backend.scheduler.open_sessions() == 0


def test_plain_programs_hold_no_thread_while_they_wait(backend):
    gates = []

    def answer(prompt, request):
        gates.append(Gate("x"))
        return gates[-1]

    backend.scheduler.answer = answer

    async def main():
        batch = asyncio.create_task(plain_program.arun_batch([{"question": str(i)} for i in range(300)]))
        while len(gates) < 300:  # many more than there are threads
            await asyncio.sleep(0.01)
        for gate in gates:
            gate.open()
        return await batch

    assert [state["answer"] for state in run(main())] == ["x"] * 300


def test_max_concurrency_and_progress_bar(backend, monkeypatch, capsys):
    monkeypatch.setattr("plait.lang.execution.threads.shows_bars", lambda: True)
    most, now = [0], [0]

    @plait.function
    async def item(s, i):
        now[0] += 1
        most[0] = max(most[0], now[0])
        await asyncio.sleep(0.001)
        now[0] -= 1

    run(item.arun_batch([{"i": i} for i in range(20)], max_concurrency=3, progress_bar=True))
    assert most[0] == 3 and "20/20" in capsys.readouterr().err
    item.run_batch([{"i": i} for i in range(5)], progress_bar=True)
    assert "5/5" in capsys.readouterr().err


def test_the_bar_of_a_batch_is_closed_behind_its_last_item(backend, monkeypatch):
    steps, at_end = [], []

    @contextmanager
    def slow_bar(total, enabled):
        def step():
            time.sleep(0.1)  # in which the batch ends, if it does not wait for this
            steps.append(1)

        yield step
        at_end.append(len(steps))

    monkeypatch.setattr("plait.lang.execution.threads.progress", slow_bar)
    plain_program.run_batch([{"question": "Q"}] * 3, progress_bar=True)
    assert at_end == [3]


def test_cancelling_the_task_ends_its_calls(backend):
    gate = Gate("never")
    backend.script(default=gate)

    async def main():
        task = asyncio.create_task(chat.arun("Q"))
        while not gate.reached.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert backend.scheduler.open_sessions() == 0

    run(main())
