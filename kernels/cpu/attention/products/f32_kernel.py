"""Attention's products in float32, for CPUs without bfloat16 products: 1 to 3 lanes against a block of 64 positions.

    keys      transposed, so that 16 positions lie side by side     float32 [D, 64]
    values    one position after the other                          float32 [64, D]
    scores    of each lane; later its probabilities                 float32 [64]

Queries and probabilities are float32 numbers rounded to bfloat16. A lane's sums equal AMX's TDPBF16PS to the bit,
whichever lanes are computed with it: of every 32 channels or positions the even ones and the odd ones are each added in
order, then both sums together, then the sum so far.
"""

from __future__ import annotations

from typing import Annotated, Any

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.attention.kv_layout import KV_BLOCK
from plait.kernels.cpu.compiler.intrinsics import Int, OneOf, intrinsic

FewLanes = Annotated[int, OneOf((3, 2, 1))]
ROW_BYTES = 4 * KV_BLOCK  # bytes of a row of keys, and of a lane's scores
PAIRS = 16  # pairs of channels, or of positions, that are summed before they are added to the result


@intrinsic
def transpose_keys(b: Any, addresses: Int, offset: Int, out: Int) -> None:
    """Writes 32 channels of 16 keys, bfloat16 at addresses[i] + offset, to column i of float32 [32, 64] at `out`."""
    rows = [v.load(b, b.add(v.load(b, addresses, v.I64, 8 * i), offset), v.I32X16) for i in range(v.LANES)]
    for pair, bits in enumerate(v.transpose_16x16(b, rows)):
        even = b.shl(bits, v.constant(v.I32X16, 16))
        odd = b.and_(bits, v.constant(v.I32X16, 0xFFFF0000))
        for i, wide in enumerate((even, odd)):
            v.store(b, wide, out, (2 * pair + i) * ROW_BYTES)


@intrinsic
def compute_qk(b: Any, lanes: FewLanes, queries: Int, keys: Int, head_dim: Int, out: Int) -> None:
    """Computes the scores of 1 to 3 queries [lanes, D] and all 64 keys, `out` [lanes, 64]."""
    for i in range(4 * lanes):
        v.store(b, v.constant(v.F32X16, 0.0), out, 64 * i)
    chunks = v.Loop(b, b.lshr(head_dim, v.I64(5)))
    pairs = v.Loop(b, v.I64(PAIRS), [v.constant(v.F32X16, 0.0)] * (8 * lanes))
    channel = b.add(b.shl(chunks.i, v.I64(5)), b.shl(pairs.i, v.I64(1)))
    sums = []
    for side in range(2):
        row = b.add(keys, b.mul(b.add(channel, v.I64(side)), v.I64(ROW_BYTES)))
        parts = [v.load(b, row, v.F32X16, 64 * i) for i in range(4)]
        for lane in range(lanes):
            index = b.add(b.add(channel, v.I64(side)), b.mul(head_dim, v.I64(lane)))
            query = v.broadcast_load(b, b.add(queries, b.shl(index, v.I64(2))))
            before = pairs.carried[4 * (lanes * side + lane) :]
            sums += [v.fma(b, query, part, before[i]) for i, part in enumerate(parts)]
    sums = pairs.end(sums)
    for i in range(4 * lanes):
        both = b.fadd(sums[i], sums[4 * lanes + i])
        v.store(b, b.fadd(v.load(b, out, v.F32X16, 64 * i), both), out, 64 * i)
    chunks.end()


@intrinsic
def round_to_bf16(b: Any, address: Int, out: Int, count: Int) -> None:
    """Rounds 16 * count float32 to the nearest bfloat16 values, as float32."""
    loop = v.Loop(b, count)
    offset = b.shl(loop.i, v.I64(6))
    narrow = v.round_to_bf16_bits(b, v.load(b, b.add(address, offset), v.F32X16))
    v.store(b, b.shl(b.zext(narrow, v.I32X16), v.constant(v.I32X16, 16)), b.add(out, offset))
    loop.end()


@intrinsic
def accumulate_pv(
    b: Any, lanes: FewLanes, probs: Int, values: Int, head_dim: Int, pairs: Int, accumulators: Int
) -> None:
    """Adds 2 * pairs <= 32 values, weighted by probabilities [lanes, 64], to 32 channels of accumulators [lanes, D]."""
    stride = b.shl(head_dim, v.I64(2))
    rows = [b.add(accumulators, b.mul(stride, v.I64(lane))) for lane in range(lanes)]
    loop = v.Loop(b, pairs, [v.constant(v.F32X16, 0.0)] * (4 * lanes))
    sums = []
    for side in range(2):
        position = b.add(b.shl(loop.i, v.I64(1)), v.I64(side))
        row = b.add(values, b.mul(stride, position))
        parts = [v.load(b, row, v.F32X16, 64 * i) for i in range(2)]
        for lane in range(lanes):
            prob = v.broadcast_load(b, b.add(probs, b.shl(position, v.I64(2))), v.F32, ROW_BYTES * lane)
            before = loop.carried[2 * (lanes * side + lane) :]
            sums += [v.fma(b, prob, part, before[i]) for i, part in enumerate(parts)]
    sums = loop.end(sums)
    for i in range(2 * lanes):
        row, offset = rows[i // 2], 64 * (i % 2)
        both = b.fadd(sums[i], sums[2 * lanes + i])
        v.store(b, b.fadd(v.load(b, row, v.F32X16, offset), both), row, offset)
