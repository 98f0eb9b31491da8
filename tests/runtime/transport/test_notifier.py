"""Waking tasks from other threads: nothing rung is lost, and what is urgent comes first."""

from __future__ import annotations

import asyncio
import threading

import pytest

from plait.runtime.transport.notifier import LoopNotifier, SingleWaiterEvent

ROUNDS, TASKS = 500, 8


@pytest.mark.parametrize("kind", [SingleWaiterEvent, asyncio.Event])
def test_no_ring_is_lost(kind):
    async def main():
        notifier = LoopNotifier.for_running_loop()
        counts, signals = [0] * TASKS, [kind() for _ in range(TASKS)]

        def notify(mine):
            for _ in range(ROUNDS):
                for index in mine:
                    counts[index] += 1
                    notifier.notify(signals[index], is_urgent=counts[index] % 7 == 0)

        async def until_all_came(index):
            while True:
                signals[index].clear()
                if counts[index] == ROUNDS:
                    return
                await signals[index].wait()

        threads = [threading.Thread(target=notify, args=(range(at, TASKS, 4),)) for at in range(4)]
        for thread in threads:
            thread.start()
        async with asyncio.timeout(60):
            await asyncio.gather(*map(until_all_came, range(TASKS)))
        for thread in threads:
            thread.join()

    asyncio.run(main())


def test_what_is_urgent_comes_first():
    async def main():
        notifier, woken = LoopNotifier.for_running_loop(), []

        async def wait(name, signal):
            await signal.wait()
            woken.append(name)

        signals = {name: SingleWaiterEvent() for name in "abcd"}
        tasks = [asyncio.create_task(wait(*each)) for each in signals.items()]
        await asyncio.sleep(0)
        for name in "abcd":
            notifier.notify(signals[name], is_urgent=name in "cd")
        await asyncio.gather(*tasks)
        assert woken == ["c", "d", "a", "b"]

    asyncio.run(main())


def test_a_signal_that_is_set_does_not_wait():
    async def main():
        signal = SingleWaiterEvent()
        signal.set()
        await signal.wait()
        signal.clear()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await signal.wait()

    asyncio.run(main())


def test_a_ring_in_the_loops_own_thread_and_one_after_its_end():
    async def main():
        notifier, signal = LoopNotifier.for_running_loop(), SingleWaiterEvent()
        asyncio.get_running_loop().call_soon(notifier.notify, signal)
        async with asyncio.timeout(60):
            await signal.wait()
        return notifier

    with asyncio.Runner() as runner:
        notifier = runner.run(main())
        loop = runner.get_loop()
    assert loop.is_closed()
    notifier.notify(SingleWaiterEvent())
