"""Cutting a step's tokens into tiles and KV splits."""

from __future__ import annotations

from attention_cases import layout_of
from cpu_attention_batches import attention_batch, num_new_tokens, rows_with_shared_prefixes
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.kernels.cpu.attention.kv_layout import KV_BLOCK
from plait.kernels.cpu.attention.tiling import BLOCKS_PER_SPLIT, SEGMENT_FIELDS

page_sizes, max_tokens, seeds = st.sampled_from([1, 4, 64]), st.integers(1, 40), st.integers(0, 100)


@settings(max_examples=100, deadline=None)
@given(rows_with_shared_prefixes(), page_sizes, max_tokens, seeds)
def test_splits_of_a_tile_cover_its_longest_row(rows_and_groups, page_size, tokens, seed):
    layout, _ = layout_of(rows_and_groups[0], page_size, rows_and_groups[1], seed=seed)
    batch = attention_batch(layout, tokens)
    segments = batch.segments.reshape(-1, SEGMENT_FIELDS)
    for tile in range(batch.num_tiles):
        kv_ends = []
        for row, first, count, _ in segments[batch.tiles[tile] : batch.tiles[tile + 1]].tolist():
            cached = int(layout.kv_starts[row + 1] - layout.kv_starts[row]) - num_new_tokens(layout, row)
            kv_ends.append(cached + first + count)
        splits = batch.split_starts[tile + 1] - batch.split_starts[tile]
        assert splits == -(-max(kv_ends) // (BLOCKS_PER_SPLIT * KV_BLOCK))


@settings(max_examples=100, deadline=None)
@given(rows_with_shared_prefixes(), page_sizes, max_tokens, seeds)
def test_tiles_hold_every_token_once_and_count_shared_blocks(rows_and_groups, page_size, tokens, seed):
    layout, _ = layout_of(rows_and_groups[0], page_size, rows_and_groups[1], seed=seed)
    batch = attention_batch(layout, tokens)
    segments = batch.segments.reshape(-1, SEGMENT_FIELDS)
    tile_tokens = []
    for tile in range(batch.num_tiles):
        part = segments[batch.tiles[tile] : batch.tiles[tile + 1]]
        assert part[0, 3] == 0
        assert 0 < part[:, 2].sum() <= tokens
        for row, first, count, _ in part.tolist():
            tile_tokens += [(row, first + i) for i in range(count)]
        for previous, row, shared in zip(
            part[:-1, 0].tolist(), part[1:, 0].tolist(), part[1:, 3].tolist(), strict=True
        ):
            slots, other_slots = layout.slots(previous), layout.slots(row)
            shorter = min(len(slots), len(other_slots))
            common = int((slots[:shorter] == other_slots[:shorter]).long().cumprod(0).sum())
            assert shared == common // KV_BLOCK > 0
    assert sorted(tile_tokens) == [
        (row, i) for row in range(layout.num_rows) for i in range(num_new_tokens(layout, row))
    ]


def test_rows_with_the_longest_shared_prefixes_are_neighbours():
    """Two documents with two questions each, interleaved: a tile for each document, with equal questions together."""
    groups = [((0, 1, 4, 5), 128), ((2, 3, 6, 7), 192), ((0, 4), 256), ((1, 5), 256)]
    layout, _ = layout_of([(1, 300)] * 8, groups=groups)
    batch = attention_batch(layout, 8)  # few tokens: tiles have half that size
    segments = batch.segments.reshape(-1, SEGMENT_FIELDS)[:8].tolist()
    tiles = [{row for row, *_ in segments[4 * i : 4 * i + 4]} for i in range(2)]
    assert batch.num_tiles == 2 and sorted(map(sorted, tiles)) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    shared = {tuple(sorted(tile)): [segments[4 * i + j][3] for j in range(4)] for i, tile in enumerate(tiles)}
    assert shared == {(0, 1, 4, 5): [0, 4, 2, 4], (2, 3, 6, 7): [0, 3, 3, 3]}
