"""One block of 64 cached positions in attention: read from a row's pages, then all lanes of a tile over it.

Where the CPU multiplies bfloat16 keys stay where they lie if pages hold one token and follow each other, and values are
paired; elsewhere both become float32. A lane's bits are its own either way (`amx_kernel`, `avx512_bf16_kernel`, `f32_kernel`).

Knows: pages, a thread's room. Must not know: which lanes see which block, rows, phases.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from plait.kernels.cpu.attention import amx_kernel, avx512_bf16_kernel, f32_kernel, online_softmax
from plait.kernels.cpu.attention.workspace import KV_BLOCK, AttentionWorkspace, int32_array, int64_array
from plait.kernels.cpu.llvm import HAS_BF16_DOT

LANES, NARROW_LANES = amx_kernel.LANES, online_softmax.NARROW_LANES
F32, AVX512_BF16, AMX = range(3)  # how products are computed: `f32_kernel`, `avx512_bf16_kernel`, `amx_kernel`
BEST_WITHOUT_AMX = AVX512_BF16 if HAS_BF16_DOT else F32


class KvSource(NamedTuple):
    """Where a row's keys and values lie: addresses of its page table and, for one key head, of the caches."""

    pages: int
    shift: int  # a page holds 1 << shift positions
    stride: int  # bytes from one slot to the next
    keys: int
    values: int


@numba.njit  # type: ignore[untyped-decorator]
def _offset(position: int, source: KvSource) -> Any:
    """Where a position's keys and values lie, in bytes."""
    page = np.int64(int32_array(source.pages, 1 << 30)[position >> source.shift])
    return ((page << source.shift) + (position & ((1 << source.shift) - 1))) * source.stride


@numba.njit  # type: ignore[untyped-decorator]
def prefetch_block(isa: int, base: int, count: int, width: int, source: KvSource) -> None:
    """Brings a block's keys and values near, `width` channels of each: of key heads that lie side by side.

    As one run of slots if its ends look like one.
    """
    offset, run = _offset(base, source), np.int64(count)
    if _offset(base + count - 1, source) != offset + (count - 1) * source.stride:
        run = np.int64(1)
    for cache in (source.keys, source.values):
        for j in range(0, count, run):
            place = cache + _offset(base + j, source)
            if isa == AMX:
                f32_kernel.prefetch_rows(place, source.stride, run, width)
            else:
                f32_kernel.touch_rows(place, source.stride, run, width)


