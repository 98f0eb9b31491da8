"""The call queue alone: places and turns of keys, the ends of a wait, and random requests against plain counts."""

from __future__ import annotations

import asyncio
import math
import random
import time

import pytest
from example_share import share_of

from plait.runtime.errors import QueueTimeout
from plait.runtime.server.errors import ApiError
from plait.runtime.server.http.call_queue import CallQueue, Place
from plait.runtime.server.settings import server_settings


def make(**settings) -> CallQueue:
    return CallQueue(server_settings(**settings))


def begin(queue: CallQueue, key: str) -> Place:
    place = queue.admit(key)
    assert queue.begin(place)
    return place


def waiting(queue: CallQueue, key: str, deadline: float = math.inf) -> tuple[Place, asyncio.Task[None]]:
    place = queue.admit(key)
    assert not queue.begin(place)
    return place, asyncio.create_task(place.wait_for_turn(deadline))


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_turns_go_to_the_key_with_the_fewest_running_calls() -> None:
    async def go() -> None:
        queue = make(max_running=2)
        running = [begin(queue, "a") for _ in range(4)]  # two run, two wait in the runtime
        flood = [waiting(queue, "a") for _ in range(50)]
        begun = [begin(queue, "b"), begin(queue, "b")]  # its share, whatever the other key has
        victims = [waiting(queue, "b") for _ in range(3)]
        await turn()
        queue.end(running[0])
        await turn()
        assert [task.done() for _, task in victims] == [False] * 3, "b has its share"
        queue.end(begun[0])
        await turn()
        assert [task.done() for _, task in victims] == [True, False, False], "its own place is for its next"
        assert not any(task.done() for _, task in flood)
        for place, task in [*flood, *victims]:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            queue.end(place)
        for place in [*running[1:], begun[1]]:
            queue.end(place)
        assert (queue.num_calls, queue.num_rows, queue.num_waiting) == (0, 0, 0)

    asyncio.run(go())


def test_a_key_without_calls_begins_at_once() -> None:
    async def go() -> None:
        queue = make(max_running=1)
        for _ in range(2):
            begin(queue, "a")
        flood = [waiting(queue, "a") for _ in range(20)]
        for key in "bcdefghij":
            begin(queue, key)
        assert not any(task.done() for _, task in flood)
        for _, task in flood:
            task.cancel()

    asyncio.run(go())


def test_with_a_queue_time_only_running_calls_are_in_the_runtime() -> None:
    """A wait there has no limit."""
    queue = make(max_running=3, max_queue_time_s=1.0)
    for _ in range(3):
        begin(queue, "")
    assert not queue.begin(queue.admit(""))


def test_the_capacity_is_shared_by_weight() -> None:
    queue = make(max_running=4, max_queue=4, key_weights={"flood": 3.0})
    for key, most in (("flood", 8), ("victim", 2), ("flood", 0)):
        num_admitted = 0
        while queue.refusal(key) is None:
            queue.admit(key)
            num_admitted += 1
        assert num_admitted == most
    refusal = queue.refusal("flood")
    assert refusal is not None and refusal.is_own_share
    assert queue.refusal("another") is None


def test_one_key_fills_its_server_but_not_that_of_others() -> None:
    queue = make(max_running=4, max_queue=4)
    for _ in range(8):
        queue.admit("flood")
    refusal = queue.refusal("flood")
    assert refusal is not None and not refusal.is_own_share and "8 calls are running or waiting" in refusal.text
    assert queue.refusal("another") is None


def test_the_first_call_of_a_key_has_a_place_whatever_the_weights() -> None:
    queue = make(max_running=4, max_queue=4, key_weights={"flood": 1000.0, "light": 0.001})
    for _ in range(8):
        queue.admit("flood")
    assert queue.refusal("light") is None
    queue.admit("light")
    assert queue.refusal("light") is not None and queue.refusal("flood") is not None


def test_the_newest_goes_first_when_the_oldest_is_late() -> None:
    async def go() -> None:
        queue = make(max_running=1, max_queue_time_s=10.0)
        running = begin(queue, "")
        waits = [waiting(queue, "") for _ in range(4)]
        await turn()
        order = []
        for age_s in (0.0, 6.0, 0.0, 0.0):
            oldest = next(place for place, task in waits if not task.done())
            oldest.arrival_time -= age_s
            queue.end(running)
            await turn()
            running = next(place for place, task in waits if task.done() and place not in order)
            order.append(running)
        places = [place for place, _ in waits]
        assert order == [places[0], places[3], places[2], places[1]], "the second had waited for 6 s of 10"

    asyncio.run(go())


