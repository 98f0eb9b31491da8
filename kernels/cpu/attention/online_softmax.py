"""The online softmax of attention (Milakov and Gimelshein 2018), over blocks of 64 positions, in powers of two.

A lane's reference is a score that its weights are relative to. It moves only when a score is more than 8 doublings
above it, so what was summed is rarely scaled anew; weights stay below 2^8. Weights are rounded to bfloat16; what they
add up to is summed before that, 32 positions at a time: those 16 apart together, then halves, then to what there was.

`online_softmax_update` does one lane, its scores side by side; `online_softmax_update_x16` and `online_softmax_update_x4` do 16 and 4, a position's scores side
by side. Each gives a lane the same bits. `merge_partial` puts together what two runs of blocks came to.

Knows: vectors. Must not know: where scores come from, what becomes of weights.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from plait.kernels.cpu import llvm as v

KV_BLOCK, CHUNK_POSITIONS = 64, 32  # positions; a chunk is what one matrix instruction sums
NARROW_LANES = 4  # lanes
MASKED_SCORE, INITIAL_MAX = -1e30, -1e20  # a score that weighs nothing; the reference before the first score
RESCALE_LOG2 = 8.0
LOG2_E = 1.4426950408889634


def _rounded_bits(b: Any, weight: Any) -> Any:
    """The bits of a weight, so that the upper half is the nearest bfloat16."""
    return b.add(b.bitcast(weight, v.I32X16), v.constant(v.I32X16, 0x8000))


def _update_max(b: Any, before: Any, top: Any, scales: Any) -> tuple[Any, Any, Any]:
    """The new references, by what sums so far shrink, and which lanes moved: for vectors of lanes."""
    best = v.maximum(b, before, b.fmul(top, scales))
    moves = b.fcmp_ordered(">", best, b.fadd(before, v.constant(v.F32X16, RESCALE_LOG2)))
    reference = b.select(moves, best, before)
    return reference, v.exp2(b, b.fsub(before, reference)), moves


def _rescale(b: Any, total: Any, factors: Any, parts: Any) -> None:
    loop = v.Loop(b, parts)
    place = b.add(total, b.shl(loop.i, v.I64(6)))
    v.store(b, b.fmul(v.load(b, place, v.F32X16), factors), place)
    loop.end()


@intrinsic  # type: ignore[untyped-decorator]
def online_softmax_update(
    context: Any, scores: Any, begin: Any, end: Any, scale: Any, reference: Any, weight: Any, total: Any, parts: Any
) -> Any:
    """One block for one lane: scores [64] of positions [begin, end) become weights, the others 0.

    `scale` holds the factor log2(e). `reference` and `weight`, one number each, are brought up to date, and `total`
    [16 * parts] is shrunk where the reference moves.
    """

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        scores, begin, end, scale, reference, weight, total, parts = values
        scales = v.splat(b, scale)
        bounds = [v.splat(b, b.trunc(each, v.I32)) for each in (begin, end)]
        seen = []
        for i in range(4):
            index = ir.Constant(v.I32X16, [16 * i + lane for lane in range(v.LANES)])
            inside = b.and_(b.icmp_signed(">=", index, bounds[0]), b.icmp_signed("<", index, bounds[1]))
            seen.append(b.select(inside, v.load(b, scores, v.F32X16, 64 * i), v.constant(v.F32X16, MASKED_SCORE)))
        top = v.maximum(b, v.maximum(b, seen[0], seen[1]), v.maximum(b, seen[2], seen[3]))
        top = v.splat(b, v.reduce(b, top, lambda x, y: v.maximum(b, x, y)))
        references, shrink, moves = _update_max(b, v.broadcast_load(b, reference), top, scales)
        sum_ = b.fmul(v.load(b, weight, v.F32), b.extract_element(shrink, v.I32(0)))
        weights = [v.exp2(b, v.fma(b, each, scales, b.fsub(v.constant(v.F32X16, 0.0), references))) for each in seen]
        for i, each in enumerate(weights):
            v.store(b, b.and_(_rounded_bits(b, each), v.constant(v.I32X16, 0xFFFF0000)), scores, 64 * i)
        for i in (0, 2):
            sum_ = b.fadd(sum_, v.reduce(b, b.fadd(weights[i], weights[i + 1]), b.fadd))
        v.store(b, b.extract_element(references, v.I32(0)), reference)
        v.store(b, sum_, weight)
        with b.if_then(b.extract_element(moves, v.I32(0)), likely=False):
            _rescale(b, total, shrink, parts)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 3), types.float32, *([types.int64] * 4)), generate


@intrinsic  # type: ignore[untyped-decorator]
def merge_partial(
    context: Any, total: Any, reference: Any, weight: Any, to: Any, to_reference: Any, to_weight: Any, parts: Any
) -> Any:
    """One lane's total [16 * parts] over some positions, added to that over others: by weights of the same reference.

    Where it has seen nothing nothing changes.
    """

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        total, reference, weight, to, to_reference, to_weight, parts = values
        found = v.load(b, weight, v.F32)
        with b.if_then(b.fcmp_unordered("!=", found, v.F32(0.0))):
            pair = [v.broadcast_load(b, each) for each in (to_reference, reference)]
            top = v.maximum(b, *pair)
            before, here = (v.exp2(b, b.fsub(each, top)) for each in pair)
            first = [b.extract_element(each, v.I32(0)) for each in (before, here, top)]
            sum_ = b.fadd(b.fmul(v.load(b, to_weight, v.F32), first[0]), b.fmul(found, first[1]))
            v.store(b, sum_, to_weight)
            v.store(b, first[2], to_reference)
            loop = v.Loop(b, parts)
            place = b.shl(loop.i, v.I64(6))
            scaled = b.fmul(v.load(b, b.add(to, place), v.F32X16), before)
            v.store(b, v.fma(b, v.load(b, b.add(total, place), v.F32X16), here, scaled), b.add(to, place))
            loop.end()
        return context.get_dummy_value()

    return types.void(*([types.int64] * 7)), generate


@intrinsic  # type: ignore[untyped-decorator]
def apply_mask_x16(context: Any, scores: Any, base: Any, kv_begins: Any, kv_ends: Any) -> Any:
    """Scores [64, 16] of positions from `base` on become HIDDEN where outside a lane's [floors, limits), int32 [16]."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        scores, base, kv_begins, kv_ends = values
        loop = v.Loop(b, v.I64(KV_BLOCK))
        at = v.splat(b, b.trunc(b.add(base, loop.i), v.I32))
        inside = b.and_(
            b.icmp_signed(">=", at, v.load(b, kv_begins, v.I32X16)),
            b.icmp_signed("<", at, v.load(b, kv_ends, v.I32X16)),
        )
        place = b.add(scores, b.shl(loop.i, v.I64(6)))
        v.store(b, b.select(inside, v.load(b, place, v.F32X16), v.constant(v.F32X16, MASKED_SCORE)), place)
        loop.end()
        return context.get_dummy_value()

    return types.void(*([types.int64] * 4)), generate


