"""Paged attention as one phase of a step: divides it into items and merges the partial results.

Positions are attended to in splits of 256, counted from the sequence's start. Each lane starts afresh in every split,
and the results are merged in order (flash decoding, Dao et al. 2023). So one long row is work for many threads, and the
bits do not depend on who computes which split. An item is, for a range of key heads,

    many tiles     one tile: its splits one after the other, merged as they come
    few tiles      one split of a tile, stored in `AttentionSchedule.partials`; the thread that finishes a tile's last
                   split merges the partial results

An item has all key heads if there are enough items for all threads, since they lie side by side in memory.
"""

from __future__ import annotations

from typing import Any

from plait.kernels.cpu import amx
from plait.kernels.cpu.attention.split_results import (
    MERGE_PARTIAL,
    STORE_PARTIAL,
    WRITE_OUTPUT,
    merge_partials,
    write_partials,
)
from plait.kernels.cpu.attention.tiling import (
    BLOCKS_PER_SPLIT,
    SEGMENT_FIELDS,
    AttentionSchedule,
    AttentionTask,
    TileSlice,
)
from plait.kernels.cpu.attention.traversal import attend_split, first_visible_block, init_lanes
from plait.kernels.cpu.attention.workspace import (
    kv_heads_per_pass,
    padded_lanes,
    partial_bytes,
    workspace_at,
)
from plait.kernels.cpu.kernel_types import AttentionBatch, HeadLayout, LayerKvCache, QuantizedActivations
from plait.kernels.cpu.parallel.atomics import atomic_add
from plait.kernels.cpu.parallel.threads import ThreadContext, shared_items

MAX_PARTIALS_BYTES = 64 << 20  # memory that is never written costs nothing
MERGE_ITEMS_PER_THREAD = 4  # at least, with KV splits: merging an item's splits is the work of one thread


