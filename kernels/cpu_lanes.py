"""The inner parts of paged attention on AVX-512: one block of 64 cached positions against a few (token, head) lanes.

    keys      turned so that 16 positions lie side by side       float32 [D, 64]
    values    one position after the other                       float32 [64, D]
    scores    then weights, of each lane                          float32 [64]

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

from plait.kernels import cpu_ir as v

BLOCK = 64  # positions
ROW = 4 * BLOCK  # bytes of a row of `keys`, and of a lane's scores
LOWEST = -1e30
PAIRS = 16  # of channels, or of positions, that are summed before they are added


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def turn_keys(context: Any, pairs: Any, addresses: Any, offset: Any, out: Any) -> Any:
    """32 channels of 16 keys: bfloat16 at addresses[i] + offset to column i of float32 [32, 64] at `out`.

    With `pairs` 1 they stay bfloat16, two channels side by side: [16, 64] of 4 bytes.
    """

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        _, addresses, offset, out = values
        rows = [v.load(b, b.add(v.load(b, addresses, v.I64, 8 * i), offset), v.INTS) for i in range(v.LANES)]
        low, high = [*range(8)], [*range(8, 16)]
        zips = [ir.Constant(v.INTS, [x for i in part for x in (i, i + 16)]) for part in (low, high)]
        for _ in range(4):  # zipping each row with the one 8 further on, four times, transposes
            rows = [b.shuffle_vector(rows[i], rows[i + 8], each) for i in range(8) for each in zips]
        for pair, bits in enumerate(rows):
            if pairs.literal_value:
                v.store(b, bits, out, pair * ROW)
                continue
            even = b.shl(bits, v.constant(v.INTS, 16))
            odd = b.and_(bits, v.constant(v.INTS, 0xFFFF0000))
            for i, wide in enumerate((even, odd)):
                v.store(b, wide, out, (2 * pair + i) * ROW)
        return context.get_dummy_value()

    return types.void(pairs, types.int64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def widen(context: Any, address: Any, out: Any, count: Any) -> Any:
    """16 * count bfloat16 to float32."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        address, out, count = values
        loop = v.Loop(b, count)
        narrow = v.load(b, b.add(address, b.mul(loop.i, v.I64(32))), v.vector(v.I16))
        wide = b.shl(b.zext(narrow, v.INTS), v.constant(v.INTS, 16))
        v.store(b, wide, b.add(out, b.mul(loop.i, v.I64(64))))
        loop.end()
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def clear(context: Any, out: Any, count: Any) -> Any:
    """Writes 16 * count zeros, float32."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        out, count = values
        loop = v.Loop(b, count)
        v.store(b, v.constant(v.FLOATS, 0.0), b.add(out, b.shl(loop.i, v.I64(6))))
        loop.end()
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def score(context: Any, lanes: Any, queries: Any, keys: Any, size: Any, out: Any) -> Any:
    """Products of 1 to 3 float32 queries [lanes, size] with all 64 keys, to `out` [lanes, 64]."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        count = lanes.literal_value
        _, queries, keys, size, out = values
        for i in range(4 * count):
            v.store(b, v.constant(v.FLOATS, 0.0), out, 64 * i)
        chunks = v.Loop(b, b.lshr(size, v.I64(5)))
        pairs = v.Loop(b, v.I64(PAIRS), [v.constant(v.FLOATS, 0.0)] * (8 * count))
        channel = b.add(b.shl(chunks.i, v.I64(5)), b.shl(pairs.i, v.I64(1)))
        sums = []
        for side in range(2):
            row = b.add(keys, b.mul(b.add(channel, v.I64(side)), v.I64(ROW)))
            parts = [v.load(b, row, v.FLOATS, 64 * i) for i in range(4)]
            for lane in range(count):
                place = b.add(b.add(channel, v.I64(side)), b.mul(size, v.I64(lane)))
                query = v.spread(b, b.add(queries, b.shl(place, v.I64(2))))
                before = pairs.carried[4 * (count * side + lane) :]
                sums += [v.fma(b, query, part, before[i]) for i, part in enumerate(parts)]
        sums = pairs.end(sums)
        for i in range(4 * count):
            both = b.fadd(sums[i], sums[4 * count + i])
            v.store(b, b.fadd(v.load(b, out, v.FLOATS, 64 * i), both), out, 64 * i)
        chunks.end()
        return context.get_dummy_value()

    return types.void(lanes, *([types.int64] * 4)), generate


