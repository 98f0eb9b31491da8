"""Attention to one block of 64 cached positions: updates all lanes of a tile with the keys and values of `kv_loading`.

A lane's bits do not depend on the other lanes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from plait.kernels.cpu.attention import lane_vectors, online_softmax, online_softmax_lanes
from plait.kernels.cpu.attention.isa import AMX, F32, INT8_VNNI
from plait.kernels.cpu.attention.kv_layout import KV_BLOCK, LANES, NARROW_LANES
from plait.kernels.cpu.attention.products import amx_kernel, avx512_bf16_kernel, f32_kernel, int8_vnni_kernel
from plait.kernels.cpu.attention.workspace import AttentionWorkspace, int32_array


class ScoreScale(NamedTuple):
    """A score is outer * q.k, or outer * tanh(inner * q.k) with a soft cap; `outer` includes the factor log2(e)."""

    outer: Any  # float32
    inner: Any  # float32; 0: no soft cap


class KvBlock(NamedTuple):
    """A block that `kv_loading` has loaded."""

    base: int  # its first position
    positions: int  # how many
    needs_mask: bool  # not every lane sees all of them
    keys: int  # address
    stride: int  # bytes from one key to the next


def attend_block(isa: int, lane: int, end: int, block: KvBlock, scale: ScoreScale, ws: AttentionWorkspace) -> None:
    """Updates lanes [lane, end) with a block.

    Vectors are filled up with the lanes behind `end`, whose state is overwritten: they must be finished, or padding.
    """
    if isa == F32:
        _attend_f32(lane, end, block, scale, ws)
    elif isa == AMX and end - lane > NARROW_LANES:
        _attend_amx(lane, end, block, scale, ws)
    else:
        while isa != AMX and end - lane > LANES - NARROW_LANES:
            _attend_x16(isa, lane, end, block, scale, ws)
            lane += LANES
        while lane < end:
            _attend_x4(isa, lane, end, block, scale, ws)
            lane += NARROW_LANES


def _attend_x4(isa: int, lane: int, end: int, block: KvBlock, scale: ScoreScale, ws: AttentionWorkspace) -> None:
    """Updates up to 4 lanes."""
    head_dim, chunks, query = ws.head_dim, (block.positions + 31) // 32, ws.queries + 4 * lane
    if isa == AMX:
        amx_kernel.compute_qk_x4(query, ws.query_stride, head_dim, block.keys, block.stride, chunks, ws.scores)
    elif isa == INT8_VNNI:
        scales, excess = ws.query_scales + 4 * lane, ws.query_excess + 4 * lane
        int8_vnni_kernel.pack_queries_x4(ws.query_rows + 2 * lane * head_dim, head_dim, ws.rows)
        int8_vnni_kernel.compute_qk(
            NARROW_LANES, ws.rows, ws.query_stride, head_dim, scales, excess, block.keys, block.stride, ws.key_scales,
            chunks, ws.scores,
        )  # fmt: skip
    else:
        avx512_bf16_kernel.pack_queries_x4(query, ws.query_stride, head_dim, ws.rows)
        avx512_bf16_kernel.compute_qk_x4(ws.rows, head_dim, block.keys, block.stride, chunks, ws.scores)
    _update_softmax(isa, NARROW_LANES, ws.scores, lane, end, block, scale, ws)
    accumulators = ws.accumulators + 4 * lane * head_dim
    if isa == AMX:
        amx_kernel.accumulate_pv_x4(ws.probs, ws.values, head_dim, chunks, accumulators)
    elif isa == INT8_VNNI:
        factors = ws.prob_factors
        int8_vnni_kernel.accumulate_pv(NARROW_LANES, ws.probs, factors, ws.values, head_dim, chunks, accumulators)
    else:
        avx512_bf16_kernel.accumulate_pv_x4(ws.probs, ws.values, head_dim, chunks, accumulators)


def _attend_x16(isa: int, lane: int, end: int, block: KvBlock, scale: ScoreScale, ws: AttentionWorkspace) -> None:
    """Updates up to 16 lanes, without AMX."""
    head_dim, chunks, query = ws.head_dim, (block.positions + 31) // 32, ws.queries + 4 * lane
    if isa == INT8_VNNI:
        scales, excess = ws.query_scales + 4 * lane, ws.query_excess + 4 * lane
        int8_vnni_kernel.compute_qk(
            LANES, query, ws.query_stride, head_dim, scales, excess, block.keys, block.stride, ws.key_scales, chunks,
            ws.scores,
        )  # fmt: skip
    else:
        avx512_bf16_kernel.compute_qk(query, ws.query_stride, head_dim, block.keys, block.stride, chunks, ws.scores)
    _update_softmax(isa, LANES, ws.scores, lane, end, block, scale, ws)
    accumulators = ws.accumulators + 4 * lane * head_dim
    if isa == INT8_VNNI:
        int8_vnni_kernel.accumulate_pv(LANES, ws.probs, ws.prob_factors, ws.values, head_dim, chunks, accumulators)
    else:
        avx512_bf16_kernel.accumulate_pv(ws.probs, ws.values, head_dim, chunks, accumulators)


def _attend_amx(first: int, last: int, block: KvBlock, scale: ScoreScale, ws: AttentionWorkspace) -> None:
    """Updates 16 lanes at a time, computing the next scores while the softmax of these runs."""
    head_dim, chunks = ws.head_dim, (block.positions + 31) // 32
    isa, width = AMX, LANES
    scores, next_scores = ws.scores, ws.scores + 4 * KV_BLOCK * LANES
    amx_kernel.compute_qk(ws.queries + 4 * first, ws.query_stride, head_dim, block.keys, block.stride, chunks, scores)
    for lane in range(first, last, LANES):
        if lane + LANES < last:  # the matrix unit works on them beside the vector units
            query = ws.queries + 4 * (lane + LANES)
            amx_kernel.compute_qk(query, ws.query_stride, head_dim, block.keys, block.stride, chunks, next_scores)
        _update_softmax(isa, width, scores, lane, last, block, scale, ws)
        amx_kernel.accumulate_pv(ws.probs, ws.values, head_dim, chunks, ws.accumulators + 4 * lane * head_dim)
        scores, next_scores = next_scores, scores


def _update_softmax(
    isa: int,
    width: int,
    scores: int,
    lane: int,
    end: int,
    block: KvBlock,
    scale: ScoreScale,
    ws: AttentionWorkspace,
) -> None:
    """Updates the softmax of up to `width` lanes, 4 or 16, whose scores [64, width] have been computed."""
    chunks, parts, lanes = (block.positions + 31) // 32, ws.head_dim // 16, min(width, end - lane)
    if scale.inner > 0:
        online_softmax.soft_cap(scores, scale.inner, np.float32(1.0), 2 * chunks * width)
    largest = ws.largest_scales
    if block.needs_mask:
        largest = _mask(isa, width, scores, lane, block, ws)
    running_max, running_sum = ws.running_max + 4 * lane, ws.running_sum + 4 * lane
    accumulators = ws.accumulators + 4 * lane * ws.head_dim
    if isa == INT8_VNNI:
        online_softmax_lanes.update_int8(
            width, scores, chunks, scale.outer, running_max, running_sum, accumulators, parts, lanes,
            ws.value_scales, largest, ws.probs, ws.prob_factors,
        )  # fmt: skip
    else:
        online_softmax_lanes.update_bf16(
            width, scores, chunks, scale.outer, running_max, running_sum, accumulators, parts, lanes, ws.probs
        )


def _mask(isa: int, width: int, scores: int, lane: int, block: KvBlock, ws: AttentionWorkspace) -> Any:
    """Masks the scores that lanes do not see; returns where the largest scale is of the values that each sees."""
    kv_begins, kv_ends, largest = ws.kv_begins + 4 * lane, ws.kv_ends + 4 * lane, ws.largest_scales + 4 * LANES
    lane_vectors.apply_mask(width, scores, block.base, kv_begins, kv_ends)
    if isa == INT8_VNNI:
        lane_vectors.largest_visible(width, ws.value_scales, block.base, kv_begins, kv_ends, largest)
    return largest


def _attend_f32(first: int, last: int, block: KvBlock, scale: ScoreScale, ws: AttentionWorkspace) -> None:
    """Updates up to 3 lanes at a time."""
    lane = first
    while lane < last:
        lanes = min(3, last - lane)
        _attend_f32_lanes(lanes, lane, block, scale, ws)
        lane += lanes


def _attend_f32_lanes(lanes: int, lane: int, block: KvBlock, scale: ScoreScale, ws: AttentionWorkspace) -> None:
    """Updates 1 to 3 lanes."""
    head_dim = ws.head_dim
    queries, accumulators = ws.queries + 4 * lane * head_dim, ws.accumulators + 4 * lane * head_dim
    kv_begins, kv_ends = int32_array(ws.kv_begins, ws.capacity), int32_array(ws.kv_ends, ws.capacity)
    f32_kernel.compute_qk(lanes, queries, ws.keys, head_dim, ws.scores)
    if scale.inner > 0:
        online_softmax.soft_cap(ws.scores, scale.inner, np.float32(1.0), lanes * KV_BLOCK // 16)
    for i in range(lanes):
        online_softmax.online_softmax_update(
            ws.scores + f32_kernel.ROW_BYTES * i,
            max(0, kv_begins[lane + i] - block.base),
            max(0, min(KV_BLOCK, kv_ends[lane + i] - block.base)),
            scale.outer,
            ws.running_max + 4 * (lane + i),
            ws.running_sum + 4 * (lane + i),
            accumulators + 4 * i * head_dim,
            head_dim // 16,
        )
    for first in range(0, block.positions, 2 * f32_kernel.PAIRS):
        pairs = min(f32_kernel.PAIRS, (block.positions - first + 1) // 2)
        values = ws.values + 4 * first * head_dim
        for channel in range(0, 4 * head_dim, 128):
            f32_kernel.accumulate_pv(
                lanes, ws.scores + 4 * first, values + channel, head_dim, pairs, accumulators + channel
            )
