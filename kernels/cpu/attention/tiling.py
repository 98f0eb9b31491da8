"""Cuts a step's new tokens into tiles that read keys and values together: neighbours in the trie of their page tables.

    rows by page table     A A A A B B B      row 0      a tile is a list of segments of rows; each segment has the
                           A A A A C C        row 3      number of blocks of 64 positions whose pages are the same as
                           A A D D D D D      row 1      in the segment before it, which are read once for both
                           E E E              row 2

Rows are sorted by page table, so those that share the longest prefixes are neighbours. A tile is filled up with tokens
of the next row if that row shares a block; one long row fills tiles alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from plait.kernels.cpu.attention.kv_layout import KV_BLOCK
from plait.kernels.cpu.attention.workspace import AttentionWorkspace
from plait.kernels.cpu.kernel_types import AttentionBatch, HeadLayout, LayerKvCache, QuantizedActivations

MAX_TILE_LANES = 96  # lanes of a tile for each key head
MIN_FULL_TILES = 4  # a step with fewer full tiles than this has tiles of half the size, so that there are more items
BLOCKS_PER_SPLIT = 4  # a split is 256 positions, counted from the sequence's start
SEGMENT_FIELDS = 4  # int32: row, its first token here, number of tokens, blocks shared with the segment before


class AttentionSchedule(NamedTuple):
    """How a step's attention is divided into items."""

    isa: int  # of `isa`
    split_kv: int  # 1: each split is an item
    kv_heads_per_item: int
    lanes: int  # of one key head in the largest tile
    partials: int  # address of float32 [splits, key heads, slot], see `workspace.partial_bytes`
    finished_splits: int  # address of int64 [tiles, items of a tile]: splits finished so far, through all layers


class AttentionTask(NamedTuple):
    """What the attention of one layer reads and writes, in one thread."""

    schedule: AttentionSchedule
    qkv: Any  # float32 [T, (H + 2 G) D], rotated
    cache: LayerKvCache
    heads: HeadLayout
    batch: AttentionBatch
    ws: AttentionWorkspace
    out: QuantizedActivations  # [T, H D]


class TileSlice(NamedTuple):
    """A tile's segments, for a range of key heads."""

    begin_segment: int
    end_segment: int
    lanes: int  # of one key head
    lane_stride: int  # lanes of the workspace from one key head to the next
    kv_head: int
    end_kv_head: int


def segment_of(batch: AttentionBatch, segment: int) -> Any:
    """Returns a segment's row, its first new token within the row, and its number of tokens."""
    field = SEGMENT_FIELDS * segment
    return int(batch.segments[field]), int(batch.segments[field + 1]), int(batch.segments[field + 2])


def _common_prefix(pages: Any, first: int, second: int, count: int) -> Any:
    """Returns the length of the common prefix of two page tables, `count` entries from `first` and `second` on."""
    same = 0
    while same + 64 <= count:
        different = np.int32(0)
        for i in range(same, same + 64):
            different |= pages[first + i] ^ pages[second + i]
        if different:
            break
        same += 64
    while same < count and pages[first + same] == pages[second + same]:
        same += 1
    return same


def _is_before(pages: Any, first: int, first_count: int, second: int, second_count: int) -> Any:
    """Returns whether one page table sorts before another."""
    shorter = min(first_count, second_count)
    same = _common_prefix(pages, first, second, shorter)
    if same < shorter:
        return pages[first + same] < pages[second + same]
    return first_count < second_count


def sort_by_page_table(kv_starts: Any, first_pages: Any, pages: Any, shift: int, order: Any) -> None:
    """Writes the rows, sorted by page table, to `order` [R] (insertion with binary search)."""
    round_up = (1 << shift) - 1
    for row in range(len(order)):
        first, count = first_pages[row], (kv_starts[row + 1] - kv_starts[row] + round_up) >> shift
        low, high = 0, row
        while low < high:
            middle = (low + high) // 2
            other = order[middle]
            other_count = (kv_starts[other + 1] - kv_starts[other] + round_up) >> shift
            if _is_before(pages, first, count, first_pages[other], other_count):
                high = middle
            else:
                low = middle + 1
        for i in range(row, low, -1):
            order[i] = order[i - 1]
        order[low] = row


def num_shared_blocks(kv_starts: Any, first_pages: Any, pages: Any, shift: int, row: int, other: int) -> Any:
    """Returns how many leading blocks of two rows lie in the same pages."""
    shorter = min(kv_starts[row + 1] - kv_starts[row], kv_starts[other + 1] - kv_starts[other])
    same = _common_prefix(pages, first_pages[row], first_pages[other], shorter >> shift)
    return (same << shift) // KV_BLOCK


def build_tiles(
    q_starts: Any,
    kv_starts: Any,
    first_pages: Any,
    pages: Any,
    shift: int,
    max_tokens: int,
    tiles: Any,
    segments: Any,
    order: Any,
) -> Any:
    """Cuts all new tokens into tiles of up to `max_tokens` tokens, or half of it if they are few.

    Fills `segments` [(T + R) * SEGMENT_FIELDS] and `tiles` [T + R + 1]: tile i has segments tiles[i] to tiles[i + 1].
    `order` int32 [R] is memory for the rows' order. Returns the number of tiles.
    """
    count = len(q_starts) - 1
    if q_starts[count] < MIN_FULL_TILES * max_tokens:
        max_tokens = max(1, max_tokens // 2)
    sort_by_page_table(kv_starts, first_pages, pages, shift, order[:count])
    num_tiles, num_segments, free = 0, 0, 0  # free: tokens that the last tile has room for
    previous: Any = -1
    for i in range(count):
        row = int(order[i])
        first, shared, q_len = 0, 0, q_starts[row + 1] - q_starts[row]
        if free and q_len:
            shared = num_shared_blocks(kv_starts, first_pages, pages, shift, row, previous)
        while first < q_len:
            if not free or not shared:
                tiles[num_tiles] = num_segments
                num_tiles, free, shared = num_tiles + 1, max_tokens, 0
            taken = min(free, q_len - first)
            field = SEGMENT_FIELDS * num_segments
            segments[field], segments[field + 1] = row, first
            segments[field + 2], segments[field + 3] = taken, shared
            num_segments, free, first = num_segments + 1, free - taken, first + taken
        if q_len:
            previous = row
    tiles[num_tiles] = num_segments
    return num_tiles


def count_splits(q_starts: Any, kv_starts: Any, num_tiles: int, tiles: Any, segments: Any, split_starts: Any) -> Any:
    """Counts the KV splits of each tile: tile i has splits split_starts[i] to split_starts[i + 1].

    Returns the largest number of tokens, and of splits, that a tile has.
    """
    max_tokens, max_splits = 0, 0
    split_starts[0] = 0
    for tile in range(num_tiles):
        kv_end, tokens = 1, 0
        for segment in range(tiles[tile], tiles[tile + 1]):
            row, first, count = segments[4 * segment], segments[4 * segment + 1], segments[4 * segment + 2]
            later = q_starts[row + 1] - q_starts[row] - first - count  # tokens of the row behind this segment
            kv_end = max(kv_end, int(kv_starts[row + 1] - kv_starts[row] - later))
            tokens += count
        splits = (kv_end + BLOCKS_PER_SPLIT * KV_BLOCK - 1) // (BLOCKS_PER_SPLIT * KV_BLOCK)
        split_starts[tile + 1] = split_starts[tile] + splits
        max_tokens, max_splits = max(max_tokens, tokens), max(max_splits, int(splits))
    return max_tokens, max_splits
