"""Claiming a phase's items: each item goes to exactly one thread, and neighbouring items to the same thread."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_calls import compiled_kernel

from plait.kernels.cpu.parallel import threads as product
from plait.kernels.cpu.parallel.threads import COUNTER_STRIDE

PHASES = 3


@compiled_kernel
def _claim(counters, phase, count, items, thread_id, threads, result):
    first, end = product.claim_local_work(counters, phase, count, items, thread_id, threads)
    result[0], result[1] = first, end


def claim_local_work(counters, phase, count, items, thread_id, threads):
    """As in the product, called from Python."""
    result = np.zeros(2, np.int64)
    _claim(counters, phase, count, items, thread_id, threads, result)
    return tuple(result.tolist())


@settings(max_examples=200, deadline=None)
@given(data=st.data(), items=st.integers(0, 200), threads=st.integers(1, 40), count=st.integers(1, 50))
def test_every_item_is_claimed_once_even_if_threads_are_missing(data, items, threads, count) -> None:
    """Some of the threads claim, in any order."""
    counters = np.zeros((PHASES, 2 * COUNTER_STRIDE), np.int64)
    active = data.draw(st.lists(st.integers(0, threads - 1), min_size=1, max_size=6, unique=True))
    claimed: list[int] = []
    while active:
        thread_id = data.draw(st.sampled_from(active))
        first, end = claim_local_work(counters.ctypes.data, 1, count, items, thread_id, threads)
        if first >= items:
            active.remove(thread_id)
        else:
            assert first < end <= first + count
            claimed += range(first, end)
    assert sorted(claimed) == list(range(items))
    assert not counters[[0, 2]].any(), "counters of another phase"
    assert not counters[1, COUNTER_STRIDE:].any(), "the counter of finished items"


def test_threads_claim_their_own_share_first() -> None:
    counters = np.zeros((1, 2 * COUNTER_STRIDE), np.int64)
    claims = [claim_local_work(counters.ctypes.data, 0, 4, 24, 1, 2) for _ in range(3)]
    assert claims == [(12, 16), (16, 20), (20, 24)]
    assert claim_local_work(counters.ctypes.data, 0, 4, 24, 1, 2) == (0, 4)
    assert claim_local_work(counters.ctypes.data, 0, 4, 24, 0, 2) == (4, 8)
