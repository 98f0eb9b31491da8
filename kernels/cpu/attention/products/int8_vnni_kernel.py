"""Attention's products with an int8 KV cache on AVX-512 VNNI, in integers: lanes against a block of 64 positions.

    query           of each lane, two planes of 8 bits, 256 * upper + lower    int8 [D / 4, 2, 4]
    queries         all lanes of a tile side by side, for 16 lanes             int8 [D / 4, 2, lanes, 4]
    packed          of 4 lanes                                                 int8 [D / 16, 2, 4, 16]
    keys            as in the cache                                            int8 [64, D]
    values          4 positions of a channel side by side                      int8 [16, D, 4]
    probabilities   times the values' scales, in two planes                    uint8 [16, 2, lanes, 4]

Keys and values are multiplied as they are stored. Queries and probabilities are rounded to 16 bits, which is more than
bfloat16 keeps, and multiplied as two planes of 8 bits (the first is the lower one). All sums of products are exact, so
a lane's bits do not depend on its neighbours, nor on whether 4 or 16 lanes are computed together.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir

from plait.kernels.cpu import isa
from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.attention.kv_layout import CHUNK_POSITIONS, KV_BLOCK, LANES, NARROW_LANES, shuffled
from plait.kernels.cpu.attention.lane_vectors import Lanes, LaneVectors, ProbsWriter, sum_partial_sums
from plait.kernels.cpu.compiler.intrinsics import Int, intrinsic, intrinsic_if

HAS_VNNI = isa.has_features("avx512f", "avx512bw", "avx512vl", "avx512vnni")
UNROLL = 8  # positions whose sums are in registers at once
QUAD = 4  # positions, or channels, whose products one instruction adds up
MAX_QUERY = 127 * 256  # so that the upper plane fits into int8
PROB_BITS = 16
MAX_PROB = 2**PROB_BITS - 1
PROB_MARGIN = 1 + 2**-12  # covers the error of a power of two
SMALLEST_PRODUCT = 2.0**-100  # of a probability and a scale: a smaller one counts as zero
SIGN_BITS = -0x7F7F7F80  # of 4 bytes: flipping them adds 128 to each and makes it unsigned
BYTES64 = v.vector(v.I8, 64)


def _dot(b: Any, sums: Any, unsigned: Any, signed: Any) -> Any:
    """VPDPBUSD: adds to sums [16] the four products each of unsigned and signed bytes."""
    return v.call_intrinsic(b, "llvm.x86.avx512.vpdpbusd.512", v.I32X16, [sums, unsigned, signed])


def _rounded(b: Any, x: Any) -> Any:
    """Returns the nearest integers."""
    operands = [x, v.constant(v.I32X16, 0), ir.Constant(v.I16, 0xFFFF), v.I32(4)]
    return v.call_intrinsic(b, "llvm.x86.avx512.mask.cvtps2dq.512", v.I32X16, operands)


def _whole(b: Any, lower: Any, upper: Any) -> Any:
    """Joins the sums of both planes."""
    return b.add(lower, b.shl(upper, v.constant(v.I32X16, 8)))


@intrinsic_if(HAS_VNNI)
def quantize_query(b: Any, query: Int, head_dim: Int, out: Int, scale: Int, excess: Int) -> None:
    """Writes a query, float32 [D], as planes int8 [D / 4, 2, 4], its float32 scale, and its int32 excess.

    The scale, the largest magnitude divided by MAX_QUERY, is not finite if the query is not. The excess is what the
    product with a key has too much because keys are made unsigned by adding 128: 128 times the sum of the integers.
    """
    parts = b.lshr(head_dim, v.I64(4))
    loop = v.Loop(b, parts, [v.constant(v.I32X16, 0)])  # of magnitudes' bits, which order as the magnitudes do
    bits = b.and_(v.load(b, b.add(query, b.shl(loop.i, v.I64(6))), v.I32X16), v.constant(v.I32X16, 0x7FFFFFFF))
    (top,) = loop.end([v.larger_bits(b, loop.carried[0], bits)])
    largest = b.bitcast(v.reduce(b, top, lambda x, y: v.larger_bits(b, x, y)), v.F32)
    is_zero = b.fcmp_ordered("==", largest, v.F32(0.0))
    inverses = v.splat(b, b.select(is_zero, v.F32(0.0), b.fdiv(v.F32(MAX_QUERY), largest)))
    loop = v.Loop(b, parts, [v.constant(v.I32X16, 0)])
    integers = _rounded(b, b.fmul(v.load(b, b.add(query, b.shl(loop.i, v.I64(6))), v.F32X16), inverses))
    upper = b.ashr(b.add(integers, v.constant(v.I32X16, 128)), v.constant(v.I32X16, 8))
    planes = [b.trunc(plane, v.vector(v.I8)) for plane in (integers, upper)]
    mask = [16 * plane + QUAD * quad + i for quad in range(4) for plane in range(2) for i in range(QUAD)]
    v.store(b, shuffled(b, planes[0], planes[1], mask), b.add(out, b.shl(loop.i, v.I64(5))))
    (sums,) = loop.end([b.add(loop.carried[0], integers)])
    v.store(b, b.fmul(largest, v.F32(1 / MAX_QUERY)), scale)
    v.store(b, b.shl(v.reduce(b, sums, b.add), v.I32(7)), excess)


@intrinsic
def pack_queries_x4(b: Any, queries: Int, head_dim: Int, out: Int) -> None:
    """Packs 4 lanes of `quantize_query`, 2 * D bytes apart, for `compute_qk`."""
    loop = v.Loop(b, b.lshr(head_dim, v.I64(4)))
    query, lanes = b.add(queries, b.shl(loop.i, v.I64(5))), []
    for _ in range(NARROW_LANES):
        lanes.append(v.load(b, query, v.vector(v.I32, 8)))
        query = b.add(query, b.shl(head_dim, v.I64(1)))
    pairs = [shuffled(b, lanes[i], lanes[i + 1], [*range(16)]) for i in (0, 2)]
    for plane in range(2):
        mask = [2 * i + plane for i in range(v.LANES)]
        v.store(b, shuffled(b, pairs[0], pairs[1], mask), b.add(out, b.shl(loop.i, v.I64(7))), 64 * plane)
    loop.end()


@intrinsic_if(HAS_VNNI)
def interleave_values(b: Any, values: Int, stride: Int, head_dim: Int, quads: Int, out: Int) -> None:
    """Interleaves int8 rows [4 * quads, D], `stride` bytes apart, to [quads, D, 4]."""
    loop = v.Loop(b, quads)
    source = b.add(values, b.mul(loop.i, b.shl(stride, v.I64(2))))
    parts = v.Loop(b, b.lshr(head_dim, v.I64(5)))
    target = b.add(b.add(out, b.mul(loop.i, b.shl(head_dim, v.I64(2)))), b.shl(parts.i, v.I64(7)))
    address, rows = b.add(source, b.shl(parts.i, v.I64(5))), []
    for _ in range(QUAD):
        rows.append(v.load(b, address, v.vector(v.I8, 32)))
        address = b.add(address, stride)
    pairs = [shuffled(b, rows[i], rows[i + 1], list(range(64))) for i in (0, 2)]
    for i in range(2):  # channels 16 i to 16 i + 15
        mask = [32 * row + channel for channel in range(16 * i, 16 * i + 16) for row in range(QUAD)]
        v.store(b, shuffled(b, pairs[0], pairs[1], mask), target, 64 * i)
    parts.end()
    loop.end()


@intrinsic_if(HAS_VNNI)
def compute_qk(
    b: Any,
    lanes: Lanes,
    queries: Int,
    query_stride: Int,
    head_dim: Int,
    query_scales: Int,
    excess: Int,
    keys: Int,
    stride: Int,
    key_scales: Int,
    chunks: Int,
    out: Int,
) -> None:
    """Computes the scores of 4 or 16 lanes and 32 * chunks keys, `stride` bytes apart: float32 [64, lanes].

    `queries` are for 16 lanes those of all lanes of a tile, `query_stride` bytes from one plane to the next, and for 4
    lanes those of `pack_queries_x4`.
    """
    vectors = LaneVectors(b, lanes)
    scales, excesses = vectors.load(query_scales), vectors.load(excess, v.I32)
    loop = v.Loop(b, b.shl(chunks, v.I64(2)))
    first_row = b.add(keys, b.mul(loop.i, b.mul(stride, v.I64(UNROLL))))
    rows = [b.add(first_row, b.mul(stride, v.I64(i))) for i in range(UNROLL)]
    positions = _dot_rows(vectors, queries, query_stride, head_dim, rows)
    if vectors.lanes == NARROW_LANES:
        positions = [sum_partial_sums(b, positions[i : i + 4], b.add) for i in (0, 4)]
    target = b.add(out, b.mul(loop.i, v.I64(4 * UNROLL * vectors.lanes)))
    scale = b.add(key_scales, b.shl(loop.i, v.I64(5)))
    for i, integers in enumerate(positions):
        factors = b.fmul(scales, vectors.load_of_positions(scale, v.F32, 4 * vectors.positions * i))
        v.store(b, b.fmul(b.sitofp(b.sub(integers, excesses), v.F32X16), factors), target, 64 * i)
    loop.end()


def _dot_rows(vectors: LaneVectors, queries: Any, query_stride: Any, head_dim: Any, rows: list[Any]) -> list[Any]:
    """Returns the products with the keys at `rows`, made unsigned: for 16 lanes sums, for 4 lanes 4 parts of each."""
    b, count = vectors.b, len(rows)
    zeros = [v.constant(v.I32X16, 0)] * (2 * count)
    if vectors.lanes == LANES:  # 4 channels of a key times those of all lanes
        loop = v.Loop(b, b.lshr(head_dim, v.I64(2)), zeros)
        query, plane_bytes = b.add(queries, b.mul(loop.i, b.shl(query_stride, v.I64(1)))), query_stride
        fours = [v.load(b, b.add(row, b.shl(loop.i, v.I64(2))), v.I32) for row in rows]
        unsigned = [v.splat(b, b.xor(four, v.I32(SIGN_BITS))) for four in fours]
    else:  # 16 channels of a key, repeated for each lane
        loop = v.Loop(b, b.lshr(head_dim, v.I64(4)), zeros)
        query, plane_bytes = b.add(queries, b.shl(loop.i, v.I64(7))), v.I64(64)
        sixteens = [v.load(b, b.add(row, b.shl(loop.i, v.I64(4))), v.vector(v.I32, QUAD)) for row in rows]
        repeat = [i % QUAD for i in range(v.LANES)]
        unsigned = [b.xor(shuffled(b, x, x, repeat), v.constant(v.I32X16, SIGN_BITS)) for x in sixteens]
    planes = [v.load(b, address, v.I32X16) for address in (query, b.add(query, plane_bytes))]
    sums = loop.end([_dot(b, loop.carried[2 * i + k], unsigned[i], planes[k]) for i in range(count) for k in range(2)])
    return [_whole(b, sums[2 * i], sums[2 * i + 1]) for i in range(count)]


@intrinsic
def largest_scale(b: Any, scales: Int, chunks: Int, out: Int) -> None:
    """Writes the largest of float32 [32 * chunks], all >= 0, 16 times; a NaN counts as the largest."""
    loop = v.Loop(b, b.shl(chunks, v.I64(1)), [v.constant(v.I32X16, 0)])
    some = v.load(b, b.add(scales, b.shl(loop.i, v.I64(6))), v.I32X16)
    (largest,) = loop.end([v.larger_bits(b, some, loop.carried[0])])
    v.store(b, v.splat(b, v.reduce(b, largest, lambda x, y: v.larger_bits(b, x, y))), out)


def unit_of(b: Any, largest: Any) -> tuple[Any, Any]:
    """Returns the units in which products of up to `largest` [16] are integers of PROB_BITS bits.

    A unit is the power of two with which `largest` has all of these bits. Returns the units, and the binary logarithms
    of their inverses. Units are NaN where `largest` is not finite.
    """
    largest = b.fmul(largest, v.constant(v.F32X16, PROB_MARGIN))
    bits = b.bitcast(v.maximum(b, largest, v.constant(v.F32X16, SMALLEST_PRODUCT)), v.I32X16)
    exponents = b.sub(b.lshr(bits, v.constant(v.I32X16, 23)), v.constant(v.I32X16, PROB_BITS - 1))
    units = b.bitcast(b.shl(exponents, v.constant(v.I32X16, 23)), v.F32X16)
    is_finite = b.fcmp_ordered("<", largest, v.constant(v.F32X16, math.inf))
    units = b.select(is_finite, units, v.constant(v.F32X16, math.nan))
    return units, b.sitofp(b.sub(v.constant(v.I32X16, 127), exponents), v.F32X16)


def probs_writer(vectors: LaneVectors, value_scales: Any, out: Any) -> ProbsWriter:
    """Multiplies probabilities by their positions' scales [64], rounds them, and writes their planes."""
    b, lanes = vectors.b, vectors.lanes
    group = QUAD // vectors.positions

    def write(chunk: Any, first: int, probs: list[Any]) -> None:
        scales, position = b.add(value_scales, b.shl(chunk, v.I64(7))), vectors.positions * first
        integers = []
        for i, prob in enumerate(probs):
            scale = vectors.load_of_positions(scales, v.F32, 4 * (position + vectors.positions * i))
            integers.append(_rounded(b, b.fmul(prob, scale)))
        target = b.add(out, b.mul(chunk, v.I64(2 * CHUNK_POSITIONS * lanes)))
        if lanes == NARROW_LANES:
            bytes_ = b.bitcast(integers[0], BYTES64)  # [position, lane, byte]
            mask = [
                16 * position + 4 * lane + plane for plane in range(2) for lane in range(4) for position in range(4)
            ]
            v.store(b, shuffled(b, bytes_, bytes_, mask), target, 2 * lanes * position)
            return
        pairs = [_pair_bits(b, integers[i], integers[i + 1]) for i in (0, 2)]
        for plane in range(2):
            mask = [4 * lane + plane + i for lane in range(lanes) for i in (0, 2, 64, 66)]
            v.store(b, shuffled(b, pairs[0], pairs[1], mask), target, 2 * lanes * position + QUAD * lanes * plane)

    return ProbsWriter(group, write)