@intrinsic  # type: ignore[untyped-decorator]
def online_softmax_update_x16(
    context: Any,
    scores: Any,
    chunks: Any,
    scale: Any,
    references: Any,
    weights: Any,
    totals: Any,
    parts: Any,
    count: Any,
    out: Any,
) -> Any:
    """`online_softmax_update` for `count` lanes: scores [32 * chunks, 16] become weights, bfloat16 [16, 64] at `out`.

    `references` and `weights` [16], `totals` [16, 16 * parts]. Lanes from `count` on are computed, their totals left.
    """

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        _online_softmax_x16(b, *values)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, types.float32, *([i64] * 6)), generate


def _online_softmax_x16(
    b: Any,
    scores: Any,
    chunks: Any,
    scale: Any,
    references: Any,
    weights: Any,
    totals: Any,
    parts: Any,
    count: Any,
    out: Any,
) -> None:
    scales = v.splat(b, scale)
    tops = v.Loop(b, chunks, [v.constant(v.F32X16, MASKED_SCORE)] * 4)
    here = b.add(scores, b.shl(tops.i, v.I64(11)))
    found = list(tops.carried)
    for k in range(CHUNK_POSITIONS):
        found[k % 4] = v.maximum(b, v.load(b, here, v.F32X16, 64 * k), found[k % 4])
    found = tops.end(found)
    top = v.maximum(b, v.maximum(b, found[0], found[1]), v.maximum(b, found[2], found[3]))
    reference, shrink, moves = _update_max(b, v.load(b, references, v.F32X16), top, scales)
    v.store(b, reference, references)
    moved = b.bitcast(moves, ir.IntType(16))
    kept = b.trunc(b.sub(b.shl(v.I64(1), count), v.I64(1)), moved.type)
    _rescale_moved(b, b.and_(moved, kept), shrink, totals, parts)
    lower = b.fsub(v.constant(v.F32X16, 0.0), reference)
    loop = v.Loop(b, chunks, [b.fmul(v.load(b, weights, v.F32X16), shrink)])
    here, to = b.add(scores, b.shl(loop.i, v.I64(11))), b.add(out, b.shl(loop.i, v.I64(6)))
    sums = b.fadd(loop.carried[0], _exp_pairs(b, here, scales, lower))
    rows = [v.load(b, here, v.I32X16, 128 * i) for i in range(v.LANES)]
    for lane, pairs in enumerate(v.transpose_16x16(b, rows)):
        v.store(b, pairs, to, 2 * KV_BLOCK * lane)
    v.store(b, loop.end([sums])[0], weights)