@numba.njit  # type: ignore[untyped-decorator]
def load_block_f32(base: int, count: int, source: KvSource, ws: AttentionWorkspace) -> None:
    """The block's keys, turned, and its values, as float32."""
    head_dim, kv_addresses = ws.head_dim, int64_array(ws.kv_addresses, KV_BLOCK)
    for j in range((count + 15) // 16 * 16):  # keys beyond `count` are the last again
        offset = _offset(base + min(j, count - 1), source)
        kv_addresses[j] = source.keys + offset
        if j < count:
            f32_kernel.bf16_to_f32(source.values + offset, ws.values + 4 * j * head_dim, head_dim // 16)
    for j in range(0, count, 16):
        for channel in range(0, head_dim, 32):
            f32_kernel.transpose_keys(ws.kv_addresses + 8 * j, 2 * channel, ws.keys + 4 * (channel * KV_BLOCK + j))
    if count % 2:
        f32_kernel.zero_floats(ws.values + 4 * count * head_dim, head_dim // 16)


@numba.njit  # type: ignore[untyped-decorator]
def _is_contiguous(base: int, count: int, source: KvSource, ws: AttentionWorkspace) -> Any:
    """Whether the block's slots follow each other, with as many behind them as fill its last chunk."""
    if source.shift:
        return False
    pages, first = int32_array(source.pages, 1 << 30), base + count // 32 * 32
    if first > base and not amx_kernel.are_consecutive(source.pages + 4 * base, count // 32):
        return False
    for position in range(first, base + count):
        if pages[position] != pages[base] + position - base:
            return False
    return source.keys + _offset(base, source) + (count + 31) // 32 * 32 * source.stride <= source.values


@numba.njit  # type: ignore[untyped-decorator]
def load_block_bf16(base: int, count: int, source: KvSource, ws: AttentionWorkspace) -> Any:
    """The block's values in pairs; where its keys lie, and how far apart: in the cache, if that is one run of slots.

    Keys behind the last may be anything, values are zero.
    """
    head_dim, pairs = ws.head_dim, count // 2
    keys: Any = ws.keys
    stride: Any = np.int64(2 * head_dim)
    if _is_contiguous(base, count, source, ws):
        offset = _offset(base, source)
        keys, stride = source.keys + offset, source.stride
        if pairs:
            amx_kernel.pack_values(source.values + offset, stride, head_dim, pairs, ws.values)
    else:
        for j in range(count):
            offset = _offset(base + j, source)
            amx_kernel.copy(source.keys + offset, keys + j * stride, head_dim // 32)
            amx_kernel.copy(source.values + offset, ws.value_copies + j * stride, head_dim // 32)
        if pairs:
            amx_kernel.pack_values(ws.value_copies, stride, head_dim, pairs, ws.values)
    if count % 2:
        amx_kernel.copy(source.values + _offset(base + count - 1, source), ws.value_copies, head_dim // 32)
        f32_kernel.zero_floats(ws.value_copies + 2 * head_dim, head_dim // 32)
        amx_kernel.pack_values(ws.value_copies, np.int64(2 * head_dim), head_dim, 1, ws.values + 4 * pairs * head_dim)
        pairs += 1
    left = (count + 31) // 32 * 16 - pairs
    if left:
        f32_kernel.zero_floats(ws.values + 4 * pairs * head_dim, left * head_dim // 16)
    return keys, stride


@numba.njit  # type: ignore[untyped-decorator]
def attend_block(
    isa: int,
    lane: int,
    end: int,
    base: int,
    count: int,
    needs_mask: bool,
    keys: int,
    stride: int,
    scale: float,
    ws: AttentionWorkspace,
) -> None:
    """Lanes over a block that was read: `keys` and `stride` as `load_block_bf16` gave them; `needs_mask` if not all see all of it.

    What lies behind the last lane may be computed, too: those lanes are done, or no lanes at all.
    """
    if isa == F32:
        _attend_f32(lane, end, base, count, scale, ws)
    elif isa == AVX512_BF16:
        _attend_avx512(lane, end, base, count, needs_mask, keys, stride, scale, ws)
    elif end - lane <= NARROW_LANES:
        _attend_x4(isa, lane, end, base, count, needs_mask, keys, stride, scale, ws)
    else:
        _attend_amx(lane, end, base, count, needs_mask, keys, stride, scale, ws)


@numba.njit  # type: ignore[untyped-decorator]
def _attend_x4(
    isa: int,
    lane: int,
    end: int,
    base: int,
    count: int,
    needs_mask: bool,
    keys: int,
    stride: int,
    scale: float,
    ws: AttentionWorkspace,
) -> None:
    """Up to 4 lanes."""
    head_dim, chunks, scores, accumulators = (
        ws.head_dim,
        (count + 31) // 32,
        ws.scores,
        ws.accumulators + 4 * lane * ws.head_dim,
    )
    if isa == AMX:
        amx_kernel.compute_qk_x4(ws.queries + 4 * lane, ws.query_stride, head_dim, keys, stride, chunks, scores)
    else:
        avx512_bf16_kernel.pack_queries_x4(ws.queries + 4 * lane, ws.query_stride, head_dim, ws.rows)
        avx512_bf16_kernel.compute_qk_x4(ws.rows, head_dim, keys, stride, chunks, scores)
    if needs_mask:
        online_softmax.apply_mask_x4(scores, base, ws.kv_begins + 4 * lane, ws.kv_ends + 4 * lane)
    running_max, running_sum = ws.running_max + 4 * lane, ws.running_sum + 4 * lane
    online_softmax.online_softmax_update_x4(
        scores, chunks, scale, running_max, running_sum, accumulators, head_dim // 16, end - lane, ws.probs
    )
    if isa == AMX:
        amx_kernel.accumulate_pv_x4(ws.probs, ws.values, head_dim, chunks, accumulators)
    else:
        avx512_bf16_kernel.accumulate_pv_x4(ws.probs, ws.values, head_dim, chunks, accumulators)


@numba.njit  # type: ignore[untyped-decorator]
def _attend_avx512(
    first: int,
    last: int,
    base: int,
    count: int,
    needs_mask: bool,
    keys: int,
    stride: int,
    scale: float,
    ws: AttentionWorkspace,
) -> None:
    """In vectors: 16 lanes at a time, 4 where that is quicker."""
    lane = first
    while last - lane > LANES - NARROW_LANES:
        query = ws.queries + 4 * lane
        avx512_bf16_kernel.compute_qk(query, ws.query_stride, ws.head_dim, keys, stride, (count + 31) // 32, ws.scores)
        accumulators = _update_softmax(ws.scores, lane, last, base, count, needs_mask, scale, ws)
        avx512_bf16_kernel.accumulate_pv(ws.probs, ws.values, ws.head_dim, (count + 31) // 32, accumulators)
        lane += LANES
    while lane < last:
        _attend_x4(AVX512_BF16, lane, min(last, lane + NARROW_LANES), base, count, needs_mask, keys, stride, scale, ws)
        lane += NARROW_LANES


@numba.njit  # type: ignore[untyped-decorator]
def _attend_amx(
    first: int,
    last: int,
    base: int,
    count: int,
    needs_mask: bool,
    keys: int,
    stride: int,
    scale: float,
    ws: AttentionWorkspace,
) -> None:
    """By AMX."""
    head_dim, chunks = ws.head_dim, (count + 31) // 32
    scores, others = ws.scores, ws.scores + 4 * KV_BLOCK * LANES
    amx_kernel.compute_qk(ws.queries + 4 * first, ws.query_stride, head_dim, keys, stride, chunks, scores)
    for lane in range(first, last, LANES):
        if lane + LANES < last:  # the matrix unit computes the next scores while the vectors do this softmax
            query = ws.queries + 4 * (lane + LANES)
            amx_kernel.compute_qk(query, ws.query_stride, head_dim, keys, stride, chunks, others)
        accumulators = _update_softmax(scores, lane, last, base, count, needs_mask, scale, ws)
        amx_kernel.accumulate_pv(ws.probs, ws.values, head_dim, chunks, accumulators)
        scores, others = others, scores


@numba.njit  # type: ignore[untyped-decorator]
def _update_softmax(
    scores: int, lane: int, last: int, base: int, count: int, needs_mask: bool, scale: float, ws: AttentionWorkspace
) -> Any:
    """The softmax of 16 lanes; where their totals lie."""
    if needs_mask:
        online_softmax.apply_mask_x16(scores, base, ws.kv_begins + 4 * lane, ws.kv_ends + 4 * lane)
    accumulators = ws.accumulators + 4 * lane * ws.head_dim
    online_softmax.online_softmax_update_x16(
        scores,
        (count + 31) // 32,
        scale,
        ws.running_max + 4 * lane,
        ws.running_sum + 4 * lane,
        accumulators,
        ws.head_dim // 16,
        min(LANES, last - lane),
        ws.probs,
    )
    return accumulators


@numba.njit  # type: ignore[untyped-decorator]
def _attend_f32(first: int, last: int, base: int, count: int, scale: float, ws: AttentionWorkspace) -> None:
    """In float32."""
    lane = first
    while lane < last:
        if last - lane >= 3:
            _attend_f32_lanes(3, lane, base, count, scale, ws)
            lane += 3
        elif last - lane == 2:
            _attend_f32_lanes(2, lane, base, count, scale, ws)
            lane += 2
        else:
            _attend_f32_lanes(1, lane, base, count, scale, ws)
            lane += 1


@numba.njit  # type: ignore[untyped-decorator]
def _attend_f32_lanes(lanes: int, lane: int, base: int, count: int, scale: float, ws: AttentionWorkspace) -> None:
    head_dim = ws.head_dim
    queries, accumulators = ws.queries + 4 * lane * head_dim, ws.accumulators + 4 * lane * head_dim
    kv_begins, kv_ends = int32_array(ws.kv_begins, ws.capacity), int32_array(ws.kv_ends, ws.capacity)
    if lanes == 3:
        f32_kernel.compute_qk(3, queries, ws.keys, head_dim, ws.scores)
    elif lanes == 2:
        f32_kernel.compute_qk(2, queries, ws.keys, head_dim, ws.scores)
    else:
        f32_kernel.compute_qk(1, queries, ws.keys, head_dim, ws.scores)
    for i in range(lanes):
        online_softmax.online_softmax_update(
            ws.scores + f32_kernel.ROW_BYTES * i,
            max(np.int64(0), kv_begins[lane + i] - base),
            max(np.int64(0), min(np.int64(KV_BLOCK), kv_ends[lane + i] - base)),
            scale,
            ws.running_max + 4 * (lane + i),
            ws.running_sum + 4 * (lane + i),
            accumulators + 4 * i * head_dim,
            head_dim // 16,
        )
    for first in range(0, count, 2 * f32_kernel.PAIRS):
        pairs = min(f32_kernel.PAIRS, (count - first + 1) // 2)
        values = ws.values + 4 * first * head_dim
        for channel in range(0, 4 * head_dim, 128):
            if lanes == 3:
                f32_kernel.accumulate_pv(
                    3, ws.scores + 4 * first, values + channel, head_dim, pairs, accumulators + channel
                )
            elif lanes == 2:
                f32_kernel.accumulate_pv(
                    2, ws.scores + 4 * first, values + channel, head_dim, pairs, accumulators + channel
                )
            else:
                f32_kernel.accumulate_pv(
                    1, ws.scores + 4 * first, values + channel, head_dim, pairs, accumulators + channel
                )
