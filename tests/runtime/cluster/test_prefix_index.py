"""The prefix index, compared with a set of prefixes for every replica."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from plait.runtime.cluster.prefix_index import PrefixIndex, probes

REPLICAS = range(3)
PATHS = st.lists(st.integers(0, 1), max_size=6) | st.integers(0, 20).map(lambda length: [0] * length)
STEPS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(REPLICAS), PATHS),
    st.tuples(st.just("remove"), st.sampled_from(REPLICAS), PATHS),
    st.tuples(st.just("replace"), st.sampled_from(REPLICAS), PATHS),
    st.tuples(st.just("expect"), st.sampled_from(REPLICAS), PATHS),
    st.tuples(st.just("stop"), st.sampled_from(REPLICAS), st.integers(0, 9)),
)


def blocks(path: list[int]) -> list[int]:
    """A number for every prefix of the path."""
    return [int("1" + "".join(map(str, path[: end + 1])), 3) for end in range(len(path))]


@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS, max_size=25), PATHS, st.sets(st.sampled_from(REPLICAS)))
def test_the_longest_prefix_is_found(steps, query, among) -> None:
    index = PrefixIndex()
    reported, expected, promises = {r: set() for r in REPLICAS}, {r: set() for r in REPLICAS}, []
    for replica in REPLICAS:
        index.add_replica(replica)
    for name, replica, argument in steps:
        if name == "add":
            index.change(replica, blocks(argument), ())
            reported[replica] |= set(blocks(argument))
        elif name == "remove" and argument:  # the subtree below a path, as leaves leave before their parents
            below = {b for b in reported[replica] if _is_below(b, blocks(argument)[-1])}
            index.change(replica, (), below)
            reported[replica] -= below
        elif name == "replace":
            index.replace(replica, blocks(argument))
            reported[replica] = set(blocks(argument))
        elif name == "expect":
            promises.append((replica, index.expect(replica, blocks(argument))))
            expected[replica] |= set(promises[-1][1])
        elif name == "stop" and promises:
            owner, promised = promises.pop(argument % len(promises))
            index.stop_expecting(owner, promised)
            expected[owner] -= set(promised)
    assert len(index) == len(set().union(*reported.values())) + len(set().union(*expected.values()))
    query = blocks(query)
    lengths = {r: max(_num_leading(query, reported[r]), _num_expected(query, expected[r])) for r in among}
    if all(_is_closed(reported[r]) for r in REPLICAS) and all(_has_no_hole(query, expected[r]) for r in REPLICAS):
        count, best = index.longest(query, sum(1 << r for r in among))
        assert count == max(lengths.values(), default=0)
        assert best == sum(1 << r for r in among if lengths[r] == count)
    for replica in REPLICAS:
        assert index.reported(replica) == reported[replica]
        index.remove_replica(replica)
    assert len(index) == 0


def _is_below(block: int, ancestor: int) -> bool:
    while block > ancestor:
        block //= 3
    return block == ancestor


def _num_leading(query: list[int], known: set[int]) -> int:
    return next((n for n, block in enumerate(query) if block not in known), len(query))


def _num_expected(query: list[int], expected: set[int]) -> int:
    positions = [position for position in (0, 1, 3, 7, 15, 23) if position < len(query)]
    count = _num_leading([query[position] for position in positions], expected)
    return positions[count - 1] + 1 if count else 0


def _is_closed(reported: set[int]) -> bool:
    return all(block // 3 in reported or block // 3 == 1 for block in reported)


def _has_no_hole(query: list[int], expected: set[int]) -> bool:
    """False where the first of two requests with a prefix has ended and the second is still expected."""
    found = [query[position] in expected for position in probes(len(query))]
    return found == sorted(found, reverse=True)


def test_reports_beyond_the_limit_are_dropped_and_counted() -> None:
    index = PrefixIndex(max_blocks=3)
    index.add_replica(0)
    index.change(0, range(1, 6), ())
    assert (len(index), index.num_dropped) == (3, 2)
