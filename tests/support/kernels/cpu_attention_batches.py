"""Batches for the tests of CPU attention: hypothesis strategies, and layouts converted to `AttentionBatch`."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from kernel_calls import compiled_kernel

from plait.kernels.cpu.attention import tiling
from plait.kernels.cpu.kernel_types import AttentionBatch
from plait.kernels.layout import AttentionLayout

# Rows of (new tokens, cached tokens).
row_lengths = st.lists(
    st.tuples(st.integers(1, 90), st.one_of(st.integers(0, 200), st.integers(0, 700))), min_size=1, max_size=5
)


@st.composite
def rows_with_shared_prefixes(draw):
    """(rows, groups): a group is (members, number of leading tokens whose pages the members share)."""
    rows, groups = draw(row_lengths), []
    for _ in range(draw(st.integers(0, 2))):
        members = draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=5, unique=True))
        cached = min(rows[i][1] for i in members)  # only cached tokens are shared: no two rows write the same slot
        groups.append((members, draw(st.integers(0, cached))))
    return rows, groups


@compiled_kernel
def build_tiles(q_starts, kv_starts, first_pages, pages, shift, max_tokens, tiles, segments, order, num_tiles):
    num_tiles[0] = tiling.build_tiles(
        q_starts, kv_starts, first_pages, pages, shift, max_tokens, tiles, segments, order
    )  # fmt: skip


@compiled_kernel
def count_splits(q_starts, kv_starts, num_tiles, tiles, segments, split_starts):
    tiling.count_splits(q_starts, kv_starts, num_tiles, tiles, segments, split_starts)


def attention_batch(layout: AttentionLayout, max_tokens: int, share: bool = True) -> AttentionBatch:
    """Cuts a layout into tiles of up to `max_tokens` tokens; without `share` each token is a tile by itself."""
    tensors = (layout.positions, layout.q_starts, layout.kv_starts, layout.first_pages, layout.kv_pages)
    arrays = [tensor.numpy() for tensor in (*tensors, layout.write_slots)]
    tokens, shift = int(layout.q_starts[-1]), layout.page_size.bit_length() - 1
    capacity = tokens + len(layout.q_starts)
    tiles, segments = np.zeros(capacity, np.int32), np.zeros(tiling.SEGMENT_FIELDS * capacity, np.int32)
    order, result = np.zeros(capacity, np.int32), np.zeros(1, np.int64)
    build_tiles(*arrays[1:5], shift, max_tokens if share else 1, tiles, segments, order, result)
    num_tiles = int(result[0])
    if not share:
        segments[3 :: tiling.SEGMENT_FIELDS] = 0
        num_tiles = tokens
        tiles = np.arange(num_tiles + 1, dtype=np.int32)
    split_starts = np.zeros(num_tiles + 1, np.int32)
    count_splits(*arrays[1:3], num_tiles, tiles, segments, split_starts)
    return AttentionBatch(*arrays, tiles, segments, split_starts, num_tiles, shift)


def num_new_tokens(layout: AttentionLayout, row: int) -> int:
    return int(layout.q_starts[row + 1] - layout.q_starts[row])
