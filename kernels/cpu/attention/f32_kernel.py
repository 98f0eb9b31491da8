"""Attention's innermost part in float32, for CPUs that do not multiply bfloat16: one block of 64 cached positions
against a few (token, head) lanes.

    keys      turned so that 16 positions lie side by side       float32 [D, 64]
    values    one position after the other                       float32 [64, D]
    scores    then weights, of each lane (`cpu_softmax`)          float32 [64]

Queries and weights are bfloat16 in value. A lane's sums are those of AMX's TDPBF16PS, to the bit, whichever lanes are
computed with it: of 32 channels or positions the even ones and the odd ones each in order, then both together, then
added to what there was.

Knows: addresses of such arrays. Must not know: pages, rows, threads.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from plait.kernels.cpu import llvm as v

KV_BLOCK = 64  # positions
ROW_BYTES = 4 * KV_BLOCK  # bytes of a row of `keys`, and of a lane's scores
PAIRS = 16  # of channels, or of positions, that are summed before they are added


@intrinsic  # type: ignore[untyped-decorator]
def transpose_keys(context: Any, addresses: Any, offset: Any, out: Any) -> Any:
    """32 channels of 16 keys: bfloat16 at addresses[i] + offset to column i of float32 [32, 64] at `out`."""

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


@intrinsic  # type: ignore[untyped-decorator]
def bf16_to_f32(context: Any, address: Any, out: Any, count: Any) -> Any:
    """16 * count bfloat16 to float32."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        address, out, count = values
        loop = v.Loop(b, count)
        narrow = v.load(b, b.add(address, b.mul(loop.i, v.I64(32))), v.vector(v.I16))
        wide = b.shl(b.zext(narrow, v.I32X16), v.constant(v.I32X16, 16))
        v.store(b, wide, b.add(out, b.mul(loop.i, v.I64(64))))
        loop.end()
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def zero_floats(context: Any, out: Any, count: Any) -> Any:
    """Writes 16 * count zeros, float32."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        out, count = values
        loop = v.Loop(b, count)
        v.store(b, v.constant(v.F32X16, 0.0), b.add(out, b.shl(loop.i, v.I64(6))))
        loop.end()
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def compute_qk(context: Any, lanes: Any, queries: Any, keys: Any, head_dim: Any, out: Any) -> Any:
    """Products of 1 to 3 float32 queries [lanes, size] with all 64 keys, to `out` [lanes, 64]."""

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
                place = b.add(b.add(channel, v.I64(side)), b.mul(head_dim, v.I64(lane)))
                query = v.broadcast_load(b, b.add(queries, b.shl(place, v.I64(2))))
                before = pairs.carried[4 * (count * side + lane) :]
                sums += [v.fma(b, query, part, before[i]) for i, part in enumerate(parts)]
        sums = pairs.end(sums)
        for i in range(4 * count):
            both = b.fadd(sums[i], sums[4 * count + i])
            v.store(b, b.fadd(v.load(b, out, v.F32X16, 64 * i), both), out, 64 * i)
        chunks.end()
        return context.get_dummy_value()

    return types.void(lanes, *([types.int64] * 4)), generate


@intrinsic  # type: ignore[untyped-decorator]
def round_to_bf16(context: Any, address: Any, out: Any, count: Any) -> Any:
    """16 * count float32 as the nearest bfloat16 values, float32."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        address, out, count = values
        loop = v.Loop(b, count)
        offset = b.shl(loop.i, v.I64(6))
        narrow = v.round_to_bf16_bits(b, v.load(b, b.add(address, offset), v.F32X16))
        v.store(b, b.shl(b.zext(narrow, v.I32X16), v.constant(v.I32X16, 16)), b.add(out, offset))
        loop.end()
        return context.get_dummy_value()

    return types.void(*([types.int64] * 3)), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def accumulate_pv(context: Any, lanes: Any, weights: Any, values: Any, head_dim: Any, pairs: Any, total: Any) -> Any:
    """Adds 2 * pairs <= 32 values by each lane's weights [lanes, 64] to `total` [lanes, size], 32 channels of it."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        number = lanes.literal_value
        _, weights, values, head_dim, pairs, total = arguments
        stride = b.shl(head_dim, v.I64(2))
        totals = [b.add(total, b.mul(stride, v.I64(lane))) for lane in range(number)]
        loop = v.Loop(b, pairs, [v.constant(v.F32X16, 0.0)] * (4 * number))
        sums = []
        for side in range(2):
            position = b.add(b.shl(loop.i, v.I64(1)), v.I64(side))
            row = b.add(values, b.mul(stride, position))
            parts = [v.load(b, row, v.F32X16, 64 * i) for i in range(2)]
            for lane in range(number):
                weight = v.broadcast_load(b, b.add(weights, b.shl(position, v.I64(2))), v.F32, ROW_BYTES * lane)
                before = loop.carried[2 * (number * side + lane) :]
                sums += [v.fma(b, weight, part, before[i]) for i, part in enumerate(parts)]
        sums = loop.end(sums)
        for i in range(2 * number):
            place, offset = totals[i // 2], 64 * (i % 2)
            both = b.fadd(sums[i], sums[2 * number + i])
            v.store(b, b.fadd(v.load(b, place, v.F32X16, offset), both), place, offset)
        return context.get_dummy_value()

    return types.void(lanes, *([types.int64] * 5)), generate


@intrinsic  # type: ignore[untyped-decorator]
def prefetch_rows(context: Any, address: Any, stride: Any, count: Any, head_dim: Any) -> Any:
    """Asks for `count` rows of `head_dim` bfloat16, `stride` bytes apart."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        address, stride, count, head_dim = values
        place = v.I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [place, v.I32, v.I32, v.I32])
        function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
        rows = v.Loop(b, count)
        here = b.add(address, b.mul(rows.i, stride))
        lines = v.Loop(b, b.lshr(head_dim, v.I64(5)))
        b.call(function, [v.pointer_at(b, b.add(here, b.shl(lines.i, v.I64(6))), v.I8), v.I32(0), v.I32(3), v.I32(1)])
        lines.end()
        rows.end()
        return context.get_dummy_value()

    return types.void(*([types.int64] * 4)), generate


@intrinsic  # type: ignore[untyped-decorator]
def touch_rows(context: Any, address: Any, stride: Any, count: Any, head_dim: Any) -> Any:
    """Loads as many, and throws them away: in order, as a cache's own prefetcher likes it."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        address, stride, count, head_dim = values
        rows = v.Loop(b, count)
        here = b.add(address, b.mul(rows.i, stride))
        lines = v.Loop(b, b.lshr(head_dim, v.I64(5)))
        place = b.add(here, b.shl(lines.i, v.I64(6)))
        b.load_atomic(v.pointer_at(b, place, v.I32), "monotonic", 4)  # a plain load, but one that LLVM keeps
        lines.end()
        rows.end()
        return context.get_dummy_value()

    return types.void(*([types.int64] * 4)), generate
