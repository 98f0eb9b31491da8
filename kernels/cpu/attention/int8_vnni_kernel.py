"""Attention's products with an int8 KV cache on AVX-512 VNNI: 4 lanes against a block of 64 positions, in integers.

    queries         of each lane, two int8 planes: 256 * upper + lower      int8 [D] each, float32 scale, int32 sum
    packed          of 4 lanes, 16 channels of each side by side            int8 [D / 16, plane, lane, 16]
    keys            as in the cache                                         int8 [64, D]
    values          4 positions of a channel side by side                   int8 [16, D, 4]
    probabilities   times the values' scales; 4 positions side by side      uint8 [16, lane, plane, 4]

Keys and values are multiplied as they are stored. Queries and probabilities are rounded to 16 bits, which is more than
bfloat16 keeps, and multiplied as two planes of 8 bits (`plane` 0 is the lower one). All sums of products are exact, so
a lane's bits do not depend on its neighbours.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from plait.kernels.cpu import isa
from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.attention.kv_layout import CHUNK_POSITIONS, KV_BLOCK, NARROW_LANES
from plait.kernels.cpu.compiler import signatures as types
from plait.kernels.cpu.jit import intrinsic

HAS_VNNI = isa.has_features("avx512f", "avx512bw", "avx512vl", "avx512vnni")
UNROLL = 8  # positions whose sums are in registers at once
QUAD = 4  # positions, or channels, whose products one instruction adds up
MAX_QUERY = 127 * 256  # so that the upper plane fits into int8
MAX_PROB = 2**16 - 1
SMALLEST_MAX = 1e-30  # of probabilities: a smaller one counts as zero
PROBS_BYTES = 2 * QUAD * NARROW_LANES  # of 4 positions
BYTES64 = v.vector(v.I8, 64)
_REPEATED = [lane % NARROW_LANES for lane in range(v.LANES)]


def _dot(b: Any, sums: Any, unsigned: Any, signed: Any) -> Any:
    """VPDPBUSD: adds to sums [16] the four products each of unsigned and signed bytes."""
    return v.call_intrinsic(b, "llvm.x86.avx512.vpdpbusd.512", v.I32X16, [sums, unsigned, signed])


def _shuffled(b: Any, x: Any, y: Any, mask: list[int]) -> Any:
    return b.shuffle_vector(x, y, ir.Constant(v.vector(v.I32, len(mask)), mask))


def _whole(b: Any, sums: tuple[Any, Any]) -> Any:
    """Joins the sums of the lower and the upper plane."""
    return b.add(sums[0], b.shl(sums[1], v.constant(v.I32X16, 8)))


@intrinsic
def quantize_query(context: Any, query: Any, head_dim: Any, out: Any) -> Any:
    """Writes a query, float32 [D], as its lower plane, its upper plane, its scale and the sum of its integers.

    The scale, the largest magnitude divided by MAX_QUERY, is not finite if the query is not.
    """

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        if HAS_VNNI:
            _quantize_query(b, *values)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 3)), generate


def _quantize_query(b: Any, query: Any, head_dim: Any, out: Any) -> None:
    parts = b.lshr(head_dim, v.I64(4))
    loop = v.Loop(b, parts, [v.constant(v.I32X16, 0)])  # of magnitudes' bits, which order as the magnitudes do
    bits = b.and_(v.load(b, b.add(query, b.shl(loop.i, v.I64(6))), v.I32X16), v.constant(v.I32X16, 0x7FFFFFFF))
    (top,) = loop.end([_larger(b, loop.carried[0], bits)])
    largest = b.bitcast(v.reduce(b, top, lambda x, y: _larger(b, x, y)), v.F32)
    is_zero = b.fcmp_ordered("==", largest, v.F32(0.0))
    inverses = v.splat(b, b.select(is_zero, v.F32(0.0), b.fdiv(v.F32(MAX_QUERY), largest)))
    loop = v.Loop(b, parts, [v.constant(v.I32X16, 0)])
    scaled = b.fmul(v.load(b, b.add(query, b.shl(loop.i, v.I64(6))), v.F32X16), inverses)
    integers = b.fptosi(v.call_intrinsic(b, "llvm.nearbyint.v16f32", v.F32X16, [scaled]), v.I32X16)
    upper = b.ashr(b.add(integers, v.constant(v.I32X16, 128)), v.constant(v.I32X16, 8))
    target = b.add(out, b.shl(loop.i, v.I64(4)))
    v.store(b, b.trunc(integers, v.vector(v.I8)), target)
    v.store(b, b.trunc(upper, v.vector(v.I8)), b.add(target, head_dim))
    (sums,) = loop.end([b.add(loop.carried[0], integers)])
    end = b.add(out, b.shl(head_dim, v.I64(1)))
    v.store(b, b.fmul(largest, v.F32(1 / MAX_QUERY)), end)
    v.store(b, v.reduce(b, sums, b.add), end, 4)


def _larger(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.icmp_unsigned(">", x, y), x, y)


@intrinsic
def pack_queries(context: Any, queries: Any, head_dim: Any, out: Any) -> Any:
    """Packs 4 lanes of `quantize_query`, 4 * D bytes apart; their scales [4] and sums [4] follow."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        if HAS_VNNI:
            queries, head_dim, out = values
            rows = [b.add(queries, b.mul(head_dim, v.I64(4 * lane))) for lane in range(NARROW_LANES)]
            sixteen = v.vector(v.I8)
            loop = v.Loop(b, b.lshr(head_dim, v.I64(3)))  # the lower planes' channels, then the upper ones'
            upper = b.icmp_signed(">=", loop.i, b.lshr(head_dim, v.I64(4)))
            first = b.sub(loop.i, b.select(upper, b.lshr(head_dim, v.I64(4)), v.I64(0)))
            target = b.add(b.add(out, b.shl(first, v.I64(7))), b.select(upper, v.I64(64), v.I64(0)))
            for lane, row in enumerate(rows):
                v.store(b, v.load(b, b.add(row, b.shl(loop.i, v.I64(4))), sixteen), target, 16 * lane)
            loop.end()
            end = b.add(out, b.shl(head_dim, v.I64(3)))
            for lane, row in enumerate(rows):
                ends = v.load(b, b.add(row, b.shl(head_dim, v.I64(1))), v.vector(v.I32, 2))
                for i in range(2):
                    v.store(b, b.extract_element(ends, v.I32(i)), end, 16 * i + 4 * lane)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 3)), generate


