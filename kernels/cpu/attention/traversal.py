"""Computes one KV split for a tile of lanes. Blocks of KV that several sequences share are read once for all of them.

A lane is one query head of one new token. The page tables of a tile's segments form a trie, which is traversed depth
first with an explicit stack: the segments below a node attend to their shared blocks together, then each child
separately, the last child first. Every lane attends to its blocks in order, with an online softmax, so its bits do not
depend on which sequences share its prefix.

The workspace holds all lanes of one key head, then all of the next.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from plait.kernels.cpu.attention import f32_kernel, int8_vnni_kernel, kv_layout, online_softmax
from plait.kernels.cpu.attention.isa import AMX, F32, INT8_VNNI
from plait.kernels.cpu.attention.kv_block import ScoreScale, attend_block
from plait.kernels.cpu.attention.kv_layout import KV_BLOCK, LANES
from plait.kernels.cpu.attention.kv_loading import (
    KvSource,
    load_block_bf16,
    load_block_f32,
    load_block_int8,
    prefetch_block,
)
from plait.kernels.cpu.attention.tiling import BLOCKS_PER_SPLIT, SEGMENT_FIELDS
from plait.kernels.cpu.attention.workspace import (
    AttentionWorkspace,
    float32_array,
    int32_array,
    int64_array,
    partial_bytes,
)
from plait.kernels.cpu.jit import inner_njit
from plait.kernels.cpu.kernel_types import AttentionBatch, HeadLayout, LayerKvCache, QuantizedActivations
from plait.kernels.cpu.ops import quantize_blocks
from plait.kernels.cpu.vector_ops import address_of, to_bfloat16

WRITE_OUTPUT, STORE_PARTIAL, MERGE_PARTIAL = range(3)  # values of `on_end`: what happens to the results of a split


class TileSlice(NamedTuple):
    """A tile's segments, for a range of key heads."""

    begin_segment: int
    end_segment: int
    lanes: int  # of one key head
    lane_stride: int  # lanes of the workspace from one key head to the next
    kv_head: int
    end_kv_head: int


@inner_njit
def _segment(batch: AttentionBatch, segment: int) -> Any:
    """Returns a segment's row, its first new token within the row, and its number of tokens."""
    field = SEGMENT_FIELDS * segment
    return np.int64(batch.segments[field]), np.int64(batch.segments[field + 1]), np.int64(batch.segments[field + 2])


# Loops, because slice assignment makes numba compile some forty functions that format an error message about shapes.
@inner_njit
def _fill_floats(address: int, count: int, value: float) -> None:
    array = float32_array(address, count)
    for i in range(count):
        array[i] = value


@inner_njit
def _copy_floats(source: int, target: int, count: int) -> None:
    read, written = float32_array(source, count), float32_array(target, count)
    for i in range(count):
        written[i] = read[i]


