"""How attention takes a tile's lanes through a split's blocks of 64 positions: down the trie of their pages.

Each lane, a (token, head), goes through its own blocks in order by an online softmax. The lanes of a tile go together:
a block is read once for all that have it, then they part, the last first. So what a lane computes, and in which order,
does not depend on who shares its prefix. In the room a key head's lanes lie side by side, then the next one's.

Knows: tiles and their trie. Must not know: how a block is read (`cpu_blocks`), who computes which split.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from plait.kernels.cpu.attention import amx_kernel, f32_kernel, online_softmax
from plait.kernels.cpu.attention.kv_block import (
    AMX,
    F32,
    KvSource,
    attend_block,
    load_block_bf16,
    load_block_f32,
    prefetch_block,
)
from plait.kernels.cpu.attention.tiling import BLOCKS_PER_SPLIT, SEGMENT_FIELDS
from plait.kernels.cpu.attention.workspace import (
    KV_BLOCK,
    AttentionWorkspace,
    float32_array,
    int32_array,
    int64_array,
    partial_bytes,
)
from plait.kernels.cpu.ops import AttentionBatch, HeadLayout, QuantizedActivations, quantize_blocks
from plait.kernels.cpu.vector_ops import address_of, to_bfloat16

LANES = amx_kernel.LANES
WRITE_OUTPUT, STORE_PARTIAL, MERGE_PARTIAL = range(3)  # what becomes of a lane that has seen all of its split


class LayerKvCache(NamedTuple):
    """A layer's keys and values, in one piece of memory, the values behind the keys; and its window."""

    keys: int
    values: int
    window: int


class TileSlice(NamedTuple):
    """A tile's segments, the lanes of one key head, room from one key head's to the next one's, and key heads."""

    begin_segment: int
    end_segment: int
    lanes: int
    lane_stride: int
    kv_head: int
    end_kv_head: int


@numba.njit  # type: ignore[untyped-decorator]
def _segment(rows: AttentionBatch, segment: int) -> Any:
    """Its row, its first token there, and how many."""
    at = SEGMENT_FIELDS * segment
    return np.int64(rows.segments[at]), np.int64(rows.segments[at + 1]), np.int64(rows.segments[at + 2])


