"""Computes one KV split for a tile of lanes. Blocks of KV that several sequences share are read once for all of them.

A lane is one query head of one new token. The page tables of a tile's segments form a trie, which is traversed depth
first with an explicit stack: the segments below a node attend to their shared blocks together, then each child
separately, the last child first. Every lane attends to its blocks in order, with an online softmax, so its bits do not
depend on which sequences share its prefix.

The workspace holds all lanes of one key head, then all of the next.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from plait.kernels.cpu.attention import kv_layout, online_softmax
from plait.kernels.cpu.attention.isa import AMX, F32, INT8_VNNI
from plait.kernels.cpu.attention.kv_block import KvBlock, ScoreScale, attend_block
from plait.kernels.cpu.attention.kv_layout import KV_BLOCK, LANES
from plait.kernels.cpu.attention.kv_loading import KvSource, load_block, prefetch_block
from plait.kernels.cpu.attention.products import f32_kernel, int8_vnni_kernel
from plait.kernels.cpu.attention.split_results import end_segment
from plait.kernels.cpu.attention.tiling import BLOCKS_PER_SPLIT, SEGMENT_FIELDS, AttentionTask, TileSlice, segment_of
from plait.kernels.cpu.attention.workspace import AttentionWorkspace, float32_array, int32_array, int64_array
from plait.kernels.cpu.kernel_types import AttentionBatch, HeadLayout, LayerKvCache
from plait.kernels.cpu.vector_ops import address_of, to_bfloat16


def _fill_floats(address: int, count: int, value: Any) -> None:
    array = float32_array(address, count)
    for i in range(count):
        array[i] = value


def init_lanes(task: AttentionTask, tile_slice: TileSlice, load_queries: bool) -> None:
    """Resets the softmax state of all lanes; with `load_queries` also loads their queries and visible positions."""
    ws, head_dim = task.ws, task.heads.head_dim
    for i in range(tile_slice.end_kv_head - tile_slice.kv_head):
        lane = i * tile_slice.lane_stride
        _fill_floats(ws.running_max + 4 * lane, tile_slice.lanes, np.float32(online_softmax.INITIAL_MAX))
        _fill_floats(ws.running_sum + 4 * lane, tile_slice.lanes, np.float32(0.0))
        kv_layout.zero_floats(ws.accumulators + 4 * lane * head_dim, tile_slice.lanes * head_dim // 16)
        if load_queries:
            _load_queries(task, tile_slice, tile_slice.kv_head + i, lane)


def _load_queries(task: AttentionTask, tile_slice: TileSlice, kv_head: int, lane: int) -> None:
    """Loads the queries of one key head, whose first lane in the workspace is `lane`."""
    heads, batch, ws, isa = task.heads, task.batch, task.ws, task.schedule.isa
    head_dim, qkv_channels, window, first_lane = heads.head_dim, task.qkv.shape[1], task.cache.window, lane
    lane_starts = int32_array(ws.lane_starts, ws.capacity + 1)
    kv_begins, kv_ends = int32_array(ws.kv_begins, ws.capacity), int32_array(ws.kv_ends, ws.capacity)
    for segment in range(tile_slice.begin_segment, tile_slice.end_segment):
        lane_starts[segment - tile_slice.begin_segment] = lane - first_lane
        row, first_token, count = segment_of(batch, segment)
        q_start, q_end = batch.q_starts[row], batch.q_starts[row + 1]
        position = batch.kv_starts[row + 1] - batch.kv_starts[row] - (q_end - q_start) + first_token
        for i in range(count):
            channel = (q_start + first_token + i) * qkv_channels + kv_head * heads.q_per_kv * head_dim
            query = address_of(task.qkv) + 4 * channel
            for _ in range(heads.q_per_kv):
                kv_begins[lane], kv_ends[lane] = max(0, position + i - window + 1), position + i + 1
                _store_query(isa, lane, query, ws)
                query += 4 * head_dim
                lane += 1
    lane_starts[tile_slice.end_segment - tile_slice.begin_segment] = lane - first_lane
    if isa != F32 and lane % LANES:
        _pack_queries(isa, lane // LANES * LANES, ws)


def _store_query(isa: int, lane: int, query: int, ws: AttentionWorkspace) -> None:
    """Stores a query, float32 [D] at the address `query`, rounded to bfloat16, or to 16 bits for integer products.

    Packs queries 16 lanes at a time, except for products in float32.
    """
    head_dim = ws.head_dim
    if isa == F32:
        f32_kernel.round_to_bf16(query, ws.queries + 4 * lane * head_dim, head_dim // 16)
        return
    if isa == INT8_VNNI:
        row, scale, excess = ws.query_rows + 2 * lane * head_dim, ws.query_scales + 4 * lane, ws.query_excess + 4 * lane
        int8_vnni_kernel.quantize_query(query, head_dim, row, scale, excess)
    else:
        to_bfloat16(query, ws.rows + 2 * (lane % LANES) * head_dim, head_dim // 16)
    if lane % LANES == LANES - 1:
        _pack_queries(isa, lane - LANES + 1, ws)


def _pack_queries(isa: int, lane: int, ws: AttentionWorkspace) -> None:
    """Packs the 16 queries from `lane` on."""
    rows = ws.query_rows + 2 * lane * ws.head_dim if isa == INT8_VNNI else ws.rows
    kv_layout.pack_queries(rows, ws.head_dim, ws.queries + 4 * lane, ws.query_stride)


def first_visible_block(tile_slice: TileSlice, ws: AttentionWorkspace) -> Any:
    """Returns the index of the first block that is visible to any lane of the tile."""
    kv_begins = int32_array(ws.kv_begins, ws.capacity)
    lowest = int(kv_begins[0])
    for lane in range(1, tile_slice.lanes):
        lowest = min(lowest, int(kv_begins[lane]))
    return lowest // KV_BLOCK


def attend_split(
    task: AttentionTask, tile_slice: TileSlice, begin_block: int, on_end: int, partials: int, partial_lanes: int
) -> None:
    """Computes the attention of all lanes of the tile to the split that begins at `begin_block`.

    `on_end`: what happens to the results. `partials`: the address of one slot for each key head of the slice, with room
    for `partial_lanes` lanes, where partial results are stored or merged.
    """
    batch, ws = task.batch, task.ws
    stack, lane_starts = int64_array(ws.stack, 3 * ws.capacity), int32_array(ws.lane_starts, ws.capacity + 1)
    stack[0], stack[1], stack[2], depth = tile_slice.begin_segment, tile_slice.end_segment, begin_block, 1
    end_block = begin_block + BLOCKS_PER_SPLIT
    while depth:
        depth -= 1
        first, last, block = stack[3 * depth], stack[3 * depth + 1], stack[3 * depth + 2]
        shared_end = _shared_end_block(first, last, tile_slice, batch, ws)
        _attend_shared_blocks(task, tile_slice, first, last, block, min(shared_end, end_block))
        if last == first + 1:
            lane = int(lane_starts[first - tile_slice.begin_segment])
            end_segment(task, tile_slice, first, lane, on_end, partials, partial_lanes)
            continue
        child = first
        for segment in range(first + 1, last + 1):
            if segment == last or batch.segments[SEGMENT_FIELDS * segment + 3] <= shared_end:
                stack[3 * depth], stack[3 * depth + 1] = child, segment
                stack[3 * depth + 2] = max(block, shared_end)
                child, depth = segment, depth + 1


def _shared_end_block(
    first: int, last: int, tile_slice: TileSlice, batch: AttentionBatch, ws: AttentionWorkspace
) -> Any:
    """Returns the first block in which the page tables of the segments differ, or the end of the longest one."""
    lane_starts, kv_ends = int32_array(ws.lane_starts, ws.capacity + 1), int32_array(ws.kv_ends, ws.capacity)
    end = 0
    for segment in range(first, last):
        kv_end = kv_ends[lane_starts[segment + 1 - tile_slice.begin_segment] - 1]
        end = max(end, int(kv_end + KV_BLOCK - 1) // KV_BLOCK)
    for segment in range(first + 1, last):
        end = min(end, int(batch.segments[SEGMENT_FIELDS * segment + 3]))
    return end


def _attend_shared_blocks(
    task: AttentionTask, tile_slice: TileSlice, first: int, last: int, begin_block: int, end_block: int
) -> None:
    """Computes the attention of all lanes of the segments to a range of blocks in the pages of the first segment."""
    cache, heads, batch, ws, isa = task.cache, task.heads, task.batch, task.ws, task.schedule.isa
    lane_starts = int32_array(ws.lane_starts, ws.capacity + 1)
    lane = int(lane_starts[first - tile_slice.begin_segment])
    end_lane = int(lane_starts[last - tile_slice.begin_segment])
    any_begin, all_begin, all_end, any_end = _visible_positions(lane, end_lane, ws)
    row, _, _ = segment_of(batch, first)
    pages = address_of(batch.pages) + 4 * int(batch.first_pages[row])
    heads_in_slice = tile_slice.end_kv_head - tile_slice.kv_head
    head_bytes = heads.head_dim if cache.scales else 2 * heads.head_dim
    channels, offset = (heads_in_slice * head_bytes + 63) // 64 * 32, tile_slice.kv_head * head_bytes
    all_heads = KvSource(pages, batch.page_shift, cache.slot_bytes, cache.keys + offset, cache.values + offset, 0)
    scale, first_block = _score_scale(heads), max(begin_block, any_begin // KV_BLOCK)
    for block in range(first_block, end_block):
        base = block * KV_BLOCK
        count = min(KV_BLOCK, any_end - base)
        needs_mask = base < all_begin or base + KV_BLOCK > all_end
        if isa != AMX or block == first_block:
            prefetch_block(isa, base, count, channels, all_heads)
        if isa == AMX and block + 1 < end_block:  # the next block, while this one is computed
            prefetch_block(isa, base + KV_BLOCK, min(KV_BLOCK, any_end - base - KV_BLOCK), channels, all_heads)
        for i in range(heads_in_slice):
            source = _source_of_head(tile_slice.kv_head + i, i * head_bytes, head_bytes, cache, all_heads)
            keys, key_stride = load_block(isa, base, count, source, ws)
            kv_block, head_lane = KvBlock(base, count, needs_mask, keys, key_stride), i * tile_slice.lane_stride
            attend_block(isa, head_lane + lane, head_lane + end_lane, kv_block, scale, ws)


def _visible_positions(lane: int, end_lane: int, ws: AttentionWorkspace) -> Any:
    """Returns any_begin, all_begin, all_end and any_end of lanes [lane, end_lane).

    Positions [any_begin, any_end) are visible to at least one lane, [all_begin, all_end) to all of them.
    """
    kv_begins, kv_ends = int32_array(ws.kv_begins, ws.capacity), int32_array(ws.kv_ends, ws.capacity)
    any_begin, all_begin, all_end, any_end = kv_begins[lane], kv_begins[lane], kv_ends[lane], kv_ends[lane]
    for i in range(lane, end_lane):
        any_begin, all_begin = min(any_begin, kv_begins[i]), max(all_begin, kv_begins[i])
        all_end, any_end = min(all_end, kv_ends[i]), max(any_end, kv_ends[i])
    return any_begin, all_begin, all_end, any_end


def _score_scale(heads: HeadLayout) -> Any:
    """Returns the scale of a model's scores."""
    if heads.softcap > 0:
        outer, inner = heads.softcap * online_softmax.LOG2_E, heads.scale / heads.softcap
        return ScoreScale(np.float32(outer), np.float32(inner))
    return ScoreScale(np.float32(heads.scale * online_softmax.LOG2_E), np.float32(0.0))


def _source_of_head(kv_head: int, offset: int, head_bytes: int, cache: LayerKvCache, all_heads: KvSource) -> Any:
    """Returns the part of a cache that belongs to a key head, `offset` bytes behind the first head of the slice."""
    to_scale = cache.scales + 4 * kv_head - kv_head * head_bytes if cache.scales else 0
    keys, values = all_heads.keys + offset, all_heads.values + offset
    return KvSource(all_heads.pages, all_heads.shift, all_heads.stride, keys, values, to_scale)