@inner_njit
def init_lanes(
    isa: int,
    tile_slice: TileSlice,
    qkv: Any,
    cache: LayerKvCache,
    heads: HeadLayout,
    batch: AttentionBatch,
    load_queries: bool,
    ws: AttentionWorkspace,
) -> None:
    """Resets the softmax state of all lanes; with `load_queries` also loads their queries and visible positions."""
    head_dim = heads.head_dim
    for i in range(tile_slice.end_kv_head - tile_slice.kv_head):
        lane = i * tile_slice.lane_stride
        _fill_floats(ws.running_max + 4 * lane, tile_slice.lanes, np.float32(online_softmax.INITIAL_MAX))
        _fill_floats(ws.running_sum + 4 * lane, tile_slice.lanes, np.float32(0.0))
        kv_layout.zero_floats(ws.accumulators + 4 * lane * head_dim, tile_slice.lanes * head_dim // 16)
        if load_queries:
            _load_queries(isa, tile_slice, tile_slice.kv_head + i, lane, qkv, cache.window, heads, batch, ws)


@inner_njit
def _load_queries(
    isa: int,
    tile_slice: TileSlice,
    kv_head: int,
    lane: int,
    qkv: Any,
    window: int,
    heads: HeadLayout,
    batch: AttentionBatch,
    ws: AttentionWorkspace,
) -> None:
    """Loads the queries of one key head, whose first lane in the workspace is `lane`."""
    head_dim, qkv_channels, first_lane = heads.head_dim, qkv.shape[1], lane
    lane_starts = int32_array(ws.lane_starts, ws.capacity + 1)
    kv_begins, kv_ends = int32_array(ws.kv_begins, ws.capacity), int32_array(ws.kv_ends, ws.capacity)
    for segment in range(tile_slice.begin_segment, tile_slice.end_segment):
        lane_starts[segment - tile_slice.begin_segment] = lane - first_lane
        row, first_token, count = _segment(batch, segment)
        q_start, q_end = batch.q_starts[row], batch.q_starts[row + 1]
        position = batch.kv_starts[row + 1] - batch.kv_starts[row] - (q_end - q_start) + first_token
        for i in range(count):
            channel = (q_start + first_token + i) * qkv_channels + kv_head * heads.q_per_kv * head_dim
            query = address_of(qkv) + 4 * channel
            for _ in range(heads.q_per_kv):
                kv_begins[lane], kv_ends[lane] = max(0, position + i - window + 1), position + i + 1
                _store_query(isa, lane, query, ws)
                query += 4 * head_dim
                lane += 1
    lane_starts[tile_slice.end_segment - tile_slice.begin_segment] = lane - first_lane
    if isa != F32 and isa != INT8_VNNI and lane % LANES:
        kv_layout.pack_queries(ws.rows, head_dim, ws.queries + 4 * (lane // LANES * LANES), ws.query_stride)


@inner_njit
def _store_query(isa: int, lane: int, query: int, ws: AttentionWorkspace) -> None:
    """Stores a query, float32 [D] at the address `query`, rounded to bfloat16. Packs queries 16 lanes at a time.

    For integer products it is rounded to 16 bits instead, and each lane is stored by itself.
    """
    head_dim = ws.head_dim
    if isa == INT8_VNNI:
        int8_vnni_kernel.quantize_query(query, head_dim, ws.queries + 4 * lane * head_dim)
        return
    if isa == F32:
        f32_kernel.round_to_bf16(query, ws.queries + 4 * lane * head_dim, head_dim // 16)
        return
    to_bfloat16(query, ws.rows + 2 * (lane % LANES) * head_dim, head_dim // 16)
    if lane % LANES == LANES - 1:
        kv_layout.pack_queries(ws.rows, head_dim, ws.queries + 4 * (lane - LANES + 1), ws.query_stride)


@inner_njit
def first_visible_block(tile_slice: TileSlice, ws: AttentionWorkspace) -> Any:
    """Returns the index of the first block that is visible to any lane of the tile."""
    kv_begins = int32_array(ws.kv_begins, ws.capacity)
    lowest = np.int64(kv_begins[0])
    for lane in range(1, tile_slice.lanes):
        lowest = min(lowest, np.int64(kv_begins[lane]))
    return lowest // KV_BLOCK


@inner_njit
def attend_split(
    isa: int,
    tile_slice: TileSlice,
    begin_block: int,
    on_end: int,
    partials: int,
    partial_lanes: int,
    cache: LayerKvCache,
    heads: HeadLayout,
    batch: AttentionBatch,
    ws: AttentionWorkspace,
    out: QuantizedActivations,
) -> None:
    """Computes the attention of all lanes of the tile to the split that begins at `begin_block`.

    `on_end`: what happens to the results. `partials`: the address of one slot for each key head of the slice, with room
    for `partial_lanes` lanes, where partial results are stored or merged.
    """
    stack, lane_starts = int64_array(ws.stack, 3 * ws.capacity), int32_array(ws.lane_starts, ws.capacity + 1)
    stack[0], stack[1], stack[2], depth = tile_slice.begin_segment, tile_slice.end_segment, begin_block, 1
    end_block = begin_block + BLOCKS_PER_SPLIT
    while depth:
        depth -= 1
        first, last, block = stack[3 * depth], stack[3 * depth + 1], stack[3 * depth + 2]
        shared_end = _shared_end_block(first, last, tile_slice, batch, ws)
        _attend_shared_blocks(isa, first, last, block, min(shared_end, end_block), tile_slice, cache, heads, batch, ws)
        if last == first + 1:
            lane = np.int64(lane_starts[first - tile_slice.begin_segment])
            _finalize_segment(isa, first, lane, on_end, partials, partial_lanes, tile_slice, heads, batch, ws, out)
            continue
        child = first
        for segment in range(first + 1, last + 1):
            if segment == last or batch.segments[SEGMENT_FIELDS * segment + 3] <= shared_end:
                stack[3 * depth], stack[3 * depth + 1] = child, segment
                stack[3 * depth + 2] = max(block, shared_end)
                child, depth = segment, depth + 1


@inner_njit
def _shared_end_block(
    first: int, last: int, tile_slice: TileSlice, batch: AttentionBatch, ws: AttentionWorkspace
) -> Any:
    """Returns the first block in which the page tables of the segments differ, or the end of the longest one."""
    lane_starts, kv_ends = int32_array(ws.lane_starts, ws.capacity + 1), int32_array(ws.kv_ends, ws.capacity)
    end = np.int64(0)
    for segment in range(first, last):
        kv_end = kv_ends[lane_starts[segment + 1 - tile_slice.begin_segment] - 1]
        end = max(end, np.int64(kv_end + KV_BLOCK - 1) // KV_BLOCK)
    for segment in range(first + 1, last):
        end = min(end, np.int64(batch.segments[SEGMENT_FIELDS * segment + 3]))
    return end


@inner_njit
def _attend_shared_blocks(
    isa: int,
    first: int,
    last: int,
    begin_block: int,
    end_block: int,
    tile_slice: TileSlice,
    cache: LayerKvCache,
    heads: HeadLayout,
    batch: AttentionBatch,
    ws: AttentionWorkspace,
) -> None:
    """Computes the attention of all lanes of the segments to a range of blocks in the pages of the first segment."""
    lane_starts = int32_array(ws.lane_starts, ws.capacity + 1)
    kv_begins, kv_ends = int32_array(ws.kv_begins, ws.capacity), int32_array(ws.kv_ends, ws.capacity)
    lane = np.int64(lane_starts[first - tile_slice.begin_segment])
    end_lane = np.int64(lane_starts[last - tile_slice.begin_segment])
    # [any_begin, any_end) is visible to at least one lane, [all_begin, all_end) to all of them.
    any_begin, all_begin, all_end, any_end = kv_begins[lane], kv_begins[lane], kv_ends[lane], kv_ends[lane]
    for i in range(lane, end_lane):
        any_begin, all_begin = min(any_begin, kv_begins[i]), max(all_begin, kv_begins[i])
        all_end, any_end = min(all_end, kv_ends[i]), max(any_end, kv_ends[i])
    row, _, _ = _segment(batch, first)
    pages = address_of(batch.pages) + 4 * np.int64(batch.first_pages[row])
    heads_in_slice, head_bytes = tile_slice.end_kv_head - tile_slice.kv_head, 2 * heads.head_dim
    if cache.scales:
        head_bytes = heads.head_dim
    channels = (heads_in_slice * head_bytes + 63) // 64 * 32
    scale = ScoreScale(np.float32(heads.scale * online_softmax.LOG2_E), np.float32(0.0))
    if heads.softcap > 0:
        outer, inner = heads.softcap * online_softmax.LOG2_E, heads.scale / heads.softcap
        scale = ScoreScale(np.float32(outer), np.float32(inner))
    first_block, slice_offset = max(begin_block, any_begin // KV_BLOCK), tile_slice.kv_head * head_bytes
    all_heads = KvSource(
        pages, batch.page_shift, cache.slot_bytes, cache.keys + slice_offset, cache.values + slice_offset, 0
    )
    for block in range(first_block, end_block):
        base = block * KV_BLOCK
        count = min(KV_BLOCK, any_end - base)
        needs_mask = base < all_begin or base + KV_BLOCK > all_end
        if isa != AMX or block == first_block:
            prefetch_block(isa, base, count, channels, all_heads)
        if isa == AMX and block + 1 < end_block:  # the next block, while this one is computed
            prefetch_block(isa, base + KV_BLOCK, min(KV_BLOCK, any_end - base - KV_BLOCK), channels, all_heads)
        for i in range(heads_in_slice):
            offset, to_scale = i * head_bytes, 0
            if cache.scales:
                kv_head = tile_slice.kv_head + i
                to_scale = cache.scales + 4 * kv_head - kv_head * head_bytes
            source = KvSource(
                pages, batch.page_shift, cache.slot_bytes, all_heads.keys + offset, all_heads.values + offset, to_scale
            )
            keys = key_stride = np.int64(0)
            if isa == F32:
                load_block_f32(base, count, source, ws)
            elif isa == INT8_VNNI:
                keys, key_stride = load_block_int8(base, count, source, ws)
            else:
                keys, key_stride = load_block_bf16(base, count, source, ws)
            head_lane = i * tile_slice.lane_stride
            attend_block(
                isa, head_lane + lane, head_lane + end_lane, base, count, needs_mask, keys, key_stride, scale, ws
            )


@inner_njit
def _finalize_segment(
    isa: int,
    segment: int,
    first_lane: int,
    on_end: int,
    partials: int,
    partial_lanes: int,
    tile_slice: TileSlice,
    heads: HeadLayout,
    batch: AttentionBatch,
    ws: AttentionWorkspace,
    out: QuantizedActivations,
) -> None:
    """Writes, stores or merges the results of a segment, whose lanes begin at `first_lane` of each key head.

    This must happen before the next segment is computed, whose last vectors may overwrite these lanes.
    """
    _, _, count = _segment(batch, segment)
    lanes, head_dim = count * heads.q_per_kv, heads.head_dim
    for i in range(tile_slice.end_kv_head - tile_slice.kv_head):
        lane = i * tile_slice.lane_stride + first_lane
        accumulators = ws.accumulators + 4 * lane * head_dim
        running_max, running_sum = ws.running_max + 4 * lane, ws.running_sum + 4 * lane
        if on_end == WRITE_OUTPUT:
            _write_output(isa, segment, tile_slice.kv_head + i, accumulators, running_sum, heads, batch, out)
            continue
        slot = partials + i * partial_bytes(partial_lanes, head_dim)
        to_accumulators = slot + 4 * first_lane * head_dim
        to_max = slot + 4 * partial_lanes * head_dim + 4 * first_lane
        to_sum = to_max + 4 * partial_lanes
        if on_end == STORE_PARTIAL:
            _copy_floats(accumulators, to_accumulators, lanes * head_dim)
            _copy_floats(running_max, to_max, lanes)
            _copy_floats(running_sum, to_sum, lanes)
        else:
            _merge_lanes(lanes, head_dim, accumulators, running_max, running_sum, to_accumulators, to_max, to_sum)


@inner_njit
def _merge_lanes(
    lanes: int,
    head_dim: int,
    accumulators: int,
    running_max: int,
    running_sum: int,
    to_accumulators: int,
    to_max: int,
    to_sum: int,
) -> None:
    """Merges the softmax state of consecutive lanes into the state at the `to_` addresses."""
    for lane in range(lanes):
        online_softmax.merge_partial(
            accumulators + 4 * lane * head_dim,
            running_max + 4 * lane,
            running_sum + 4 * lane,
            to_accumulators + 4 * lane * head_dim,
            to_max + 4 * lane,
            to_sum + 4 * lane,
            head_dim // 16,
        )


@inner_njit
def merge_partials(tile_slice: TileSlice, slots: int, to_slots: int, partial_lanes: int, head_dim: int) -> None:
    """Merges the partial results of one split into those of the splits before it."""
    max_offset = 4 * partial_lanes * head_dim
    sum_offset = max_offset + 4 * partial_lanes
    for i in range(tile_slice.end_kv_head - tile_slice.kv_head):
        slot = slots + i * partial_bytes(partial_lanes, head_dim)
        to = to_slots + i * partial_bytes(partial_lanes, head_dim)
        _merge_lanes(
            tile_slice.lanes, head_dim, slot, slot + max_offset, slot + sum_offset, to, to + max_offset, to + sum_offset
        )


@inner_njit
def write_partials(
    isa: int,
    tile_slice: TileSlice,
    slots: int,
    partial_lanes: int,
    heads: HeadLayout,
    batch: AttentionBatch,
    out: QuantizedActivations,
) -> None:
    """Writes the merged results of all lanes from their slots to `out`."""
    for i in range(tile_slice.end_kv_head - tile_slice.kv_head):
        accumulators = slots + i * partial_bytes(partial_lanes, heads.head_dim)
        running_sum = accumulators + 4 * partial_lanes * (heads.head_dim + 1)
        for segment in range(tile_slice.begin_segment, tile_slice.end_segment):
            _write_output(isa, segment, tile_slice.kv_head + i, accumulators, running_sum, heads, batch, out)
            _, _, count = _segment(batch, segment)
            accumulators += 4 * count * heads.q_per_kv * heads.head_dim
            running_sum += 4 * count * heads.q_per_kv


@inner_njit
def _write_output(
    isa: int,
    segment: int,
    kv_head: int,
    accumulators: int,
    running_sum: int,
    heads: HeadLayout,
    batch: AttentionBatch,
    out: QuantizedActivations,
) -> None:
    """Divides the accumulators of a segment's lanes of one key head by their sums, and writes them to `out`."""
    blocks, head_dim, lane = out.scales.shape[1], heads.head_dim, 0
    row, first_token, count = _segment(batch, segment)
    sums = float32_array(running_sum, count * heads.q_per_kv)
    begin = batch.q_starts[row] + first_token
    for token in range(begin, begin + count):
        for head in range(kv_head * heads.q_per_kv, (kv_head + 1) * heads.q_per_kv):
            address = accumulators + 4 * lane * head_dim
            values = float32_array(address, head_dim)
            inverse = np.float32(1.0) / sums[lane]
            for d in range(head_dim):
                values[d] *= inverse
            if isa != F32 and isa != INT8_VNNI:
                kv_layout.unpermute_channels(address, head_dim)
            quantize_blocks(address, out, token * blocks + head * head_dim // 32, head_dim // 32)
            lane += 1