@numba.njit  # type: ignore[untyped-decorator]
def init_lanes(
    isa: int,
    tile_slice: TileSlice,
    qkv: Any,
    caches: LayerKvCache,
    heads: HeadLayout,
    rows: AttentionBatch,
    load_queries: bool,
    ws: AttentionWorkspace,
) -> None:
    """That each lane has seen nothing yet; where `load_queries`, also its query and what it may see."""
    head_dim = heads.head_dim
    for i in range(tile_slice.end_kv_head - tile_slice.kv_head):
        lane = i * tile_slice.lane_stride
        running_max, running_sum = (
            float32_array(ws.running_max + 4 * lane, tile_slice.lanes),
            float32_array(ws.running_sum + 4 * lane, tile_slice.lanes),
        )
        running_max[:] = np.float32(online_softmax.INITIAL_MAX)
        running_sum[:] = np.float32(0.0)
        f32_kernel.zero_floats(ws.accumulators + 4 * lane * head_dim, tile_slice.lanes * head_dim // 16)
        if load_queries:
            _load_queries(isa, tile_slice, tile_slice.kv_head + i, lane, qkv, caches.window, heads, rows, ws)


@numba.njit  # type: ignore[untyped-decorator]
def _load_queries(
    isa: int,
    tile_slice: TileSlice,
    kv_head: int,
    lane: int,
    qkv: Any,
    window: int,
    heads: HeadLayout,
    rows: AttentionBatch,
    ws: AttentionWorkspace,
) -> None:
    head_dim, wide, first_lane = heads.head_dim, qkv.shape[1], lane
    lane_starts = int32_array(ws.lane_starts, ws.capacity + 1)
    kv_begins, kv_ends = int32_array(ws.kv_begins, ws.capacity), int32_array(ws.kv_ends, ws.capacity)
    for segment in range(tile_slice.begin_segment, tile_slice.end_segment):
        lane_starts[segment - tile_slice.begin_segment] = lane - first_lane
        row, first, count = _segment(rows, segment)
        q_start, q_end = rows.q_starts[row], rows.q_starts[row + 1]
        start = rows.kv_starts[row + 1] - rows.kv_starts[row] - (q_end - q_start) + first
        for i in range(count):
            query = address_of(qkv) + 4 * ((q_start + first + i) * wide + kv_head * heads.q_per_kv * head_dim)
            for _ in range(heads.q_per_kv):
                kv_begins[lane], kv_ends[lane] = max(0, start + i - window + 1), start + i + 1
                _store_query(isa, lane, query, ws)
                query += 4 * head_dim
                lane += 1
    lane_starts[tile_slice.end_segment - tile_slice.begin_segment] = lane - first_lane
    if isa != F32 and lane % LANES:
        amx_kernel.pack_queries(ws.rows, head_dim, ws.queries + 4 * (lane // LANES * LANES), ws.query_stride)


@numba.njit  # type: ignore[untyped-decorator]
def first_visible_block(tile_slice: TileSlice, ws: AttentionWorkspace) -> Any:
    """The first block that any lane sees."""
    kv_begins = int32_array(ws.kv_begins, ws.capacity)
    lowest = np.int64(kv_begins[0])
    for lane in range(1, tile_slice.lanes):
        lowest = min(lowest, np.int64(kv_begins[lane]))
    return lowest // KV_BLOCK


@numba.njit  # type: ignore[untyped-decorator]
def _store_query(isa: int, lane: int, query: int, ws: AttentionWorkspace) -> None:
    """Float32 [D] as bfloat16; pairs of 16 lanes are turned together."""
    head_dim = ws.head_dim
    if isa == F32:
        f32_kernel.round_to_bf16(query, ws.queries + 4 * lane * head_dim, head_dim // 16)
        return
    to_bfloat16(query, ws.rows + 2 * (lane % LANES) * head_dim, head_dim // 16)
    if lane % LANES == LANES - 1:
        amx_kernel.pack_queries(ws.rows, head_dim, ws.queries + 4 * (lane - LANES + 1), ws.query_stride)


@numba.njit  # type: ignore[untyped-decorator]
def attend_split(
    isa: int,
    tile_slice: TileSlice,
    begin_block: int,
    on_end: int,
    to: int,
    partial_lanes: int,
    caches: LayerKvCache,
    heads: HeadLayout,
    rows: AttentionBatch,
    ws: AttentionWorkspace,
    out: QuantizedActivations,
) -> None:
    """The split from a block on, for all lanes. `to`: slots of so many lanes, one for each key head."""
    stack, lane_starts = int64_array(ws.stack, 3 * ws.capacity), int32_array(ws.lane_starts, ws.capacity + 1)
    stack[0], stack[1], stack[2], depth = tile_slice.begin_segment, tile_slice.end_segment, begin_block, 1
    end_block = begin_block + BLOCKS_PER_SPLIT
    while depth:
        depth -= 1
        first, last, block = stack[3 * depth], stack[3 * depth + 1], stack[3 * depth + 2]
        until = _shared_end_block(first, last, tile_slice, rows, ws)
        _attend_shared_blocks(isa, first, last, block, min(until, end_block), tile_slice, caches, heads, rows, ws)
        if last == first + 1:
            mark = np.int64(lane_starts[first - tile_slice.begin_segment])
            _finalize_segment(isa, first, mark, on_end, to, partial_lanes, tile_slice, heads, rows, ws, out)
            continue
        at = first
        for segment in range(first + 1, last + 1):
            if segment == last or rows.segments[SEGMENT_FIELDS * segment + 3] <= until:
                stack[3 * depth], stack[3 * depth + 1], stack[3 * depth + 2] = at, segment, max(block, until)
                at, depth = segment, depth + 1


@numba.njit  # type: ignore[untyped-decorator]
def _shared_end_block(
    first: int, last: int, tile_slice: TileSlice, rows: AttentionBatch, ws: AttentionWorkspace
) -> Any:
    """The block at which the segments part, or end."""
    lane_starts, kv_ends = int32_array(ws.lane_starts, ws.capacity + 1), int32_array(ws.kv_ends, ws.capacity)
    until = np.int64(0)
    for segment in range(first, last):
        until = max(
            until, np.int64(kv_ends[lane_starts[segment + 1 - tile_slice.begin_segment] - 1] + KV_BLOCK - 1) // KV_BLOCK
        )
    for segment in range(first + 1, last):
        until = min(until, np.int64(rows.segments[SEGMENT_FIELDS * segment + 3]))
    return until


@numba.njit  # type: ignore[untyped-decorator]
def _attend_shared_blocks(
    isa: int,
    first: int,
    last: int,
    block: int,
    until: int,
    tile_slice: TileSlice,
    caches: LayerKvCache,
    heads: HeadLayout,
    rows: AttentionBatch,
    ws: AttentionWorkspace,
) -> None:
    """All lanes of the segments through the blocks before `until`, which lie in the first one's pages."""
    lane_starts = int32_array(ws.lane_starts, ws.capacity + 1)
    kv_begins, kv_ends = int32_array(ws.kv_begins, ws.capacity), int32_array(ws.kv_ends, ws.capacity)
    lane, end = (
        np.int64(lane_starts[first - tile_slice.begin_segment]),
        np.int64(lane_starts[last - tile_slice.begin_segment]),
    )
    floor, all_from, all_to, limit = kv_begins[lane], kv_begins[lane], kv_ends[lane], kv_ends[lane]
    for i in range(lane, end):
        floor, all_from = min(floor, kv_begins[i]), max(all_from, kv_begins[i])
        all_to, limit = min(all_to, kv_ends[i]), max(limit, kv_ends[i])
    row, _, _ = _segment(rows, first)
    pages = address_of(rows.pages) + 4 * np.int64(rows.first_pages[row])
    step, heads_in_slice = 2 * heads.num_kv_heads * heads.head_dim, tile_slice.end_kv_head - tile_slice.kv_head
    scale = np.float32(heads.scale * online_softmax.LOG2_E)
    offset, at_first = 2 * tile_slice.kv_head * heads.head_dim, max(block, floor // KV_BLOCK)
    all_heads = KvSource(pages, rows.page_shift, step, caches.keys + offset, caches.values + offset)
    for at in range(at_first, until):
        base = at * KV_BLOCK
        count = min(KV_BLOCK, limit - base)
        needs_mask = base < all_from or base + KV_BLOCK > all_to
        if isa != AMX or at == at_first:
            prefetch_block(isa, base, count, heads_in_slice * heads.head_dim, all_heads)
        if isa == AMX and at + 1 < until:  # so that it is on its way while this one is computed
            prefetch_block(
                isa, base + KV_BLOCK, min(KV_BLOCK, limit - base - KV_BLOCK), heads_in_slice * heads.head_dim, all_heads
            )
        for i in range(heads_in_slice):
            offset = 2 * i * heads.head_dim
            source = KvSource(pages, rows.page_shift, step, all_heads.keys + offset, all_heads.values + offset)
            keys = key_step = np.int64(0)
            if isa == F32:
                load_block_f32(base, count, source, ws)
            else:
                keys, key_step = load_block_bf16(base, count, source, ws)
            head_lane = i * tile_slice.lane_stride
            attend_block(isa, head_lane + lane, head_lane + end, base, count, needs_mask, keys, key_step, scale, ws)


@numba.njit  # type: ignore[untyped-decorator]
def _finalize_segment(
    isa: int,
    segment: int,
    mark: int,
    on_end: int,
    to: int,
    partial_lanes: int,
    tile_slice: TileSlice,
    heads: HeadLayout,
    rows: AttentionBatch,
    ws: AttentionWorkspace,
    out: QuantizedActivations,
) -> None:
    """A segment's lanes, from `mark` on, whose room others may use now."""
    _, _, count = _segment(rows, segment)
    lanes, head_dim = count * heads.q_per_kv, heads.head_dim
    for i in range(tile_slice.end_kv_head - tile_slice.kv_head):
        lane = i * tile_slice.lane_stride + mark
        accumulators, running_max, running_sum = (
            ws.accumulators + 4 * lane * head_dim,
            ws.running_max + 4 * lane,
            ws.running_sum + 4 * lane,
        )
        if on_end == WRITE_OUTPUT:
            _write_output(isa, segment, tile_slice.kv_head + i, accumulators, running_sum, heads, rows, out)
            continue
        slot = to + i * partial_bytes(partial_lanes, head_dim)
        places = slot + 4 * mark * head_dim, slot + 4 * partial_lanes * head_dim + 4 * mark
        if on_end == STORE_PARTIAL:
            float32_array(places[0], lanes * head_dim)[:] = float32_array(accumulators, lanes * head_dim)
            float32_array(places[1], lanes)[:] = float32_array(running_max, lanes)
            float32_array(places[1] + 4 * partial_lanes, lanes)[:] = float32_array(running_sum, lanes)
        else:
            _merge_lanes(
                lanes,
                head_dim,
                accumulators,
                running_max,
                running_sum,
                places[0],
                places[1],
                places[1] + 4 * partial_lanes,
            )


@numba.njit  # type: ignore[untyped-decorator]
def _merge_lanes(
    lanes: int,
    head_dim: int,
    accumulators: int,
    running_max: int,
    running_sum: int,
    to: int,
    to_references: int,
    to_sums: int,
) -> None:
    for lane in range(lanes):
        total, place = accumulators + 4 * lane * head_dim, to + 4 * lane * head_dim
        online_softmax.merge_partial(
            total,
            running_max + 4 * lane,
            running_sum + 4 * lane,
            place,
            to_references + 4 * lane,
            to_sums + 4 * lane,
            head_dim // 16,
        )


@numba.njit  # type: ignore[untyped-decorator]
def merge_partials(tile_slice: TileSlice, slots: int, to: int, partial_lanes: int, head_dim: int) -> None:
    """What was kept of one split to what was kept of those before it."""
    for i in range(tile_slice.end_kv_head - tile_slice.kv_head):
        one, other = slots + i * partial_bytes(partial_lanes, head_dim), to + i * partial_bytes(partial_lanes, head_dim)
        behind = 4 * partial_lanes * head_dim
        more = behind + 4 * partial_lanes
        _merge_lanes(tile_slice.lanes, head_dim, one, one + behind, one + more, other, other + behind, other + more)


@numba.njit  # type: ignore[untyped-decorator]
def write_partials(
    isa: int,
    tile_slice: TileSlice,
    slots: int,
    partial_lanes: int,
    heads: HeadLayout,
    rows: AttentionBatch,
    out: QuantizedActivations,
) -> None:
    """All lanes' results from their slots."""
    for i in range(tile_slice.end_kv_head - tile_slice.kv_head):
        accumulators = slots + i * partial_bytes(partial_lanes, heads.head_dim)
        running_sum = accumulators + 4 * partial_lanes * (heads.head_dim + 1)
        for segment in range(tile_slice.begin_segment, tile_slice.end_segment):
            _write_output(isa, segment, tile_slice.kv_head + i, accumulators, running_sum, heads, rows, out)
            _, _, count = _segment(rows, segment)
            accumulators, running_sum = (
                accumulators + 4 * count * heads.q_per_kv * heads.head_dim,
                running_sum + 4 * count * heads.q_per_kv,
            )


@numba.njit  # type: ignore[untyped-decorator]
def _write_output(
    isa: int,
    segment: int,
    kv_head: int,
    accumulators: int,
    running_sum: int,
    heads: HeadLayout,
    rows: AttentionBatch,
    out: QuantizedActivations,
) -> None:
    """A segment's lanes of one key head, which lie at these addresses."""
    blocks, head_dim, lane = out.scales.shape[1], heads.head_dim, 0
    row, first, count = _segment(rows, segment)
    weights = float32_array(running_sum, count * heads.q_per_kv)
    for token in range(rows.q_starts[row] + first, rows.q_starts[row] + first + count):
        for head in range(kv_head * heads.q_per_kv, (kv_head + 1) * heads.q_per_kv):
            total = float32_array(accumulators + 4 * lane * head_dim, head_dim)
            inverse = np.float32(1.0) / weights[lane]
            for d in range(head_dim):
                total[d] *= inverse
            if isa != F32:
                amx_kernel.unpermute_channels(accumulators + 4 * lane * head_dim, head_dim)
            quantize_blocks(
                accumulators + 4 * lane * head_dim, out, token * blocks + head * head_dim // 32, head_dim // 32
            )
            lane += 1
