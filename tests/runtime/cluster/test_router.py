"""Placing requests: compared with a slow version of the policy, and the faults that other routers had."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.runtime.cluster.router import EXPECT_S, NoReplicaError, Router
from plait.runtime.kv_cache.block_events import BLOCK_TOKENS
from plait.runtime.messages import BlockBatch

TOKENS = 10 * BLOCK_TOKENS
PREFIX = list(range(1, 11))


def make_router(count: int = 3, **settings: float) -> Router:
    router = Router(**settings)
    for _ in range(count):
        router.add_replica(0.0)
    return router


def path(name: int, length: int) -> list[int]:
    """Blocks of one of a few prefixes, which share nothing."""
    return [1000 * name + index for index in range(length)]


def num_leading(blocks: list[int], known: set[int]) -> int:
    return next((n for n, block in enumerate(blocks) if block not in known), len(blocks))


def num_expected(blocks: list[int], expected: set[int]) -> int:
    """Expected prefixes are known at blocks 0, 1, 3 and 7."""
    return max((end for end in (1, 2, 4, 8) if end <= num_leading(blocks, expected)), default=0)


REQUESTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8), st.integers(1, 400), st.booleans()), max_size=30)
REPORTS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 8)), max_size=8)


@settings(max_examples=200, deadline=None)
@given(REPORTS, REQUESTS)
def test_the_choice_is_that_of_the_slow_policy(reports, requests) -> None:
    router, held, loads = make_router(window_tokens=500), [set(), set(), set()], [0, 0, 0]
    placed, open_placements, expected_at = [0, 0, 0], [], [set(), set(), set()]
    for replica, name, length in reports:
        router.index.change(replica, path(name, length), ())
        held[replica] |= set(path(name, length))
    for name, length, max_tokens, ends in requests:
        blocks, num_tokens = path(name, length), BLOCK_TOKENS * length + 7
        matched = [max(num_leading(blocks, held[r]), num_expected(blocks, expected_at[r])) for r in range(3)]
        limit = min(loads) + 500 + 0.25 * sum(loads) / 3
        candidates = [r for r in range(3) if loads[r] <= limit]
        expected = min(candidates, key=lambda r: (-matched[r], loads[r], placed[r], r))
        output = round(4 * min(max_tokens, router.mean_output))
        placement = router.place(blocks, num_tokens, max_tokens, 1.0)
        assert placement.replica == expected
        assert placement.num_matched == BLOCK_TOKENS * matched[expected]
        loads[expected] += num_tokens - placement.num_matched + output
        placed[expected] += 1
        expected_at[expected] |= set(blocks) if matched[expected] < length else set()
        open_placements.append(placement)
        if ends:
            ended = open_placements.pop(0)
            loads[ended.replica] -= ended.load
            router.finish(ended, 10, 1.0)
        assert [router.load(r) for r in range(3)] == loads
    for placement in open_placements:
        router.first_token(placement)
        router.finish(placement, 10, 1.0)
        router.finish(placement, 10, 1.0)
    assert [router.load(r) for r in range(3)] == [0, 0, 0]


def test_a_burst_with_one_prefix_goes_to_one_replica_before_any_report() -> None:
    router = make_router()
    assert len({router.place(PREFIX, TOKENS, 10, 0.0).replica for _ in range(20)}) == 1


def test_a_prefix_that_is_too_hot_is_spread() -> None:
    router = make_router()
    counts = [0, 0, 0]
    for _ in range(600):
        counts[router.place(PREFIX, TOKENS, 100, 0.0).replica] += 1
    assert min(counts) > 150
    assert router.num_spread == 2


def test_a_miss_goes_to_the_least_loaded() -> None:
    router = make_router()
    busy = router.place(PREFIX, TOKENS, 1000, 0.0)
    others = [router.place(path(9 + n, 10), TOKENS, 1000, 0.0).replica for n in range(2)]
    assert sorted([busy.replica, *others]) == [0, 1, 2]


def test_a_prefix_that_never_came_is_forgotten() -> None:
    router = make_router()
    placement = router.place(PREFIX, TOKENS, 10, 0.0)
    router.finish(placement, 0, 1.0)
    assert router.place(PREFIX, TOKENS, 10, 1.5).num_matched == 8 * BLOCK_TOKENS
    assert router.place(PREFIX, TOKENS, 10, 1.1 + EXPECT_S).num_matched == 0


def test_a_replica_that_drains_gets_no_request_until_it_is_opened_again() -> None:
    router = make_router()
    home = router.place(PREFIX, TOKENS, 10, 0.0).replica
    router.drain(home)
    assert router.place(PREFIX, TOKENS, 10, 0.0).replica != home
    router.reopen(home)
    assert router.place(PREFIX, TOKENS, 10, 0.0).replica == home


def test_a_replica_that_was_removed_gets_nothing_and_its_number_begins_anew() -> None:
    router = make_router(2)
    placement = router.place(PREFIX, TOKENS, 10, 0.0)
    router.remove_replica(placement.replica)
    assert router.place(PREFIX, TOKENS, 10, 0.0).replica != placement.replica
    assert router.add_replica(1.0) == placement.replica
    router.finish(placement, 5, 1.0)
    assert router.load(placement.replica) == 0
    router.receive(7, BlockBatch(1, 1, PREFIX, []), 1.0)  # of a replica nobody knows
    for replica in (0, 1):
        router.drain(replica)
    with pytest.raises(NoReplicaError):
        router.place(PREFIX, TOKENS, 10, 2.0)