def _pair_bits(b: Any, first: Any, second: Any) -> Any:
    """Returns the lower 16 bits of two vectors of integers, side by side; the conversion of NaN to 2^31 gives 0."""
    lower = b.and_(first, v.constant(v.I32X16, MAX_PROB))
    return b.bitcast(b.or_(lower, b.shl(second, v.constant(v.I32X16, 16))), BYTES64)


@intrinsic_if(HAS_VNNI)
def accumulate_pv(
    b: Any,
    lanes: Lanes,
    probs: Int,
    factors: Int,
    values: Int,
    head_dim: Int,
    chunks: Int,
    accumulators: Int,
) -> None:
    """Adds 32 * chunks values (`interleave_values`), weighted (`probs_writer`), to accumulators, float32 [lanes, D].

    `lanes` is 4 or 16; `factors` [lanes] are what the integers of `probs` stand for.
    """
    fours = v.Loop(b, v.I64(lanes // NARROW_LANES))
    offset = b.shl(fours.i, v.I64(4))
    target = b.add(accumulators, b.mul(offset, head_dim))
    addresses = b.add(probs, offset), b.add(factors, offset)
    _accumulate_pv(b, lanes, *addresses, values, head_dim, chunks, target)
    fours.end()


def _accumulate_pv(
    b: Any, lanes: int, probs: Any, factors: Any, values: Any, head_dim: Any, chunks: Any, accumulators: Any
) -> None:
    """Updates 4 of `lanes` lanes, 32 channels at a time."""
    stride = b.shl(head_dim, v.I64(2))  # bytes of a lane's accumulators, and of 4 positions
    channels = v.Loop(b, b.lshr(head_dim, v.I64(5)))
    offset = b.shl(channels.i, v.I64(7))
    quads = v.Loop(b, b.mul(chunks, v.I64(CHUNK_POSITIONS // QUAD)), [v.constant(v.I32X16, 0)] * (4 * NARROW_LANES))
    quad_values = b.add(b.add(values, offset), b.mul(quads.i, stride))
    quad_probs = b.add(probs, b.mul(quads.i, v.I64(2 * QUAD * lanes)))
    halves = [v.load(b, quad_values, v.I32X16, 64 * i) for i in range(2)]
    sums = []
    for lane in range(NARROW_LANES):
        for plane in range(2):
            prob = v.broadcast_load(b, quad_probs, v.I32, QUAD * (lanes * plane + lane))
            sums += [_dot(b, quads.carried[4 * lane + 2 * plane + i], prob, halves[i]) for i in range(2)]
    sums = quads.end(sums)
    for lane in range(NARROW_LANES):
        factor = v.broadcast_load(b, factors, v.F32, 4 * lane)
        row = b.add(b.add(accumulators, offset), b.mul(stride, v.I64(lane)))
        for i in range(2):
            total = b.sitofp(_whole(b, sums[4 * lane + i], sums[4 * lane + 2 + i]), v.F32X16)
            v.store(b, v.fma(b, total, factor, v.load(b, row, v.F32X16, 64 * i)), row, 64 * i)
    channels.end()


assert KV_BLOCK * MAX_PROB * 127 < 2**31, "a block's sums fit into 32 bits"
