"""The loop notifier: no event from another thread is lost, and urgent events are set first."""

from __future__ import annotations

import asyncio
import threading

import pytest

from plait.runtime.transport.notifier import LoopNotifier, SingleWaiterEvent

ROUNDS, TASKS = 500, 8


@pytest.mark.parametrize("kind", [SingleWaiterEvent, asyncio.Event])
def test_no_notification_is_lost(kind):
    async def main():
        notifier = LoopNotifier.for_running_loop()
        counts, events = [0] * TASKS, [kind() for _ in range(TASKS)]

        def notify_all(own_indices):
            for _ in range(ROUNDS):
                for index in own_indices:
                    counts[index] += 1
                    notifier.notify(events[index], is_urgent=counts[index] % 7 == 0)

        async def wait_for_all(index):
            while True:
                events[index].clear()
                if counts[index] == ROUNDS:
                    return
                await events[index].wait()

        threads = [threading.Thread(target=notify_all, args=(range(start, TASKS, 4),)) for start in range(4)]
        for thread in threads:
            thread.start()
        async with asyncio.timeout(60):
            await asyncio.gather(*map(wait_for_all, range(TASKS)))
        for thread in threads:
            thread.join()
        return counts

    assert asyncio.run(main()) == [ROUNDS] * TASKS


def test_urgent_events_are_set_first():
    async def main():
        notifier, woken = LoopNotifier.for_running_loop(), []

        async def wait(name, event):
            await event.wait()
            woken.append(name)

        events = {name: SingleWaiterEvent() for name in "abcd"}
        tasks = [asyncio.create_task(wait(name, event)) for name, event in events.items()]
        await asyncio.sleep(0)
        for name in "abcd":
            notifier.notify(events[name], is_urgent=name in "cd")
        await asyncio.gather(*tasks)
        assert woken == ["c", "d", "a", "b"]

    asyncio.run(main())


def test_waiting_for_an_event_that_is_set_returns_at_once():
    async def main():
        event = SingleWaiterEvent()
        event.set()
        await event.wait()
        event.clear()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await event.wait()

    asyncio.run(main())


def test_notifications_from_the_loop_thread_and_after_the_loop_was_closed():
    async def main():
        notifier, event = LoopNotifier.for_running_loop(), SingleWaiterEvent()
        asyncio.get_running_loop().call_soon(notifier.notify, event)
        async with asyncio.timeout(60):
            await event.wait()
        return notifier

    with asyncio.Runner() as runner:
        notifier = runner.run(main())
        loop = runner.get_loop()
    assert loop.is_closed()
    notifier.notify(SingleWaiterEvent())


def test_flush_sets_events_at_once_and_urgent_ones_an_iteration_before():
    async def main():
        notifier, urgent, other = LoopNotifier.for_running_loop(), SingleWaiterEvent(), SingleWaiterEvent()
        notifier.notify(other)
        assert not other.is_set()
        notifier.flush()
        assert other.is_set()
        other.clear()
        notifier.notify(other)
        notifier.notify(urgent, is_urgent=True)
        notifier.flush()
        assert urgent.is_set() and not other.is_set()
        await asyncio.sleep(0)
        assert other.is_set()
        notifier.flush()  # nothing waits

    asyncio.run(main())