@intrinsic
def copy_scales(context: Any, address: Any, stride: Any, count: Any, out: Any) -> Any:
    """Copies `count` float32, `stride` bytes apart."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        address, stride, count, out = values
        loop = v.Loop(b, count)
        v.store(b, v.load(b, b.add(address, b.mul(loop.i, stride)), v.I32), b.add(out, b.shl(loop.i, v.I64(2))))
        loop.end()
        return context.get_dummy_value()

    return types.void(*([types.int64] * 4)), generate


@intrinsic
def interleave_values(context: Any, values_: Any, stride: Any, head_dim: Any, quads: Any, out: Any) -> Any:
    """Interleaves int8 rows [4 * quads, D], `stride` bytes apart, to [quads, D, 4]."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        if HAS_VNNI:
            values, stride, head_dim, quads, out = arguments
            loop = v.Loop(b, quads)
            source = b.add(values, b.mul(loop.i, b.shl(stride, v.I64(2))))
            parts = v.Loop(b, b.lshr(head_dim, v.I64(5)))
            target = b.add(b.add(out, b.mul(loop.i, b.shl(head_dim, v.I64(2)))), b.shl(parts.i, v.I64(7)))
            address, rows = b.add(source, b.shl(parts.i, v.I64(5))), []
            for _ in range(QUAD):
                rows.append(v.load(b, address, v.vector(v.I8, 32)))
                address = b.add(address, stride)
            pairs = [_shuffled(b, rows[i], rows[i + 1], list(range(64))) for i in (0, 2)]
            for i in range(2):  # channels 16 i to 16 i + 15
                mask = [32 * row + channel for channel in range(16 * i, 16 * i + 16) for row in range(QUAD)]
                v.store(b, _shuffled(b, pairs[0], pairs[1], mask), target, 64 * i)
            parts.end()
            loop.end()
        return context.get_dummy_value()

    return types.void(*([types.int64] * 5)), generate


