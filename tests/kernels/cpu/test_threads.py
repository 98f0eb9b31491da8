"""How threads share out a phase's items: each item to one of them, whoever comes, and near ones to the same."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.kernels.cpu.threads import COUNTER_STRIDE, claim_local_work

PHASES = 3


@settings(max_examples=200, deadline=None)
@given(data=st.data(), items=st.integers(0, 200), threads=st.integers(1, 40), count=st.integers(1, 50))
def test_every_item_is_claimed_once_whoever_comes(data, items, threads, count) -> None:
    """Claims in any order, by some of the threads only: those that never come cost nobody an item."""
    counters = np.zeros((PHASES, 2 * COUNTER_STRIDE), np.int64)
    coming = data.draw(st.lists(st.integers(0, threads - 1), min_size=1, max_size=6, unique=True))
    claimed: list[int] = []
    while coming:
        me = data.draw(st.sampled_from(coming))
        first, end = claim_local_work(counters.ctypes.data, 1, count, items, me, threads)
        if first >= items:
            coming.remove(me)
        else:
            assert first < end <= first + count
            claimed += range(first, end)
    assert sorted(claimed) == list(range(items))
    assert not counters[[0, 2]].any() and not counters[1, COUNTER_STRIDE:].any(), (
        "another phase's, or what counts ended ones"
    )


def test_a_thread_has_its_own_piece_while_there_is_some() -> None:
    counters = np.zeros((1, 2 * COUNTER_STRIDE), np.int64)
    seen = [claim_local_work(counters.ctypes.data, 0, 4, 24, 1, 2) for _ in range(3)]
    assert seen == [(12, 16), (16, 20), (20, 24)]
    assert claim_local_work(counters.ctypes.data, 0, 4, 24, 1, 2) == (0, 4)
    assert claim_local_work(counters.ctypes.data, 0, 4, 24, 0, 2) == (4, 8)
