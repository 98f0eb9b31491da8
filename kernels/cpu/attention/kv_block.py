"""Attention to one block of 64 cached positions: reads it from a row's pages, then updates all lanes of a tile.

With bfloat16 products, keys are multiplied where they lie if pages hold one token and follow each other, and values are
packed in pairs; without them both are widened to float32. A lane's bits do not depend on the other lanes either way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from plait.kernels.cpu.attention import amx_kernel, avx512_bf16_kernel, f32_kernel, kv_layout, online_softmax
from plait.kernels.cpu.attention.kv_layout import KV_BLOCK, LANES, NARROW_LANES
from plait.kernels.cpu.attention.workspace import AttentionWorkspace, int32_array, int64_array
from plait.kernels.cpu.jit import inner_njit
from plait.kernels.cpu.llvm import HAS_BF16_DOT

F32, AVX512_BF16, AMX = range(3)  # values of `isa`: which of the `*_kernel` modules multiplies
BEST_WITHOUT_AMX = AVX512_BF16 if HAS_BF16_DOT else F32


class KvSource(NamedTuple):
    """The addresses of a row's page table and of one key head's part of the cache."""

    pages: int  # int32, the row's page table
    shift: int  # a page holds 1 << shift positions
    stride: int  # bytes from one slot to the next
    keys: int
    values: int
    scale: int  # bytes from a head's int8 numbers to their scale; 0: bfloat16


class ScoreScale(NamedTuple):
    """A score is outer * q.k, or outer * tanh(inner * q.k) with a soft cap; `outer` includes the factor log2(e)."""

    outer: Any  # float32
    inner: Any  # float32; 0: no soft cap


@inner_njit
def _slot_offset(position: int, source: KvSource) -> Any:
    """Returns the byte offset of a position's slot in the key cache and in the value cache."""
    page = np.int64(int32_array(source.pages, 1 << 30)[position >> source.shift])
    return ((page << source.shift) + (position & ((1 << source.shift) - 1))) * source.stride


@inner_njit
def prefetch_block(isa: int, base: int, count: int, channels: int, source: KvSource) -> None:
    """Prefetches a block's keys and values: the bytes of `channels` bfloat16 of each position, maybe of several heads.

    Positions whose first and last slot lie as far apart as consecutive slots would are taken for one run.
    """
    offset, run = _slot_offset(base, source), np.int64(count)
    if _slot_offset(base + count - 1, source) != offset + (count - 1) * source.stride:
        run = np.int64(1)
    for cache in (source.keys, source.values):
        for j in range(0, count, run):
            address = cache + _slot_offset(base + j, source)
            if isa == AMX:
                kv_layout.prefetch_rows(address, source.stride, run, channels)
            else:
                kv_layout.touch_rows(address, source.stride, run, channels)