@intrinsic  # type: ignore[untyped-decorator]
def apply_mask_x4(context: Any, scores: Any, base: Any, kv_begins: Any, kv_ends: Any) -> Any:
    """`apply_mask_x16` for 4 lanes: scores [64, 4]."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        scores, base, kv_begins, kv_ends = values
        bounds = [_load_x4(b, each, v.I32) for each in (kv_begins, kv_ends)]
        within = ir.Constant(v.I32X16, [lane // NARROW_LANES for lane in range(v.LANES)])
        loop = v.Loop(b, v.I64(KV_BLOCK * NARROW_LANES // v.LANES))
        at = b.add(v.splat(b, b.trunc(b.add(base, b.shl(loop.i, v.I64(2))), v.I32)), within)
        inside = b.and_(b.icmp_signed(">=", at, bounds[0]), b.icmp_signed("<", at, bounds[1]))
        place = b.add(scores, b.shl(loop.i, v.I64(6)))
        v.store(b, b.select(inside, v.load(b, place, v.F32X16), v.constant(v.F32X16, MASKED_SCORE)), place)
        loop.end()
        return context.get_dummy_value()

    return types.void(*([types.int64] * 4)), generate


@intrinsic  # type: ignore[untyped-decorator]
def online_softmax_update_x4(
    context: Any,
    scores: Any,
    chunks: Any,
    scale: Any,
    references: Any,
    weights: Any,
    totals: Any,
    parts: Any,
    count: Any,
    out: Any,
) -> Any:
    """`online_softmax_update_x16` for up to 4 lanes: scores [32 * chunks, 4], weights [4, 64]."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        _online_softmax_x4(b, *values)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, types.float32, *([i64] * 6)), generate


def _load_x4(b: Any, address: Any, kind: Any) -> Any:
    """4 numbers at an address, four times."""
    four = v.load(b, address, v.vector(kind, NARROW_LANES))
    again = ir.Constant(v.I32X16, [lane % NARROW_LANES for lane in range(v.LANES)])
    return b.shuffle_vector(four, ir.Constant(four.type, ir.Undefined), again)


def _store_x4(b: Any, x: Any, address: Any) -> None:
    """The first 4 numbers to an address."""
    first = ir.Constant(v.vector(v.I32, NARROW_LANES), [*range(NARROW_LANES)])
    v.store(b, b.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), first), address)


def _reduce_quarters(b: Any, x: Any, combine: Any) -> Any:
    """What the four quarters are together, halves first, in each of them."""
    for step in (8, 4):
        turned = ir.Constant(v.I32X16, [(lane + step) % v.LANES for lane in range(v.LANES)])
        x = combine(x, b.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), turned))
    return x


