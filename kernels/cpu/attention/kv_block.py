"""Attention to one block of 64 cached positions: updates all lanes of a tile with the keys and values of `kv_loading`.

A lane's bits do not depend on the other lanes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from plait.kernels.cpu.attention import amx_kernel, avx512_bf16_kernel, f32_kernel, int8_vnni_kernel, online_softmax
from plait.kernels.cpu.attention.isa import AMX, AVX512_BF16, F32, INT8_VNNI
from plait.kernels.cpu.attention.kv_layout import KV_BLOCK, LANES, NARROW_LANES
from plait.kernels.cpu.attention.workspace import AttentionWorkspace, int32_array
from plait.kernels.cpu.jit import inner_njit


class ScoreScale(NamedTuple):
    """A score is outer * q.k, or outer * tanh(inner * q.k) with a soft cap; `outer` includes the factor log2(e)."""

    outer: Any  # float32
    inner: Any  # float32; 0: no soft cap


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

    `keys` and `stride` are the results of `load_block_bf16`, or of `load_block_int8`. Vectors are filled up with the
    lanes behind `end`, whose state is overwritten: they must be finished, or padding.
    """
    if isa == F32:
        _attend_f32(lane, end, base, count, scale, ws)
    elif isa == INT8_VNNI:
        _attend_int8(lane, end, base, count, needs_mask, keys, stride, scale, ws)
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
def _attend_int8(
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
    """Updates 4 lanes at a time."""
    head_dim, chunks, scores, lane = ws.head_dim, (count + 31) // 32, ws.scores, first
    factors = ws.probs + int8_vnni_kernel.PROBS_BYTES * KV_BLOCK // int8_vnni_kernel.QUAD
    while lane < last:
        accumulators = ws.accumulators + 4 * lane * head_dim
        int8_vnni_kernel.pack_queries(ws.queries + 4 * lane * head_dim, head_dim, ws.rows)
        int8_vnni_kernel.compute_qk(ws.rows, head_dim, keys, stride, ws.key_scales, chunks, scores)
        if scale.inner > 0:
            online_softmax.soft_cap(scores, scale.inner, np.float32(1.0), chunks * 32 * NARROW_LANES // 16)
        if needs_mask:
            online_softmax.apply_mask_x4(scores, base, ws.kv_begins + 4 * lane, ws.kv_ends + 4 * lane)
        running_max, running_sum = ws.running_max + 4 * lane, ws.running_sum + 4 * lane
        in_group = min(np.int64(NARROW_LANES), last - lane)
        online_softmax.online_softmax_update_x4_in_place(
            scores, chunks, scale.outer, running_max, running_sum, accumulators, head_dim // 16, in_group
        )
        int8_vnni_kernel.quantize_probs(scores, ws.value_scales, chunks, ws.probs, factors)
        int8_vnni_kernel.accumulate_pv(ws.probs, factors, ws.values, head_dim, chunks, accumulators)
        lane += NARROW_LANES


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
