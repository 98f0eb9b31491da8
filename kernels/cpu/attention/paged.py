"""Paged attention as a phase of a CPU's step: what an item of it is, and who puts its parts together.

Positions are attended to in splits of 256, counted from the sequence's start: each (token, head), a lane, begins anew
in each, and the results are joined in order (flash decoding, Dao et al. 2023; `cpu_softmax.join`). So one long row is
work for many threads, and who computes which split changes no bit. An item is

    many tiles     a tile: all splits one after the other, joined as they come
    few tiles      a split of a tile, kept in `AttentionSchedule.partials`; who ends the tile's last one joins them all

of some or all key heads: of all where there are items enough, since they lie side by side in memory.

Knows: items, splits. Must not know: how a tile goes through its blocks (`cpu_walk`), projections, the order of phases.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from plait.kernels.cpu import amx
from plait.kernels.cpu.attention.tiling import BLOCKS_PER_SPLIT, SEGMENT_FIELDS
from plait.kernels.cpu.attention.traversal import (
    MERGE_PARTIAL,
    STORE_PARTIAL,
    WRITE_OUTPUT,
    LayerKvCache,
    TileSlice,
    attend_split,
    first_visible_block,
    init_lanes,
    merge_partials,
    write_partials,
)
from plait.kernels.cpu.attention.workspace import (
    AttentionWorkspace,
    kv_heads_per_pass,
    padded_lanes,
    partial_bytes,
    workspace_at,
)
from plait.kernels.cpu.ops import AttentionBatch, HeadLayout, QuantizedActivations, ThreadContext
from plait.kernels.cpu.threads import atomic_add, barrier_wait, claim_work, mark_done


class AttentionSchedule(NamedTuple):
    """How a step's attention is divided. `finished_splits` counts each tile's and bundle's ended splits, through all layers."""

    isa: int  # see `cpu_blocks`
    split_kv: int  # 1: each split is an item
    kv_heads_per_item: int  # key heads of an item
    lanes: int  # the most of a tile, of one key head
    partials: int  # float32 [split, key head, slot], see `cpu_room`
    finished_splits: int  # int64 [tile, bundle]


MAX_PARTIALS_BYTES = 64 << 20  # pages of it that are never written cost nothing
MERGE_ITEMS_PER_THREAD = 4  # of each thread's worth of tiles: joining is one thread's work for each bundle