@intrinsic  # type: ignore[untyped-decorator]
def shorten(context: Any, address: Any, count: Any) -> Any:
    """16 * count float32 to the nearest bfloat16, and back."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        address, count = values
        loop = v.Loop(b, count)
        here = b.add(address, b.shl(loop.i, v.I64(6)))
        v.store(
            b, b.shl(b.zext(v.nearest_bfloat16(b, v.load(b, here, v.FLOATS)), v.INTS), v.constant(v.INTS, 16)), here
        )
        loop.end()
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def soften(
    context: Any, scores: Any, begin: Any, end: Any, scale: Any, peak: Any, weight: Any, total: Any, parts: Any
) -> Any:
    """One block of an online softmax (Milakov and Gimelshein 2018) for one lane.

    Scores [64] of positions [begin, end) become weights, the others 0; `peak` and `weight` are brought up to date,
    and `total` [16 * parts] is shrunk to the new peak.
    """

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        scores, begin, end, scale, peak, weight, total, parts = values
        scales, lowest = v.splat(b, scale), v.constant(v.FLOATS, LOWEST)
        bounds = [v.splat(b, b.trunc(each, v.I32)) for each in (begin, end)]
        seen, masked = [], []
        for i in range(4):
            index = ir.Constant(v.INTS, [16 * i + lane for lane in range(v.LANES)])
            seen.append(b.and_(b.icmp_signed(">=", index, bounds[0]), b.icmp_signed("<", index, bounds[1])))
            scaled = b.fmul(v.load(b, scores, v.FLOATS, 64 * i), scales)
            masked.append(b.select(seen[i], scaled, lowest))
        top = v.larger(b, v.larger(b, masked[0], masked[1]), v.larger(b, masked[2], masked[3]))
        before = v.load(b, peak, v.F32)
        best = v.larger(b, v.fold(b, top, lambda x, y: v.larger(b, x, y)), before)
        bests = v.splat(b, best)
        weights = [v.exp(b, b.fsub(each, bests)) for each in masked]
        weights = [b.select(s, w, v.constant(v.FLOATS, 0.0)) for s, w in zip(seen, weights, strict=True)]
        for i, each in enumerate(weights):
            v.store(b, each, scores, 64 * i)
        sum_ = b.fadd(b.fadd(weights[0], weights[1]), b.fadd(weights[2], weights[3]))
        shrink = v.exp(b, b.fsub(v.splat(b, before), bests))
        shrunk = b.fmul(v.load(b, weight, v.F32), b.extract_element(shrink, v.I32(0)))
        v.store(b, best, peak)
        v.store(b, b.fadd(shrunk, v.fold(b, sum_, b.fadd)), weight)
        loop = v.Loop(b, parts)
        place = b.add(total, b.mul(loop.i, v.I64(64)))
        v.store(b, b.fmul(v.load(b, place, v.FLOATS), shrink), place)
        loop.end()
        return context.get_dummy_value()

    return types.void(*([types.int64] * 3), types.float32, *([types.int64] * 4)), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def gather(context: Any, lanes: Any, weights: Any, values: Any, size: Any, pairs: Any, total: Any) -> Any:
    """Adds 2 * pairs <= 32 values by each lane's weights [lanes, 64] to `total` [lanes, size], 32 channels of it."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        number = lanes.literal_value
        _, weights, values, size, pairs, total = arguments
        step = b.shl(size, v.I64(2))
        totals = [b.add(total, b.mul(step, v.I64(lane))) for lane in range(number)]
        loop = v.Loop(b, pairs, [v.constant(v.FLOATS, 0.0)] * (4 * number))
        sums = []
        for side in range(2):
            position = b.add(b.shl(loop.i, v.I64(1)), v.I64(side))
            row = b.add(values, b.mul(step, position))
            parts = [v.load(b, row, v.FLOATS, 64 * i) for i in range(2)]
            for lane in range(number):
                weight = v.spread(b, b.add(weights, b.shl(position, v.I64(2))), v.F32, ROW * lane)
                before = loop.carried[2 * (number * side + lane) :]
                sums += [v.fma(b, weight, part, before[i]) for i, part in enumerate(parts)]
        sums = loop.end(sums)
        for i in range(2 * number):
            place, offset = totals[i // 2], 64 * (i % 2)
            both = b.fadd(sums[i], sums[2 * number + i])
            v.store(b, b.fadd(v.load(b, place, v.FLOATS, offset), both), place, offset)
        return context.get_dummy_value()

    return types.void(lanes, *([types.int64] * 5)), generate


@intrinsic  # type: ignore[untyped-decorator]
def fetch(context: Any, address: Any) -> Any:
    """Asks for the cache line at an address."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        place = v.at(b, values[0], v.I8)
        kind = ir.FunctionType(ir.VoidType(), [place.type, v.I32, v.I32, v.I32])
        function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
        b.call(function, [place, v.I32(0), v.I32(3), v.I32(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate
