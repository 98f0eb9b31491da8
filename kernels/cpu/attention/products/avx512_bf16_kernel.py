"""Attention's products on AVX-512 BF16, for CPUs without AMX: the layouts of `amx_kernel`, by VDPBF16PS.

A vector holds 16 elements of 32 bits: pairs of bfloat16 as operands, float32 sums as results. For 16 lanes each element
is one lane, and a pair of a key's channels is multiplied with all of them. For up to 4 lanes each element is a quarter
of a lane's score, and 4 pairs of a key's channels are multiplied with 4 lanes at once. Both give a lane the same bits:
the sums of every fourth pair in order, then the first two and the last two, then both.
"""

from __future__ import annotations

from typing import Any

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.attention.kv_layout import (
    CHUNK_POSITIONS,
    KV_BLOCK,
    LANES,
    NARROW_LANES,
    TRANSPOSE_4X4,
    shuffled,
)
from plait.kernels.cpu.attention.lane_vectors import sum_partial_sums
from plait.kernels.cpu.compiler.intrinsics import Int, intrinsic, intrinsic_if

PARTIAL_SUMS = 4  # partial sums of a score
UNROLL = 8  # positions, or lanes, whose sums are in registers at once


def _zeros(count: int) -> list[Any]:
    return [v.constant(v.F32X16, 0.0)] * count


def _pair(b: Any, address: Any, offset: int = 0) -> Any:
    """Broadcasts the pair of bfloat16 at an address."""
    return v.broadcast_load(b, address, v.I32, offset)


@intrinsic_if(v.HAS_BF16_DOT)
def compute_qk(
    b: Any, queries: Int, query_stride: Int, head_dim: Int, keys: Int, stride: Int, chunks: Int, out: Int
) -> None:
    """Computes what `amx_kernel.compute_qk` computes."""
    fours = v.Loop(b, b.shl(chunks, v.I64(3)))
    first_row = b.add(keys, b.mul(fours.i, b.shl(stride, v.I64(2))))
    rows = [b.add(first_row, b.mul(stride, v.I64(i))) for i in range(4)]
    pairs = v.Loop(b, b.lshr(head_dim, v.I64(3)), _zeros(4 * PARTIAL_SUMS))
    offset, query = b.shl(pairs.i, v.I64(4)), b.add(queries, b.mul(pairs.i, b.shl(query_stride, v.I64(2))))
    sums = list(pairs.carried)
    for part in range(PARTIAL_SUMS):
        lanes = v.load(b, b.add(query, b.mul(query_stride, v.I64(part))), v.I32X16)
        for i, row in enumerate(rows):
            index = PARTIAL_SUMS * i + part
            sums[index] = v.dot_bf16(b, sums[index], lanes, _pair(b, b.add(row, offset), 4 * part))
    sums = pairs.end(sums)
    target = b.add(out, b.shl(fours.i, v.I64(8)))
    for i in range(4):
        first, second, third, last = sums[PARTIAL_SUMS * i : PARTIAL_SUMS * (i + 1)]
        v.store(b, b.fadd(b.fadd(first, second), b.fadd(third, last)), target, 64 * i)
    fours.end()


@intrinsic
def pack_queries_x4(b: Any, queries: Int, query_stride: Int, head_dim: Int, out: Int) -> None:
    """Repacks 4 lanes of queries [D / 2, lanes, 2] for `compute_qk_x4`: [D / 8, lane, 4 pairs]."""
    loop = v.Loop(b, b.lshr(head_dim, v.I64(3)))
    source = b.add(queries, b.mul(loop.i, b.shl(query_stride, v.I64(2))))
    rows = [v.load(b, b.add(source, b.mul(query_stride, v.I64(i))), v.vector(v.I32, 4)) for i in range(4)]
    halves = [shuffled(b, rows[i], rows[i + 1], [*range(8)]) for i in (0, 2)]
    both = shuffled(b, halves[0], halves[1], [*range(16)])
    v.store(b, shuffled(b, both, both, TRANSPOSE_4X4), b.add(out, b.shl(loop.i, v.I64(6))))
    loop.end()