def choose_schedule(tiles: int, num_splits: int, max_splits: int, lanes: int, heads: HeadLayout, threads: int) -> Any:
    """Returns whether each split is an item, and the key heads of an item, such that all threads have work.

    `max_splits` is the largest number of splits that a tile has.
    """
    split_kv, kv_heads_per_item = 0, int(heads.num_kv_heads)
    if 2 * max_splits * threads > num_splits and num_splits > tiles:
        split_kv = int(num_splits * heads.num_kv_heads * partial_bytes(lanes, heads.head_dim) <= MAX_PARTIALS_BYTES)
    if split_kv:
        kv_heads_per_item = min(kv_heads_per_item, int(MERGE_ITEMS_PER_THREAD * tiles * heads.num_kv_heads // threads))
    items = num_splits if split_kv else tiles
    return split_kv, max(1, min(kv_heads_per_item, int(items * heads.num_kv_heads // threads)))


def attend(
    ctx: ThreadContext,
    phase: int,
    qkv: Any,
    cache: LayerKvCache,
    heads: HeadLayout,
    batch: AttentionBatch,
    schedule: AttentionSchedule,
    workspace: int,
    capacity: int,
    out: QuantizedActivations,
) -> None:
    """Runs attention of the rotated queries in qkv [T, (H + 2 G) D] over each row's pages; writes out [T, H * D].

    `workspace` is the address of this thread's workspace, for `capacity` lanes.
    """
    ws = workspace_at(workspace, capacity, heads.head_dim)
    task = AttentionTask(schedule, qkv, cache, heads, batch, ws, out)
    items_per_tile = (heads.num_kv_heads + schedule.kv_heads_per_item - 1) // schedule.kv_heads_per_item
    items = (batch.split_starts[batch.num_tiles] if schedule.split_kv else batch.num_tiles) * items_per_tile
    if ctx.scratch:
        amx.load_tile_config(ws.tile_config)
    for item in shared_items(ctx, phase, items, 1):
        split_index, first = item // items_per_tile, item % items_per_tile * schedule.kv_heads_per_item
        tile = _tile_of(split_index, batch) if schedule.split_kv else split_index
        all_heads = _slice_tile(batch, tile, heads, first, min(heads.num_kv_heads, first + schedule.kv_heads_per_item))
        step = kv_heads_per_pass(all_heads.lanes, ws)
        for kv_head in range(all_heads.kv_head, all_heads.end_kv_head, step):
            tile_slice = _slice_tile(batch, tile, heads, kv_head, min(all_heads.end_kv_head, kv_head + step))
            if schedule.split_kv:
                _attend_one_split(task, split_index, tile, tile_slice)
            else:
                _attend_all_splits(task, tile, tile_slice)
        if schedule.split_kv:
            _merge_if_last(task, tile * items_per_tile + item % items_per_tile, tile, all_heads)
    if ctx.scratch:
        amx.load_tile_config(ctx.scratch)


def _tile_of(split_index: int, batch: AttentionBatch) -> Any:
    """Returns the tile of a split; splits are numbered through all tiles."""
    low, high = 0, int(batch.num_tiles - 1)
    while low < high:
        middle = (low + high + 1) // 2
        if batch.split_starts[middle] <= split_index:
            low = middle
        else:
            high = middle - 1
    return low


def _slice_tile(batch: AttentionBatch, tile: int, heads: HeadLayout, kv_head: int, end_kv_head: int) -> Any:
    """Returns the part of a tile that belongs to a range of key heads."""
    first: Any = int(batch.tiles[tile])
    last: Any = int(batch.tiles[tile + 1])
    tokens: Any = 0
    for segment in range(first, last):
        tokens += batch.segments[SEGMENT_FIELDS * segment + 2]
    lanes = tokens * heads.q_per_kv
    return TileSlice(first, last, lanes, padded_lanes(lanes), kv_head, end_kv_head)


def _attend_all_splits(task: AttentionTask, tile: int, tile_slice: TileSlice) -> None:
    split_starts, merged, lanes = task.batch.split_starts, task.ws.merged, tile_slice.lanes
    splits = int(split_starts[tile + 1] - split_starts[tile])
    init_lanes(task, tile_slice, True)
    first = first_visible_block(tile_slice, task.ws) // BLOCKS_PER_SPLIT  # no lane sees the splits before it
    for split in range(first, splits):
        if split > first:
            init_lanes(task, tile_slice, False)
        on_end = WRITE_OUTPUT if splits == first + 1 else MERGE_PARTIAL if split > first else STORE_PARTIAL
        attend_split(task, tile_slice, BLOCKS_PER_SPLIT * split, on_end, merged, lanes)
    if splits > first + 1:
        write_partials(task, tile_slice, merged, lanes)


def _attend_one_split(task: AttentionTask, split_index: int, tile: int, tile_slice: TileSlice) -> None:
    split_starts = task.batch.split_starts
    begin_block = BLOCKS_PER_SPLIT * (split_index - split_starts[tile])
    init_lanes(task, tile_slice, True)
    on_end = WRITE_OUTPUT if split_starts[tile + 1] - split_starts[tile] == 1 else STORE_PARTIAL
    partials = _partials_of(task, split_index, tile_slice.kv_head)
    attend_split(task, tile_slice, begin_block, on_end, partials, task.schedule.lanes)


def _partials_of(task: AttentionTask, split_index: int, kv_head: int) -> Any:
    """Returns the address of a split's slots, from a key head on."""
    slot_bytes = partial_bytes(task.schedule.lanes, task.heads.head_dim)
    return task.schedule.partials + (split_index * task.heads.num_kv_heads + kv_head) * slot_bytes


def _merge_if_last(task: AttentionTask, counter: int, tile: int, tile_slice: TileSlice) -> None:
    """Counts a finished split; after the tile's last one, merges all of them and writes the output."""
    begin, end = int(task.batch.split_starts[tile]), int(task.batch.split_starts[tile + 1])
    if end - begin == 1 or (atomic_add(task.schedule.finished_splits + 8 * counter, 1) + 1) % (end - begin):
        return
    merged, lanes = _partials_of(task, begin, tile_slice.kv_head), task.schedule.lanes
    for split_index in range(begin + 1, end):
        partials = _partials_of(task, split_index, tile_slice.kv_head)
        merge_partials(tile_slice, partials, merged, lanes, task.heads.head_dim)
    write_partials(task, tile_slice, merged, lanes)