@inner_njit
def load_row_bf16(address: int, scale: int, head_dim: int, out: int) -> None:
    """Copies a head's numbers [D] to bfloat16; `scale` as in `KvSource`."""
    if scale:
        kv_layout.int8_to_bf16(address, address + scale, out, head_dim // 32)
    else:
        kv_layout.copy(address, out, head_dim // 32)


@inner_njit
def load_block_f32(base: int, count: int, source: KvSource, ws: AttentionWorkspace) -> None:
    """Loads a block into the workspace as float32: keys transposed, values as they are."""
    head_dim, kv_addresses = ws.head_dim, int64_array(ws.kv_addresses, KV_BLOCK)
    for j in range((count + 15) // 16 * 16):  # positions beyond `count` repeat the last key
        offset = _slot_offset(base + min(j, count - 1), source)
        kv_addresses[j] = source.keys + offset
        if source.scale:
            kv_addresses[j] = ws.value_copies + 2 * j * head_dim
            load_row_bf16(source.keys + offset, source.scale, head_dim, ws.value_copies + 2 * j * head_dim)
        if j < count:
            target = ws.values + 4 * j * head_dim
            if source.scale:
                values = source.values + offset
                kv_layout.int8_to_f32(values, values + source.scale, target, head_dim // 16)
            else:
                kv_layout.bf16_to_f32(source.values + offset, target, head_dim // 16)
    for j in range(0, count, 16):
        for channel in range(0, head_dim, 32):
            f32_kernel.transpose_keys(ws.kv_addresses + 8 * j, 2 * channel, ws.keys + 4 * (channel * KV_BLOCK + j))
    if count % 2:
        kv_layout.zero_floats(ws.values + 4 * count * head_dim, head_dim // 16)


@inner_njit
def _is_contiguous(base: int, count: int, source: KvSource, ws: AttentionWorkspace) -> Any:
    """Returns whether the block's slots are consecutive, with enough memory behind them to fill its last chunk."""
    if source.shift or source.scale:
        return False
    pages, first = int32_array(source.pages, 1 << 30), base + count // 32 * 32
    if first > base and not kv_layout.are_consecutive(source.pages + 4 * base, count // 32):
        return False
    for position in range(first, base + count):
        if pages[position] != pages[base] + position - base:
            return False
    return source.keys + _slot_offset(base, source) + (count + 31) // 32 * 32 * source.stride <= source.values


@inner_njit
def load_block_bf16(base: int, count: int, source: KvSource, ws: AttentionWorkspace) -> Any:
    """Packs a block's values into the workspace; returns the address of its keys and the bytes between them.

    Consecutive keys stay in the cache, others are copied. Beyond `count`, keys are undefined and values are zero.
    """
    head_dim, pairs = ws.head_dim, count // 2
    keys: Any = ws.keys
    stride: Any = np.int64(2 * head_dim)
    if _is_contiguous(base, count, source, ws):
        offset = _slot_offset(base, source)
        keys, stride = source.keys + offset, source.stride
        if pairs:
            kv_layout.pack_values(source.values + offset, stride, head_dim, pairs, ws.values)
    else:
        for j in range(count):
            offset = _slot_offset(base + j, source)
            load_row_bf16(source.keys + offset, source.scale, head_dim, keys + j * stride)
            load_row_bf16(source.values + offset, source.scale, head_dim, ws.value_copies + j * stride)
        if pairs:
            kv_layout.pack_values(ws.value_copies, stride, head_dim, pairs, ws.values)
    if count % 2:
        load_row_bf16(source.values + _slot_offset(base + count - 1, source), source.scale, head_dim, ws.value_copies)
        kv_layout.zero_floats(ws.value_copies + 2 * head_dim, head_dim // 32)
        kv_layout.pack_values(ws.value_copies, np.int64(2 * head_dim), head_dim, 1, ws.values + 4 * pairs * head_dim)
        pairs += 1
    missing = (count + 31) // 32 * 16 - pairs
    if missing:
        kv_layout.zero_floats(ws.values + 4 * pairs * head_dim, missing * head_dim // 16)
    return keys, stride


@inner_njit
def attend_block(
    isa: int,
    lane: int,
    end: int,
    base: int,
    count: int,
    needs_mask: bool,
    keys: int,
    stride: int,
    scale: ScoreScale,
    ws: AttentionWorkspace,
) -> None:
    """Updates lanes [lane, end) with a loaded block. `needs_mask`: not every lane sees all of its positions.

    `keys` and `stride` are the results of `load_block_bf16`. Vectors are filled up with the lanes behind `end`, whose
    state is overwritten: they must be finished, or padding.
    """
    if isa == F32:
        _attend_f32(lane, end, base, count, scale, ws)
    elif isa == AVX512_BF16:
        _attend_avx512(lane, end, base, count, needs_mask, keys, stride, scale, ws)
    elif end - lane <= NARROW_LANES:
        _attend_x4(isa, lane, end, base, count, needs_mask, keys, stride, scale, ws)
    else:
        _attend_amx(lane, end, base, count, needs_mask, keys, stride, scale, ws)


@inner_njit
def _attend_x4(
    isa: int,
    lane: int,
    end: int,
    base: int,
    count: int,
    needs_mask: bool,
    keys: int,
    stride: int,
    scale: ScoreScale,
    ws: AttentionWorkspace,
) -> None:
    """Updates up to 4 lanes."""
    head_dim, chunks, scores = ws.head_dim, (count + 31) // 32, ws.scores
    accumulators = ws.accumulators + 4 * lane * head_dim
    if isa == AMX:
        amx_kernel.compute_qk_x4(ws.queries + 4 * lane, ws.query_stride, head_dim, keys, stride, chunks, scores)
    else:
        avx512_bf16_kernel.pack_queries_x4(ws.queries + 4 * lane, ws.query_stride, head_dim, ws.rows)
        avx512_bf16_kernel.compute_qk_x4(ws.rows, head_dim, keys, stride, chunks, scores)
    if scale.inner > 0:
        online_softmax.soft_cap(scores, scale.inner, np.float32(1.0), chunks * 32 * NARROW_LANES // 16)
    if needs_mask:
        online_softmax.apply_mask_x4(scores, base, ws.kv_begins + 4 * lane, ws.kv_ends + 4 * lane)
    running_max, running_sum = ws.running_max + 4 * lane, ws.running_sum + 4 * lane
    online_softmax.online_softmax_update_x4(
        scores, chunks, scale.outer, running_max, running_sum, accumulators, head_dim // 16, end - lane, ws.probs
    )
    if isa == AMX:
        amx_kernel.accumulate_pv_x4(ws.probs, ws.values, head_dim, chunks, accumulators)
    else:
        avx512_bf16_kernel.accumulate_pv_x4(ws.probs, ws.values, head_dim, chunks, accumulators)


@inner_njit
def _attend_avx512(
    first: int,
    last: int,
    base: int,
    count: int,
    needs_mask: bool,
    keys: int,
    stride: int,
    scale: ScoreScale,
    ws: AttentionWorkspace,
) -> None:
    """Updates 16 lanes at a time, or 4 where that is quicker."""
    lane, isa = first, np.int64(AVX512_BF16)  # a literal argument would compile `_attend_x4` twice
    while last - lane > LANES - NARROW_LANES:
        query = ws.queries + 4 * lane
        avx512_bf16_kernel.compute_qk(query, ws.query_stride, ws.head_dim, keys, stride, (count + 31) // 32, ws.scores)
        accumulators = _update_softmax(ws.scores, lane, last, base, count, needs_mask, scale, ws)
        avx512_bf16_kernel.accumulate_pv(ws.probs, ws.values, ws.head_dim, (count + 31) // 32, accumulators)
        lane += LANES
    while lane < last:
        _attend_x4(isa, lane, min(last, lane + NARROW_LANES), base, count, needs_mask, keys, stride, scale, ws)
        lane += NARROW_LANES


@inner_njit
def _attend_amx(
    first: int,
    last: int,
    base: int,
    count: int,
    needs_mask: bool,
    keys: int,
    stride: int,
    scale: ScoreScale,
    ws: AttentionWorkspace,
) -> None:
    """Updates 16 lanes at a time, computing the next scores while the softmax of these runs."""
    head_dim, chunks = ws.head_dim, (count + 31) // 32
    scores, next_scores = ws.scores, ws.scores + 4 * KV_BLOCK * LANES
    amx_kernel.compute_qk(ws.queries + 4 * first, ws.query_stride, head_dim, keys, stride, chunks, scores)
    for lane in range(first, last, LANES):
        if lane + LANES < last:  # the matrix unit works on them beside the vector units
            query = ws.queries + 4 * (lane + LANES)
            amx_kernel.compute_qk(query, ws.query_stride, head_dim, keys, stride, chunks, next_scores)
        accumulators = _update_softmax(scores, lane, last, base, count, needs_mask, scale, ws)
        amx_kernel.accumulate_pv(ws.probs, ws.values, head_dim, chunks, accumulators)
        scores, next_scores = next_scores, scores


@inner_njit
def _update_softmax(
    scores: int,
    lane: int,
    last: int,
    base: int,
    count: int,
    needs_mask: bool,
    scale: ScoreScale,
    ws: AttentionWorkspace,
) -> Any:
    """Updates the softmax of 16 lanes; returns the address of their accumulators."""
    chunks = (count + 31) // 32
    if scale.inner > 0:
        online_softmax.soft_cap(scores, scale.inner, np.float32(1.0), 32 * chunks)
    if needs_mask:
        online_softmax.apply_mask_x16(scores, base, ws.kv_begins + 4 * lane, ws.kv_ends + 4 * lane)
    accumulators = ws.accumulators + 4 * lane * ws.head_dim
    online_softmax.online_softmax_update_x16(
        scores,
        chunks,
        scale.outer,
        ws.running_max + 4 * lane,
        ws.running_sum + 4 * lane,
        accumulators,
        ws.head_dim // 16,
        min(LANES, last - lane),
        ws.probs,
    )
    return accumulators


@inner_njit
def _attend_f32(first: int, last: int, base: int, count: int, scale: ScoreScale, ws: AttentionWorkspace) -> None:
    """Updates up to 3 lanes at a time."""
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


@inner_njit
def _attend_f32_lanes(lanes: int, lane: int, base: int, count: int, scale: ScoreScale, ws: AttentionWorkspace) -> None:
    """Updates 1 to 3 lanes; the kernels need that number as a literal."""
    head_dim = ws.head_dim
    queries, accumulators = ws.queries + 4 * lane * head_dim, ws.accumulators + 4 * lane * head_dim
    kv_begins, kv_ends = int32_array(ws.kv_begins, ws.capacity), int32_array(ws.kv_ends, ws.capacity)
    if lanes == 3:
        f32_kernel.compute_qk(3, queries, ws.keys, head_dim, ws.scores)
    elif lanes == 2:
        f32_kernel.compute_qk(2, queries, ws.keys, head_dim, ws.scores)
    else:
        f32_kernel.compute_qk(1, queries, ws.keys, head_dim, ws.scores)
    if scale.inner > 0:
        online_softmax.soft_cap(ws.scores, scale.inner, np.float32(1.0), lanes * KV_BLOCK // 16)
    for i in range(lanes):
        online_softmax.online_softmax_update(
            ws.scores + f32_kernel.ROW_BYTES * i,
            max(np.int64(0), kv_begins[lane + i] - base),
            max(np.int64(0), min(np.int64(KV_BLOCK), kv_ends[lane + i] - base)),
            scale.outer,
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