@intrinsic_if(v.HAS_BF16_DOT)
def compute_qk_x4(b: Any, queries: Int, head_dim: Int, keys: Int, stride: Int, chunks: Int, out: Int) -> None:
    """Computes what `amx_kernel.compute_qk_x4` computes, from the queries that `pack_queries_x4` packed."""
    loop = v.Loop(b, b.shl(chunks, v.I64(2)))
    first_row = b.add(keys, b.mul(loop.i, b.mul(stride, v.I64(UNROLL))))
    rows = [b.add(first_row, b.mul(stride, v.I64(i))) for i in range(UNROLL)]
    pairs = v.Loop(b, b.lshr(head_dim, v.I64(3)), _zeros(UNROLL))
    lanes, offset = v.load(b, b.add(queries, b.shl(pairs.i, v.I64(6))), v.I32X16), b.shl(pairs.i, v.I64(4))
    four, repeat = v.vector(v.I32, PARTIAL_SUMS), [i % PARTIAL_SUMS for i in range(v.LANES)]
    keys_of = [v.load(b, b.add(row, offset), four) for row in rows]
    sums = [
        v.dot_bf16(b, sum_, lanes, shuffled(b, key, key, repeat))
        for sum_, key in zip(pairs.carried, keys_of, strict=True)
    ]
    sums = pairs.end(sums)
    target = b.add(out, b.shl(loop.i, v.I64(7)))
    for i in range(2):
        v.store(b, sum_partial_sums(b, sums[4 * i : 4 * i + 4], b.fadd), target, 64 * i)
    loop.end()


@intrinsic_if(v.HAS_BF16_DOT)
def accumulate_pv(b: Any, probs: Int, values: Int, head_dim: Int, chunks: Int, accumulators: Int) -> None:
    """Computes what `amx_kernel.accumulate_pv` computes."""
    for first in range(0, LANES, UNROLL):
        lane_probs = b.add(probs, v.I64(2 * KV_BLOCK * first))
        lane_accumulators = b.add(accumulators, b.mul(head_dim, v.I64(4 * first)))
        _accumulate_pv(b, UNROLL, lane_probs, values, head_dim, chunks, lane_accumulators)


@intrinsic_if(v.HAS_BF16_DOT)
def accumulate_pv_x4(b: Any, probs: Int, values_: Int, head_dim: Int, chunks: Int, accumulators: Int) -> None:
    """Computes what `amx_kernel.accumulate_pv_x4` computes."""
    _accumulate_pv(b, NARROW_LANES, probs, values_, head_dim, chunks, accumulators)


def _accumulate_pv(b: Any, lanes: int, probs: Any, values: Any, head_dim: Any, chunks: Any, accumulators: Any) -> None:
    """Updates `lanes` lanes, 32 channels at a time."""
    stride = b.shl(head_dim, v.I64(2))  # bytes of a lane's accumulators, and of a pair of positions
    channels = v.Loop(b, b.lshr(head_dim, v.I64(5)))
    offset = b.shl(channels.i, v.I64(7))
    rows = [b.add(b.add(accumulators, offset), b.mul(stride, v.I64(lane))) for lane in range(lanes)]
    sums = [v.load(b, row, v.F32X16, 64 * i) for row in rows for i in range(2)]
    pairs = v.Loop(b, b.mul(chunks, v.I64(CHUNK_POSITIONS // 2)), sums)
    pair_values = b.add(b.add(values, offset), b.mul(pairs.i, stride))
    pair_probs = b.add(probs, b.shl(pairs.i, v.I64(2)))
    halves = [v.load(b, pair_values, v.I32X16, 64 * i) for i in range(2)]
    updated = []
    for lane in range(lanes):
        prob = _pair(b, pair_probs, 2 * KV_BLOCK * lane)
        updated += [v.dot_bf16(b, pairs.carried[2 * lane + i], prob, halves[i]) for i in range(2)]
    for i, sum_ in enumerate(pairs.end(updated)):
        v.store(b, sum_, rows[i // 2], 64 * (i % 2))
    channels.end()
