"""What is stored, for how long, and what goes when a limit is reached."""

from __future__ import annotations

import asyncio
import random

from plait.runtime.server.response_store import (
    ID_BYTES,
    OVERHEAD_BYTES,
    ResponseStore,
    StoredItems,
)

LIMIT = 40_000


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def items(text: str = "", previous: StoredItems | None = None, ids: tuple[str, ...] = ()) -> StoredItems:
    return StoredItems(text.encode(), b"", ids, previous)


def stored_texts(store: ResponseStore, response_id: str, tenant: str) -> str | None:
    response = store.get(response_id, tenant)
    return None if response is None else b"".join(response.items.conversation()).decode()


def test_a_key_has_its_own_responses() -> None:
    store = ResponseStore(60, LIMIT, LIMIT)
    assert store.add("resp_1", "a", b"{}", items(ids=("msg_1",)))
    assert store.get("resp_1", "a") is not None and store.items_with("msg_1", "a") is not None
    assert store.get("resp_1", "b") is None and store.items_with("msg_1", "b") is None


def test_a_response_expires_and_its_items_stay_for_the_one_that_continues_it() -> None:
    clock = Clock()
    store = ResponseStore(60, LIMIT, LIMIT, now=clock)
    first = items("one", ids=("msg_1",))
    store.add("resp_1", "a", b"{}", first)
    clock.time = 50
    store.add("resp_2", "a", b"{}", items("two", first))
    clock.time = 61
    assert store.get("resp_1", "a") is None
    assert stored_texts(store, "resp_2", "a") == "onetwo" and store.items_with("msg_1", "a") is first
    clock.time = 111
    store.drop_expired()
    assert store.held.held("a") == 0 and store.items_with("msg_1", "a") is None


def test_items_that_expired_while_they_were_continued_are_kept() -> None:
    store = ResponseStore(60, LIMIT, LIMIT)
    first = items("one")
    store.add("resp_1", "a", b"{}", first)
    response = store.get("resp_1", "a")
    assert response is not None
    store.delete(response)
    assert store.held.held("a") == 0
    second = items("two", first)
    store.add("resp_2", "a", b"{}", second)
    assert stored_texts(store, "resp_2", "a") == "onetwo"
    assert store.held.held("a") == first.num_bytes + second.num_bytes + 2


def test_the_oldest_of_a_key_goes_first() -> None:
    store = ResponseStore(60, 10 * LIMIT, LIMIT)
    for number in range(5):
        assert store.add(f"resp_{number}", "a", b"", items("x" * 10_000))
    assert [store.get(f"resp_{number}", "a") is not None for number in range(5)] == [False, False, True, True, True]
    assert store.held.held("a") <= LIMIT


def test_a_conversation_beyond_the_limit_of_a_key_is_not_stored_and_nothing_goes() -> None:
    store = ResponseStore(60, 10 * LIMIT, LIMIT)
    first = items("x" * 30_000)
    assert store.add("resp_1", "a", b"", first)
    assert not store.add("resp_2", "a", b"", items("y" * 10_000, first))
    assert not store.add("resp_3", "a", b"x" * LIMIT, items())
    assert store.get("resp_1", "a") is not None


def test_the_key_that_holds_the_most_for_its_weight_makes_room() -> None:
    store = ResponseStore(60, LIMIT, LIMIT, {"heavy": 4.0})
    for number in range(3):
        store.add(f"heavy_{number}", "heavy", b"", items("x" * 8_000))
    store.add("light_0", "light", b"", items("x" * 8_000))
    store.add("light_1", "light", b"", items("x" * 8_000))  # beyond the limit of all
    assert store.get("light_0", "light") is None and store.get("light_1", "light") is not None
    assert all(store.get(f"heavy_{number}", "heavy") is not None for number in range(3))


def test_random_conversations_count_as_the_items_that_can_be_reached() -> None:
    rng, clock = random.Random(3), Clock()
    store = ResponseStore(100, LIMIT, LIMIT // 2, now=clock)
    names: list[tuple[str, str]] = []
    for number in range(2000):
        clock.time += rng.random() * 8
        tenant = rng.choice("abc")
        known = [name for name, owner in names if owner == tenant and store.get(name, owner)]
        if known and rng.random() < 0.1:
            deleted = store.get(rng.choice(known), tenant)
            assert deleted is not None
            store.delete(deleted)
            continue
        previous = store.get(rng.choice(known), tenant) if known and rng.random() < 0.8 else None
        new = items("x" * rng.randrange(3000), previous.items if previous else None, (f"msg_{number}",))
        names.append((f"resp_{number}", tenant))
        store.add(f"resp_{number}", tenant, b"x" * rng.randrange(500), new)
        for owner in "abc":
            alive = [found for name, one in names if one == owner and (found := store.get(name, owner))]
            reached = {id(one): one for found in alive for one in chain(found.items)}
            expected = sum(len(found.body) for found in alive) + sum(one.num_bytes for one in reached.values())
            assert store.held.held(owner) == expected <= LIMIT // 2
            assert all(store.items_with(one.ids[0], owner) is one for one in reached.values())
        assert sum(store.held.held(owner) for owner in "abc") <= LIMIT
        assert new.num_bytes >= OVERHEAD_BYTES + ID_BYTES


def chain(last: StoredItems | None) -> list[StoredItems]:
    found = []
    while last is not None:
        found.append(last)
        last = last.previous
    return found


def test_responses_expire_by_one_timer(monkeypatch) -> None:
    async def run() -> None:
        loop, timers = asyncio.get_running_loop(), []
        monkeypatch.setattr(loop, "call_later", lambda *timer: timers.append(timer) or timer)
        clock = Clock()
        store = ResponseStore(60, LIMIT, LIMIT, now=clock)
        for second in range(30):
            clock.time = second
            store.add(f"resp_{second}", "a", b"{}", items())
            store.expire_in_time()
        ((delay, expire),) = timers
        clock.time = delay
        expire()
        assert store.held.held("a") == 29 * (OVERHEAD_BYTES + 2)
        assert [delay for delay, _ in timers] == [60, 1]

    asyncio.run(run())
