"""Weighted shares of tenants: the queue against an obvious reference, and simulations of what tenants get."""

from __future__ import annotations

import heapq
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.constrained import tenant_shares
from plait.constrained.tenant_shares import TenantQueue, TenantShares

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from("abc"), st.integers(0, 8), st.booleans()),
        st.tuples(st.just("discard"), st.sampled_from([*"abc", None]), st.integers(0, 8), st.just(False)),
        st.tuples(st.just("pop"), st.just("a"), st.just(0), st.just(False)),
    ),
    max_size=60,
)


class ListQueue:
    """The reference for tenants without units and service: a list of (tenant, its items), the next tenant first."""

    def __init__(self) -> None:
        self.turns: list[tuple[str, list[int]]] = []

    def put(self, tenant: str, item: int, first: bool) -> None:
        items = next((items for name, items in self.turns if name == tenant), None)
        if items is None:
            items = []
            self.turns.append((tenant, items))
        if item in items and first:
            items.remove(item)
        if item not in items:
            items.insert(0 if first else len(items), item)

    def pop(self) -> int:
        tenant, items = self.turns.pop(0)
        item = items[0]
        self.turns.append((tenant, items))
        self.discard(item, None)
        return item

    def discard(self, item: int, tenant: str | None) -> None:
        for name, items in self.turns:
            if tenant in (None, name) and item in items:
                items.remove(item)
        self.turns = [(name, items) for name, items in self.turns if items]


@given(STEPS)
def test_the_queue_behaves_as_lists_in_a_list(steps: list[tuple[str, str | None, int, bool]]) -> None:
    queue, reference = TenantQueue[int](TenantShares()), ListQueue()
    for kind, tenant, item, first in steps:
        if kind == "put":
            assert tenant is not None
            queue.put(tenant, item, first=first)
            reference.put(tenant, item, first)
        elif kind == "discard":
            queue.discard(item, tenant)
            reference.discard(item, tenant)
        elif len(queue):
            assert queue.pop(0.0)[1] == reference.pop()
        expected = {item for _, items in reference.turns for item in items}
        assert len(queue) == len(expected)
        assert all((number in queue) == (number in expected) for number in range(9))
        assert all(queue.num_of(name) == len(items) for name, items in reference.turns)


def serve(shares: TenantShares, num_units: int, demand: dict[str, float], seconds: float, seed: int) -> Counter[str]:
    """Simulates tenants that always want more: a unit does `demand[tenant]` seconds of work for a piece of random
    length. Returns the seconds that each tenant got."""
    rng, served, now = random.Random(seed), Counter[str](), 0.0
    queue = TenantQueue[tuple[str, int]](shares)
    running: list[tuple[float, str, float]] = []
    number = 0
    while now < seconds:
        for tenant in demand:
            while queue.num_of(tenant) < num_units:
                number += 1
                queue.put(tenant, (tenant, number))
        while len(running) < num_units:
            tenant, _ = queue.pop(now)
            length = demand[tenant] * rng.uniform(0.5, 1.5)
            shares.take(tenant)
            heapq.heappush(running, (now + length, tenant, length))
        now, tenant, length = heapq.heappop(running)
        shares.take(tenant, -1)
        shares.charge(tenant, length, now)
        served[tenant] += length
    return served


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(st.sampled_from("abcd"), st.floats(0.005, 0.2), min_size=2),
    st.sampled_from([1, 2, 3, 8]),
    st.integers(0, 5),
)
def test_tenants_that_always_want_more_get_equal_parts(demand: dict[str, float], num_units: int, seed: int) -> None:
    """However long the pieces of each are. With a unit or more each, units decide; with fewer, the service does."""
    served = serve(TenantShares(), num_units, demand, 60.0, seed)
    assert max(served.values()) <= 1.35 * min(served.values()), served


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 5))
def test_parts_are_in_the_proportion_of_the_weights(first: int, second: int, seed: int) -> None:
    shares = TenantShares({"a": float(first), "b": float(second)})
    served = serve(shares, 12 * (first + second), {"a": 0.05, "b": 0.05}, 20.0, seed)
    assert served["a"] / served["b"] == pytest.approx(first / second, rel=0.1)


def test_a_tenant_that_arrives_has_its_part_at_once_and_no_more() -> None:
    shares = TenantShares()
    for step in range(1000):
        shares.charge("a", 1.0, step * 0.01)
    served = Counter[str]()
    for step in range(1000, 2000):
        tenant = min("ab", key=lambda name: shares.order(name, step * 0.01))
        shares.charge(tenant, 1.0, step * 0.01)
        served[tenant] += 1
    assert served["b"] / 1000 == pytest.approx(0.5, abs=0.1), "a is not made to wait for what it got alone"


@given(st.lists(st.integers(0, 30), min_size=2, max_size=6))
def test_units_move_until_no_tenant_is_above_another(held: list[int]) -> None:
    names = "abcdef"[: len(held)]
    shares = TenantShares()
    for name, count in zip(names, held, strict=True):
        shares.take(name, count)
    givers = set[str]()
    while (giver := shares.most_above("a", shares.holders())) is not None:
        assert shares.held(giver) >= 2
        shares.take(giver, -1)
        shares.take("a")
        givers.add(giver)
    for name in names[1:]:
        assert shares.held(name) <= max(1, shares.held("a") + 1), "another tenant is above a"
        assert name not in givers or shares.most_above(name, ["a"]) is None, "a took more than its part"


@pytest.mark.parametrize("weight", [0.001, 1.0, 1000.0])
def test_a_tenant_without_units_gets_one_from_whoever_has_two(weight: float) -> None:
    """Whatever the weights: neither one with a single unit and a small weight, nor a large weight stands before it."""
    shares = TenantShares({"light": 0.001, "heavy": weight})
    shares.take("light")
    shares.take("heavy", 2)
    assert shares.most_above("new", shares.holders()) == "heavy"
    shares.take("heavy", -1)
    shares.take("new")
    assert all(shares.most_above(name, shares.holders()) is None for name in ("light", "heavy", "new", "other"))


def test_what_is_ahead_of_a_tenant_is_bounded_by_its_own_part() -> None:
    shares = TenantShares({"w": 4.0})
    shares.take("flood", 1000)
    shares.take("w", 2)
    assert shares.ahead("new", 2) == 2 + 2 + 2, "of the others as many as it has, for their weights"
    assert shares.ahead("w", 2) == 4 + 1
    assert shares.ahead("flood", 1) == 1001 + 2


def test_nothing_is_ahead_of_the_first_unit_of_a_tenant() -> None:
    """A small weight would keep it out for as long as a tenant of a large one holds what there is."""
    shares = TenantShares({"light": 0.001, "heavy": 1000.0})
    shares.take("heavy", 64)
    assert shares.ahead("light", 1) == 1
    assert shares.ahead("light", 2) == 66, "more than one at once are not the first"
    shares.take("light")
    assert shares.ahead("light", 1) == 66


def test_accounts_of_idle_tenants_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_shares, "MAX_IDLE_ACCOUNTS", 10)
    shares = TenantShares()
    shares.take("busy")
    for number in range(100):
        shares.charge(str(number), 1.0, 0.0)
    assert len(shares._accounts) == 11 and shares.held("busy") == 1
    assert shares.service("99", 0.0) == 1.0 and shares.service("5", 0.0) == 0.0
