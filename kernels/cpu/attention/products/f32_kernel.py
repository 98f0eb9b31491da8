"""Attention's products in float32, for CPUs without bfloat16 products: 1 to 3 lanes against a block of 64 positions.

    keys      transposed, so that 16 positions lie side by side     float32 [D, 64]
    values    one position after the other                          float32 [64, D]
    scores    of each lane; later its probabilities                 float32 [64]

Queries and probabilities are float32 numbers rounded to bfloat16. A lane's sums equal AMX's TDPBF16PS to the bit,
whichever lanes are computed with it: of every 32 channels or positions the even ones and the odd ones are each added in
order, then both sums together, then the sum so far.
"""

from __future__ import annotations

from typing import Any

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.attention.kv_layout import KV_BLOCK
from plait.kernels.cpu.compiler import signatures as types
from plait.kernels.cpu.compiler.intrinsics import intrinsic, literal_intrinsic

ROW_BYTES = 4 * KV_BLOCK  # bytes of a row of keys, and of a lane's scores
PAIRS = 16  # pairs of channels, or of positions, that are summed before they are added to the result


@intrinsic
def transpose_keys(context: Any, addresses: Any, offset: Any, out: Any) -> Any:
    """Writes 32 channels of 16 keys, bfloat16 at addresses[i] + offset, to column i of float32 [32, 64] at `out`."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        addresses, offset, out = values
        rows = [v.load(b, b.add(v.load(b, addresses, v.I64, 8 * i), offset), v.I32X16) for i in range(v.LANES)]
        for pair, bits in enumerate(v.transpose_16x16(b, rows)):
            even = b.shl(bits, v.constant(v.I32X16, 16))
            odd = b.and_(bits, v.constant(v.I32X16, 0xFFFF0000))
            for i, wide in enumerate((even, odd)):
                v.store(b, wide, out, (2 * pair + i) * ROW_BYTES)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 3)), generate


@literal_intrinsic
def compute_qk(context: Any, lanes: Any, queries: Any, keys: Any, head_dim: Any, out: Any) -> Any:
    """Computes the scores of 1 to 3 queries [lanes, D] and all 64 keys, `out` [lanes, 64]."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        count = lanes.literal_value
        _, queries, keys, head_dim, out = values
        for i in range(4 * count):
            v.store(b, v.constant(v.F32X16, 0.0), out, 64 * i)
        chunks = v.Loop(b, b.lshr(head_dim, v.I64(5)))
        pairs = v.Loop(b, v.I64(PAIRS), [v.constant(v.F32X16, 0.0)] * (8 * count))
        channel = b.add(b.shl(chunks.i, v.I64(5)), b.shl(pairs.i, v.I64(1)))
        sums = []
        for side in range(2):
            row = b.add(keys, b.mul(b.add(channel, v.I64(side)), v.I64(ROW_BYTES)))
            parts = [v.load(b, row, v.F32X16, 64 * i) for i in range(4)]
            for lane in range(count):
                index = b.add(b.add(channel, v.I64(side)), b.mul(head_dim, v.I64(lane)))
                query = v.broadcast_load(b, b.add(queries, b.shl(index, v.I64(2))))
                before = pairs.carried[4 * (count * side + lane) :]
                sums += [v.fma(b, query, part, before[i]) for i, part in enumerate(parts)]
        sums = pairs.end(sums)
        for i in range(4 * count):
            both = b.fadd(sums[i], sums[4 * count + i])
            v.store(b, b.fadd(v.load(b, out, v.F32X16, 64 * i), both), out, 64 * i)
        chunks.end()
        return context.get_dummy_value()

    return types.void(lanes, *([types.int64] * 4)), generate


@intrinsic
def round_to_bf16(context: Any, address: Any, out: Any, count: Any) -> Any:
    """Rounds 16 * count float32 to the nearest bfloat16 values, as float32."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        address, out, count = values
        loop = v.Loop(b, count)
        offset = b.shl(loop.i, v.I64(6))
        narrow = v.round_to_bf16_bits(b, v.load(b, b.add(address, offset), v.F32X16))
        v.store(b, b.shl(b.zext(narrow, v.I32X16), v.constant(v.I32X16, 16)), b.add(out, offset))
        loop.end()
        return context.get_dummy_value()

    return types.void(*([types.int64] * 3)), generate


@literal_intrinsic
def accumulate_pv(
    context: Any, lanes: Any, probs: Any, values: Any, head_dim: Any, pairs: Any, accumulators: Any
) -> Any:
    """Adds 2 * pairs <= 32 values, weighted by probabilities [lanes, 64], to 32 channels of accumulators [lanes, D]."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        count = lanes.literal_value
        _, probs, values, head_dim, pairs, accumulators = arguments
        stride = b.shl(head_dim, v.I64(2))
        rows = [b.add(accumulators, b.mul(stride, v.I64(lane))) for lane in range(count)]
        loop = v.Loop(b, pairs, [v.constant(v.F32X16, 0.0)] * (4 * count))
        sums = []
        for side in range(2):
            position = b.add(b.shl(loop.i, v.I64(1)), v.I64(side))
            row = b.add(values, b.mul(stride, position))
            parts = [v.load(b, row, v.F32X16, 64 * i) for i in range(2)]
            for lane in range(count):
                prob = v.broadcast_load(b, b.add(probs, b.shl(position, v.I64(2))), v.F32, ROW_BYTES * lane)
                before = loop.carried[2 * (count * side + lane) :]
                sums += [v.fma(b, prob, part, before[i]) for i, part in enumerate(parts)]
        sums = loop.end(sums)
        for i in range(2 * count):
            row, offset = rows[i // 2], 64 * (i % 2)
            both = b.fadd(sums[i], sums[2 * count + i])
            v.store(b, b.fadd(v.load(b, row, v.F32X16, offset), both), row, offset)
        return context.get_dummy_value()

    return types.void(lanes, *([types.int64] * 5)), generate