def _online_softmax_x4(
    b: Any,
    scores: Any,
    chunks: Any,
    scale: Any,
    references: Any,
    weights: Any,
    totals: Any,
    parts: Any,
    count: Any,
    out: Any,
) -> None:
    scales = v.splat(b, scale)
    tops = v.Loop(b, chunks, [v.constant(v.F32X16, MASKED_SCORE)])
    here, found = b.add(scores, b.shl(tops.i, v.I64(9))), tops.carried[0]
    for i in range(CHUNK_POSITIONS // NARROW_LANES):
        found = v.maximum(b, v.load(b, here, v.F32X16, 64 * i), found)
    top = _reduce_quarters(b, tops.end([found])[0], lambda x, y: v.maximum(b, x, y))
    reference, shrink, moves = _update_max(b, _load_x4(b, references, v.F32), top, scales)
    _store_x4(b, reference, references)
    moved = b.bitcast(moves, ir.IntType(16))
    kept = b.trunc(b.sub(b.shl(v.I64(1), count), v.I64(1)), moved.type)
    _rescale_moved(b, b.and_(moved, kept), shrink, totals, parts)
    lower = b.fsub(v.constant(v.F32X16, 0.0), reference)
    loop = v.Loop(b, chunks, [b.fmul(_load_x4(b, weights, v.F32), shrink)])
    here, to = b.add(scores, b.shl(loop.i, v.I64(9))), b.add(out, b.shl(loop.i, v.I64(6)))
    each = [
        v.exp2(b, v.fma(b, v.load(b, here, v.F32X16, 64 * i), scales, lower))
        for i in range(CHUNK_POSITIONS // NARROW_LANES)
    ]
    for lane, positions in enumerate(_transpose_x4(b, [_rounded_bits(b, weight) for weight in each])):
        v.store(b, positions, to, 2 * KV_BLOCK * lane)
    while len(each) > 1:
        each = [b.fadd(x, y) for x, y in zip(each[: len(each) // 2], each[len(each) // 2 :], strict=True)]
    sums = b.fadd(loop.carried[0], _reduce_quarters(b, each[0], b.fadd))
    _store_x4(b, loop.end([sums])[0], weights)


def _transpose_x4(b: Any, weights: list[Any]) -> list[Any]:
    """Rounded weights of 32 positions and 4 lanes, 4 positions to a vector, to bfloat16 of each lane."""
    words = v.vector(v.I16, 2 * v.LANES)
    pick = [2 * (NARROW_LANES * q + lane) + 1 for lane in range(NARROW_LANES) for q in range(8)]
    eights = [
        b.bitcast(b.shuffle_vector(b.bitcast(x, words), b.bitcast(y, words), _mask(pick)), v.I32X16)
        for x, y in zip(weights[::2], weights[1::2], strict=True)
    ]  # of each lane 8 positions, a quarter of the vector
    first, last = (_quarters((q, q + 4, q + 1, q + 5)) for q in (0, 2))
    mixed = [[b.shuffle_vector(x, y, mask) for x, y in (eights[:2], eights[2:])] for mask in (first, last)]
    ends = _quarters((0, 1, 4, 5)), _quarters((2, 3, 6, 7))
    return [b.shuffle_vector(*pair, mask) for pair in mixed for mask in ends]


def _mask(indices: list[int]) -> Any:
    return ir.Constant(v.vector(v.I32, len(indices)), indices)


def _quarters(which: tuple[int, ...]) -> Any:
    return _mask([4 * quarter + i for quarter in which for i in range(4)])


def _exp_pairs(b: Any, scores: Any, scales: Any, lower: Any) -> Any:
    """Scores [32, 16] become weights, positions 2 i and 2 i + 1 together in row 2 i; what they add up to, [16]."""

    def pair(k: int) -> list[Any]:
        found = [v.exp2(b, v.fma(b, v.load(b, scores, v.F32X16, 64 * (k + i)), scales, lower)) for i in range(2)]
        low, high = (_rounded_bits(b, each) for each in found)
        upper = b.and_(high, v.constant(v.I32X16, 0xFFFF0000))
        v.store(b, b.or_(b.lshr(low, v.constant(v.I32X16, 16)), upper), scores, 64 * k)
        return found

    def halves(first: int, step: int) -> list[Any]:
        """What positions first, first + step, ... add up to, halves together; and those one further on."""
        if step == CHUNK_POSITIONS:
            return pair(first)
        both = halves(first, 2 * step), halves(first + step, 2 * step)
        return [b.fadd(x, y) for x, y in zip(*both, strict=True)]

    even, odd = halves(0, 2)
    return b.fadd(even, odd)


def _rescale_moved(b: Any, moved: Any, shrink: Any, totals: Any, parts: Any) -> None:
    """Totals [lane, 16 * parts] times shrink [16] for the lanes whose bits are set."""
    any_ = b.icmp_unsigned("!=", moved, ir.Constant(moved.type, 0))
    with b.if_then(any_, likely=False):
        lanes = v.Loop(b, v.I64(v.LANES))
        bit = b.and_(b.lshr(b.zext(moved, v.I64), lanes.i), v.I64(1))
        with b.if_then(b.trunc(bit, ir.IntType(1))):
            factor = v.splat(b, b.extract_element(shrink, b.trunc(lanes.i, v.I32)))
            _rescale(b, b.add(totals, b.mul(lanes.i, b.shl(parts, v.I64(6)))), factor, parts)
        lanes.end()