@intrinsic
def compute_qk(
    context: Any, packed: Any, head_dim: Any, keys: Any, stride: Any, key_scales: Any, chunks: Any, out: Any
) -> Any:
    """Computes the scores of 4 lanes (`pack_queries`) and 32 * chunks keys, `stride` bytes apart: float32 [64, 4]."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        if HAS_VNNI:
            _compute_qk(b, *values)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 7)), generate


def _compute_qk(
    b: Any, packed: Any, head_dim: Any, keys: Any, stride: Any, key_scales: Any, chunks: Any, out: Any
) -> None:
    end = b.add(packed, b.shl(head_dim, v.I64(3)))
    scales = _load_lanes(b, end, v.F32)
    # Keys are made unsigned by adding 128, so 128 times the query's sum is subtracted.
    excess = b.shl(_load_lanes(b, b.add(end, v.I64(16)), v.I32), v.constant(v.I32X16, 7))
    loop = v.Loop(b, b.shl(chunks, v.I64(2)))
    first_row = b.add(keys, b.mul(loop.i, b.mul(stride, v.I64(UNROLL))))
    rows = [b.add(first_row, b.mul(stride, v.I64(i))) for i in range(UNROLL)]
    channels = v.Loop(b, b.lshr(head_dim, v.I64(4)), [v.constant(v.I32X16, 0)] * (2 * UNROLL))
    query, offset = b.add(packed, b.shl(channels.i, v.I64(7))), b.shl(channels.i, v.I64(4))
    planes = [v.load(b, query, v.I32X16, 64 * plane) for plane in range(2)]
    sums = []
    for i, row in enumerate(rows):
        four = v.load(b, b.add(row, offset), v.vector(v.I32, QUAD))
        key = b.xor(_shuffled(b, four, four, _REPEATED), v.constant(v.I32X16, 0x80808080))
        sums += [_dot(b, channels.carried[2 * i + plane], key, planes[plane]) for plane in range(2)]
    sums = channels.end(sums)
    positions = [_whole(b, (sums[2 * i], sums[2 * i + 1])) for i in range(UNROLL)]
    target, scale = b.add(out, b.shl(loop.i, v.I64(7))), b.add(key_scales, b.shl(loop.i, v.I64(5)))
    for i in range(2):
        integers = b.sub(_reduce_four(b, positions[4 * i : 4 * i + 4]), excess)
        four = v.load(b, scale, v.vector(v.F32, QUAD), 16 * i)
        factors = b.fmul(scales, _shuffled(b, four, four, [lane // NARROW_LANES for lane in range(v.LANES)]))
        v.store(b, b.fmul(b.sitofp(integers, v.F32X16), factors), target, 64 * i)
    loop.end()


def _load_lanes(b: Any, address: Any, kind: Any) -> Any:
    """Loads 4 numbers, repeated in each quarter of a vector."""
    four = v.load(b, address, v.vector(kind, NARROW_LANES))
    return _shuffled(b, four, four, _REPEATED)


_QUARTER = [(0, 2, 4, 6), (1, 3, 5, 7)]
_EVEN, _ODD = ([4 * q + (i if i < 4 else v.LANES + i - 4) for q in range(4) for i in half] for half in _QUARTER)
_TRANSPOSE_4X4 = [4 * (i % 4) + i // 4 for i in range(v.LANES)]


def _reduce_four(b: Any, sums: list[Any]) -> Any:
    """Reduces 4 positions' partial sums [lane, 4] to sums [position, lane]."""
    while len(sums) > 1:
        pairs = zip(sums[::2], sums[1::2], strict=True)
        sums = [b.add(_shuffled(b, x, y, _EVEN), _shuffled(b, x, y, _ODD)) for x, y in pairs]
    return _shuffled(b, sums[0], sums[0], _TRANSPOSE_4X4)


@intrinsic
def quantize_probs(context: Any, probs: Any, value_scales: Any, chunks: Any, out: Any, factors: Any) -> Any:
    """Multiplies probabilities, float32 [64, 4], by their positions' scales and rounds them to 16 bits.

    Writes the planes [8 * chunks, lane, plane, 4] to `out`, and to `factors` [4] what each lane's integers stand for.
    """

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        if HAS_VNNI:
            _quantize_probs(b, *values)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 5)), generate


