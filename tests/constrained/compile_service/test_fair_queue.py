"""The fair queue against an obvious reference, and its bound on the wait of a tenant."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plait.constrained.compile_service.fair_queue import FairQueue

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from("abc"), st.integers(0, 8), st.booleans()),
        st.tuples(st.just("discard"), st.sampled_from([*"abc", None]), st.integers(0, 8), st.just(False)),
        st.tuples(st.just("pop"), st.just("a"), st.just(0), st.just(False)),
    ),
    max_size=60,
)


class ListQueue:
    """The reference: a list of (tenant, its items), the next tenant first."""

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
def test_it_behaves_as_lists_in_a_list(steps: list[tuple[str, str | None, int, bool]]) -> None:
    queue, reference = FairQueue[int](), ListQueue()
    for kind, tenant, item, first in steps:
        if kind == "put":
            assert tenant is not None
            queue.put(tenant, item, first=first)
            reference.put(tenant, item, first)
        elif kind == "discard":
            queue.discard(item, tenant)
            reference.discard(item, tenant)
        elif len(queue):
            assert queue.pop() == reference.pop()
        expected = {item for _, items in reference.turns for item in items}
        assert len(queue) == len(expected)
        assert all((number in queue) == (number in expected) for number in range(9))
    assert (
        [queue.pop() for _ in range(len(queue))] == [reference.pop() for _ in range(len(expected))] if steps else True
    )


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=80))
def test_no_tenant_waits_for_more_turns_than_there_are_tenants(steps: list[tuple[str, bool]]) -> None:
    queue = FairQueue[tuple[str, int]]()
    waited: dict[str, int] = {}  # turns of others since the tenant's last turn, or since it came
    for number, (tenant, is_pop) in enumerate(steps):
        if not is_pop:
            queue.put(tenant, (tenant, number))
            waited.setdefault(tenant, 0)
        elif len(queue):
            served, _ = queue.pop()
            present = {name for name in waited if any((name, n) in queue for n in range(len(steps)))}
            waited = {name: 0 if name == served else waited[name] + 1 for name in present}
            assert all(turns < 4 for turns in waited.values())
