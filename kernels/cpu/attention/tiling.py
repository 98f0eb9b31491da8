"""Which tokens of a step go through attention together: tiles of neighbours in the trie of their pages.

    rows by their pages    A A A A B B B      row 0      a tile: segments of rows, each with the number of blocks of
                           A A A A C C        row 3      64 positions whose pages are those of the segment before it,
                           A A D D D D D      row 1      so that they are read once for both
                           E E E              row 2

Rows stand in the order of their page tables, so that those which share most stand side by side. A tile is filled with
the next row's tokens where that shares a block; one long row fills tiles by itself.

Knows: page tables. Must not know: what is done with a tile.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from plait.kernels.cpu.attention.f32_kernel import KV_BLOCK

MIN_FULL_TILES = (
    4  # full tiles, from which on tiles are filled; fewer tokens make tiles half as large, more for the threads
)
BLOCKS_PER_SPLIT = 4  # of 64 positions: what a lane goes through before it begins anew (`cpu_attend`)
SEGMENT_FIELDS = 4  # int32: a row, its first token in this tile, how many, blocks shared with the segment before


@numba.njit  # type: ignore[untyped-decorator]
def _common_prefix(pages: Any, first: int, second: int, count: int) -> Any:
    """How many of `count` entries from `first` on are those from `second` on, up to the first difference."""
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


@numba.njit  # type: ignore[untyped-decorator]
def _is_before(pages: Any, first: int, first_count: int, second: int, second_count: int) -> Any:
    """Whether one page table comes before another."""
    least = min(first_count, second_count)
    same = _common_prefix(pages, first, second, least)
    if same < least:
        return pages[first + same] < pages[second + same]
    return first_count < second_count


@numba.njit  # type: ignore[untyped-decorator]
def sort_by_page_table(kv_starts: Any, first_pages: Any, pages: Any, shift: int, order: Any) -> None:
    """Writes the rows [R], by their page tables, to `order`."""
    whole = (1 << shift) - 1
    for row in range(len(order)):
        first, count = first_pages[row], (kv_starts[row + 1] - kv_starts[row] + whole) >> shift
        low, high = 0, row
        while low < high:
            middle = (low + high) // 2
            other = order[middle]
            other_count = (kv_starts[other + 1] - kv_starts[other] + whole) >> shift
            if _is_before(pages, first, count, first_pages[other], other_count):
                high = middle
            else:
                low = middle + 1
        for i in range(row, low, -1):
            order[i] = order[i - 1]
        order[low] = row


@numba.njit  # type: ignore[untyped-decorator]
def num_shared_blocks(kv_starts: Any, first_pages: Any, pages: Any, shift: int, row: int, other: int) -> Any:
    """How many leading blocks of two rows lie in the same pages."""
    least = min(kv_starts[row + 1] - kv_starts[row], kv_starts[other + 1] - kv_starts[other])
    same = _common_prefix(pages, first_pages[row], first_pages[other], least >> shift)
    return (same << shift) // KV_BLOCK


@numba.njit  # type: ignore[untyped-decorator]
def build_tiles(
    q_starts: Any, kv_starts: Any, first_pages: Any, pages: Any, shift: int, most: int, tiles: Any, segments: Any
) -> Any:
    """Cuts all new tokens into tiles of at most `most` (half of it where they are few); returns how many tiles.

    `segments` [(T + R) * SEGMENT]; `tiles` [T + R + 1]: tile i has segments tiles[i] .. tiles[i + 1].
    """
    count = len(q_starts) - 1
    if q_starts[count] < MIN_FULL_TILES * most:
        most = max(1, most // 2)
    order = np.arange(count).astype(np.int32)
    if count > 1:
        sort_by_page_table(kv_starts, first_pages, pages, shift, order)
    num_tiles, num_segments, left, before = 0, 0, 0, -1
    for place in range(count):
        row = int(order[place])
        first, shared, q_len = 0, 0, q_starts[row + 1] - q_starts[row]
        if left and q_len:
            shared = num_shared_blocks(kv_starts, first_pages, pages, shift, row, before)
        while first < q_len:
            if not left or not shared:
                tiles[num_tiles] = num_segments
                num_tiles, left, shared = num_tiles + 1, most, 0
            here = min(left, q_len - first)
            at = SEGMENT_FIELDS * num_segments
            segments[at], segments[at + 1], segments[at + 2], segments[at + 3] = row, first, here, shared
            num_segments, left, first = num_segments + 1, left - here, first + here
        if q_len:
            before = row
    tiles[num_tiles] = num_segments
    return num_tiles


@numba.njit  # type: ignore[untyped-decorator]
def count_splits(q_starts: Any, kv_starts: Any, num_tiles: int, tiles: Any, segments: Any, split_starts: Any) -> Any:
    """How many splits each tile's positions are: `split_starts` [tiles + 1], of tile i from pieces[i] on. The most tokens
    that a tile has, and the most splits."""
    most, most_splits = np.int64(0), np.int64(0)
    split_starts[0] = 0
    for tile in range(num_tiles):
        limit, tokens = np.int64(1), np.int64(0)
        for segment in range(tiles[tile], tiles[tile + 1]):
            row, first, count = segments[4 * segment], segments[4 * segment + 1], segments[4 * segment + 2]
            behind = q_starts[row + 1] - q_starts[row] - first - count  # tokens of the row that come after
            limit, tokens = max(limit, np.int64(kv_starts[row + 1] - kv_starts[row] - behind)), tokens + count
        split_starts[tile + 1] = split_starts[tile] + (limit + BLOCKS_PER_SPLIT * KV_BLOCK - 1) // (
            BLOCKS_PER_SPLIT * KV_BLOCK
        )
        most, most_splits = max(most, tokens), max(most_splits, np.int64(split_starts[tile + 1] - split_starts[tile]))
    return most, most_splits