def _quantize_probs(b: Any, probs: Any, value_scales: Any, chunks: Any, out: Any, factors: Any) -> None:
    loop = v.Loop(b, b.shl(chunks, v.I64(3)), [v.constant(v.F32X16, SMALLEST_MAX)])
    four = v.load(b, b.add(value_scales, b.shl(loop.i, v.I64(4))), v.vector(v.F32, QUAD))
    scales = _shuffled(b, four, four, [lane // NARROW_LANES for lane in range(v.LANES)])
    address = b.add(probs, b.shl(loop.i, v.I64(6)))
    scaled = b.fmul(v.load(b, address, v.F32X16), scales)
    v.store(b, scaled, address)
    (top,) = loop.end([v.maximum(b, scaled, loop.carried[0])])
    for step in (8, 4):
        top = v.maximum(b, top, _shuffled(b, top, top, [(lane + step) % v.LANES for lane in range(v.LANES)]))
    v.store(b, _shuffled(b, b.fmul(top, v.constant(v.F32X16, 1 / MAX_PROB)), top, [*range(NARROW_LANES)]), factors)
    inverses = b.fdiv(v.constant(v.F32X16, float(MAX_PROB)), top)
    loop = v.Loop(b, b.shl(chunks, v.I64(3)))
    scaled = b.fmul(v.load(b, b.add(probs, b.shl(loop.i, v.I64(6))), v.F32X16), inverses)
    integers = b.fptosi(v.call_intrinsic(b, "llvm.nearbyint.v16f32", v.F32X16, [scaled]), v.I32X16)
    bytes_ = b.bitcast(integers, BYTES64)  # [position, lane, byte]
    mask = [
        16 * position + 4 * lane + plane for lane in range(NARROW_LANES) for plane in range(2) for position in range(4)
    ]
    v.store(b, _shuffled(b, bytes_, bytes_, mask), b.add(out, b.mul(loop.i, v.I64(PROBS_BYTES))))
    loop.end()


@intrinsic
def accumulate_pv(
    context: Any, probs: Any, factors: Any, values_: Any, head_dim: Any, chunks: Any, accumulators: Any
) -> Any:
    """Adds 32 * chunks values (`interleave_values`), weighted (`quantize_probs`), to accumulators, float32 [4, D]."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        if HAS_VNNI:
            _accumulate_pv(b, *arguments)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 6)), generate


def _accumulate_pv(
    b: Any, probs: Any, factors: Any, values: Any, head_dim: Any, chunks: Any, accumulators: Any
) -> None:
    stride = b.shl(head_dim, v.I64(2))  # bytes of a lane's accumulators, and of 4 positions
    channels = v.Loop(b, b.lshr(head_dim, v.I64(5)))
    offset = b.shl(channels.i, v.I64(7))
    quads = v.Loop(b, b.mul(chunks, v.I64(CHUNK_POSITIONS // QUAD)), [v.constant(v.I32X16, 0)] * (4 * NARROW_LANES))
    quad_values = b.add(b.add(values, offset), b.mul(quads.i, stride))
    quad_probs = b.add(probs, b.mul(quads.i, v.I64(PROBS_BYTES)))
    halves = [v.load(b, quad_values, v.I32X16, 64 * i) for i in range(2)]
    sums = []
    for lane in range(NARROW_LANES):
        for plane in range(2):
            prob = v.broadcast_load(b, quad_probs, v.I32, 4 * (2 * lane + plane))
            sums += [_dot(b, quads.carried[4 * lane + 2 * plane + i], prob, halves[i]) for i in range(2)]
    sums = quads.end(sums)
    for lane in range(NARROW_LANES):
        factor = v.broadcast_load(b, factors, v.F32, 4 * lane)
        row = b.add(b.add(accumulators, offset), b.mul(stride, v.I64(lane)))
        for i in range(2):
            total = b.sitofp(_whole(b, (sums[4 * lane + i], sums[4 * lane + 2 + i])), v.F32X16)
            v.store(b, v.fma(b, total, factor, v.load(b, row, v.F32X16, 64 * i)), row, 64 * i)
    channels.end()


assert KV_BLOCK * MAX_PROB * 127 < 2**31, "a block's sums fit into 32 bits"