def test_a_wait_in_parts_keeps_its_place_in_the_line() -> None:
    async def go() -> None:
        queue = make(max_running=1)
        running = [begin(queue, ""), begin(queue, "")]
        first = queue.admit("")
        await first.wait_for_turn(math.inf, at_most_s=0.01)
        assert not first.has_begun and queue.num_waiting == 1
        second, task = waiting(queue, "")
        await turn()
        queue.end(running[0])  # while `first` does not wait
        await turn()
        assert first.has_begun and not task.done() and queue.begin(first)
        queue.end(running[1])
        await task
        assert second.has_begun

    asyncio.run(go())


@pytest.mark.parametrize("which", ["own", "server", "drain", "both"])
def test_a_wait_ends_by_each_of_its_limits(which) -> None:
    async def go() -> None:
        queue = make(max_running=1, max_queue_time_s=0.05 if which in ("server", "both") else 0.0)
        begun, start = begin(queue, ""), time.monotonic()
        if not queue.max_queue_time_s:
            begin(queue, "")
        deadline = start + (0.02 if which == "both" else 0.1) if which in ("own", "both") else math.inf
        place, task = waiting(queue, "", deadline)
        if which == "drain":
            await turn()
            assert place.end_wait("the server is shutting down", "draining")
            assert not place.end_wait("again", "draining")
        with pytest.raises((QueueTimeout, ApiError)) as caught:
            await task
        if which in ("own", "both"):
            assert isinstance(caught.value, QueueTimeout) and time.monotonic() >= deadline
        else:
            assert isinstance(caught.value, ApiError)
            code = "draining" if which == "drain" else "queue_full"
            assert (caught.value.status, caught.value.code, caught.value.headers["Retry-After"]) == (503, code, "1")
        if which == "server":
            assert time.monotonic() >= start + 0.05, "nothing is refused earlier"
        assert queue.num_waiting == 0
        queue.end(place)
        queue.end(begun)
        assert not place.has_begun

    asyncio.run(go())


@pytest.mark.parametrize("seed", range(share_of(30)))
def test_random_requests_leave_nothing_behind_and_nobody_waits_beside_room(seed) -> None:
    """Requests of some keys arrive, wait, run, change their size, are cancelled and end, in a random order."""

    async def go() -> None:
        rng = random.Random(seed)
        queue = make(max_running=rng.randint(1, 6), max_queue=40, max_queue_time_s=rng.choice([0.0, 3600.0]))
        keys = "abc"[: rng.randint(1, 3)]
        running: list[Place] = []
        tasks: dict[Place, asyncio.Task[None]] = {}
        for _ in range(300):
            action, key = rng.random(), rng.choice(keys)
            if action < 0.45 and queue.refusal(key) is None:
                place = queue.admit(key)
                if queue.begin(place):
                    running.append(place)
                else:
                    tasks[place] = asyncio.create_task(place.wait_for_turn(math.inf))
            elif action < 0.75 and running:
                queue.end(running.pop(rng.randrange(len(running))))
            elif action < 0.85 and running:
                queue.set_size(rng.choice(running), rng.randint(1, 5), rng.randint(1, 5))
            elif tasks and action < 0.95:
                place = rng.choice(list(tasks))
                task = tasks.pop(place)
                task.cancel()
                if rng.random() < 0.5:  # it may have its turn in the same moment
                    await turn()
                await asyncio.gather(task, return_exceptions=True)
                queue.end(place)
            await turn()
            for place in [place for place, task in tasks.items() if task.done()]:
                tasks.pop(place).result()
                running.append(place)
            places = [*running, *tasks]
            assert queue.num_calls == sum(place.num_calls for place in places)
            assert queue.num_rows == sum(place.num_rows for place in running)
            assert queue.num_waiting == len(tasks)
            has_room = queue.num_rows < queue.max_running * (1 if queue.max_queue_time_s else 2)
            assert not (has_room and tasks), "a request waits beside room"
            without = {place.key for place in tasks} - {place.key for place in running}
            assert not without, "a key without a running request waits"
        for place, task in tasks.items():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            queue.end(place)
        for place in running:
            queue.end(place)
        assert (queue.num_calls, queue.num_rows, queue.num_waiting) == (0, 0, 0)
        assert not queue._places.holders() and not queue._turns.holders()

    asyncio.run(go())