@numba.njit  # type: ignore[untyped-decorator]
def choose_schedule(tiles: int, num_splits: int, most_splits: int, lanes: int, heads: HeadLayout, threads: int) -> Any:
    """Whether splits are items by themselves, and how many key heads go together, so that there is work for all.

    `most_splits`: splits of the tile that has most.
    """
    split_kv, kv_heads_per_item = np.int64(0), np.int64(heads.num_kv_heads)
    if 2 * most_splits * threads > num_splits and num_splits > tiles:
        split_kv = np.int64(
            num_splits * heads.num_kv_heads * partial_bytes(lanes, heads.head_dim) <= MAX_PARTIALS_BYTES
        )
    if split_kv:
        kv_heads_per_item = min(
            kv_heads_per_item, np.int64(MERGE_ITEMS_PER_THREAD * tiles * heads.num_kv_heads // threads)
        )
    items = num_splits if split_kv else tiles
    return split_kv, max(np.int64(1), min(kv_heads_per_item, np.int64(items * heads.num_kv_heads // threads)))


@numba.njit  # type: ignore[untyped-decorator]
def attend(
    team: ThreadContext,
    phase: int,
    qkv: Any,
    caches: LayerKvCache,
    heads: HeadLayout,
    rows: AttentionBatch,
    schedule: AttentionSchedule,
    memory: int,
    capacity: int,
    out: QuantizedActivations,
) -> None:
    """Attention of the turned queries in qkv [T, (H + 2 G) D] over each row's pages, to out [T, H * D].

    `memory`: this thread's room for so many lanes.
    """
    ws = workspace_at(memory, capacity, heads.head_dim)
    items_per_tile = (heads.num_kv_heads + schedule.kv_heads_per_item - 1) // schedule.kv_heads_per_item
    items = (rows.split_starts[rows.num_tiles] if schedule.split_kv else rows.num_tiles) * items_per_tile
    if team.scratch:
        amx.load_tile_config(ws.tile_config)
    while True:
        item = claim_work(team.counters, phase, 1)
        if item >= items:
            break
        split_index, first = item // items_per_tile, item % items_per_tile * schedule.kv_heads_per_item
        tile = _tile_of(split_index, rows) if schedule.split_kv else split_index
        all_heads = _slice_tile(rows, tile, heads, first, min(heads.num_kv_heads, first + schedule.kv_heads_per_item))
        step = kv_heads_per_pass(all_heads.lanes, ws)
        for kv_head in range(all_heads.kv_head, all_heads.end_kv_head, step):
            tile_slice = _slice_tile(rows, tile, heads, kv_head, min(all_heads.end_kv_head, kv_head + step))
            if schedule.split_kv:
                _attend_one_split(split_index, tile, tile_slice, qkv, caches, heads, rows, schedule, ws, out)
            else:
                _attend_all_splits(tile, tile_slice, qkv, caches, heads, rows, schedule.isa, ws, out)
        if schedule.split_kv:
            _merge_if_last(tile * items_per_tile + item % items_per_tile, tile, all_heads, heads, rows, schedule, out)
        mark_done(team.counters, phase, 1)
    if team.scratch:
        amx.load_tile_config(team.scratch)
    barrier_wait(team.counters, phase, items)


@numba.njit  # type: ignore[untyped-decorator]
def _tile_of(split_index: int, rows: AttentionBatch) -> Any:
    """The tile that a split, counted through all tiles, belongs to."""
    low, high = np.int64(0), np.int64(rows.num_tiles - 1)
    while low < high:
        middle = (low + high + 1) // 2
        if rows.split_starts[middle] <= split_index:
            low = middle
        else:
            high = middle - 1
    return low


@numba.njit  # type: ignore[untyped-decorator]
def _slice_tile(rows: AttentionBatch, tile: int, heads: HeadLayout, kv_head: int, end_kv_head: int) -> Any:
    first: Any = np.int64(rows.tiles[tile])
    last: Any = np.int64(rows.tiles[tile + 1])
    tokens: Any = np.int64(0)
    for segment in range(first, last):
        tokens += rows.segments[SEGMENT_FIELDS * segment + 2]
    lanes = tokens * heads.q_per_kv
    return TileSlice(first, last, lanes, padded_lanes(lanes), kv_head, end_kv_head)


@numba.njit  # type: ignore[untyped-decorator]
def _attend_all_splits(
    tile: int,
    tile_slice: TileSlice,
    qkv: Any,
    caches: LayerKvCache,
    heads: HeadLayout,
    rows: AttentionBatch,
    isa: int,
    ws: AttentionWorkspace,
    out: QuantizedActivations,
) -> None:
    splits = np.int64(rows.split_starts[tile + 1] - rows.split_starts[tile])
    init_lanes(isa, tile_slice, qkv, caches, heads, rows, True, ws)
    first = first_visible_block(tile_slice, ws) // BLOCKS_PER_SPLIT  # what is before it no lane sees
    for split in range(first, splits):
        if split > first:
            init_lanes(isa, tile_slice, qkv, caches, heads, rows, False, ws)
        on_end = WRITE_OUTPUT if splits == first + 1 else MERGE_PARTIAL if split > first else STORE_PARTIAL
        to = ws.merged
        attend_split(
            isa, tile_slice, BLOCKS_PER_SPLIT * split, on_end, to, tile_slice.lanes, caches, heads, rows, ws, out
        )
    if splits > first + 1:
        write_partials(isa, tile_slice, ws.merged, tile_slice.lanes, heads, rows, out)


@numba.njit  # type: ignore[untyped-decorator]
def _attend_one_split(
    split_index: int,
    tile: int,
    tile_slice: TileSlice,
    qkv: Any,
    caches: LayerKvCache,
    heads: HeadLayout,
    rows: AttentionBatch,
    schedule: AttentionSchedule,
    ws: AttentionWorkspace,
    out: QuantizedActivations,
) -> None:
    split, alone = split_index - rows.split_starts[tile], rows.split_starts[tile + 1] - rows.split_starts[tile] == 1
    init_lanes(schedule.isa, tile_slice, qkv, caches, heads, rows, True, ws)
    to, on_end = (
        _partials_of(split_index, tile_slice.kv_head, heads, schedule),
        WRITE_OUTPUT if alone else STORE_PARTIAL,
    )
    attend_split(
        schedule.isa, tile_slice, BLOCKS_PER_SPLIT * split, on_end, to, schedule.lanes, caches, heads, rows, ws, out
    )


@numba.njit  # type: ignore[untyped-decorator]
def _partials_of(split_index: int, kv_head: int, heads: HeadLayout, schedule: AttentionSchedule) -> Any:
    """Where a split's slots lie, from a key head's on."""
    return schedule.partials + (split_index * heads.num_kv_heads + kv_head) * partial_bytes(
        schedule.lanes, heads.head_dim
    )


@numba.njit  # type: ignore[untyped-decorator]
def _merge_if_last(
    place: int,
    tile: int,
    tile_slice: TileSlice,
    heads: HeadLayout,
    rows: AttentionBatch,
    schedule: AttentionSchedule,
    out: QuantizedActivations,
) -> None:
    begin_, end = np.int64(rows.split_starts[tile]), np.int64(rows.split_starts[tile + 1])
    if end - begin_ == 1 or (atomic_add(schedule.finished_splits + 8 * place, 1) + 1) % (end - begin_):
        return
    to = _partials_of(begin_, tile_slice.kv_head, heads, schedule)
    for split_index in range(begin_ + 1, end):
        merge_partials(
            tile_slice,
            _partials_of(split_index, tile_slice.kv_head, heads, schedule),
            to,
            schedule.lanes,
            heads.head_dim,
        )
    write_partials(schedule.isa, tile_slice, to, schedule.lanes, heads, rows, out)
