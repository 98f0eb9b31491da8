"""Dividing attention into items for a number of threads."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from plait.kernels.cpu.attention.paged import choose_schedule
from plait.kernels.cpu.kernel_types import HeadLayout

LANES = 3


def schedule(tile_splits, kv_heads, threads):
    """(whether splits are items, key heads of an item) for tiles with these numbers of splits."""
    heads = HeadLayout(3, kv_heads, 64, 1.0)
    split_kv, per_item = choose_schedule(len(tile_splits), sum(tile_splits), max(tile_splits), LANES, heads, threads)
    return bool(split_kv), int(per_item)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=100), st.integers(1, 16), st.integers(1, 64))
def test_every_thread_has_an_item_if_there_are_enough(tile_splits, kv_heads, threads):
    split_kv, per_item = schedule(tile_splits, kv_heads, threads)
    parts = sum(tile_splits) if split_kv else len(tile_splits)
    assert 1 <= per_item <= kv_heads
    assert parts * -(-kv_heads // per_item) >= min(threads, parts * kv_heads)


def test_long_rows_are_split_between_threads():
    assert schedule([8], 3, threads=2)[0]
    assert schedule([128] + [1] * 31, 3, threads=16)[0]


def test_many_equal_tiles_are_not_split():
    assert schedule([10] * 64, 3, threads=2) == (False, 3)


def test_splits_whose_partial_results_do_not_fit_are_no_items():
    assert not schedule([1 << 20], 3, threads=2)[0]
