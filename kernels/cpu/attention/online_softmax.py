"""The online softmax of attention (Milakov and Gimelshein 2018) over blocks of 64 positions, in powers of two.

Probabilities are 2 ** (score - running maximum). A lane's running maximum changes only when a score exceeds it by more
than 8, so accumulators are rarely rescaled and probabilities stay below 2 ** 8. The running sum adds the probabilities
before they are rounded to bfloat16, 32 positions at a time, as a tree: positions i and i + 16, i and i + 8, and so on;
the result is added to the sum so far.

The update exists for 1, 4 and 16 lanes (`online_softmax_update`, `_x4`, `_x16`). Scores are [positions] for one lane,
and [positions, lanes] for more. All three versions compute the same bits for a lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.attention.kv_layout import CHUNK_POSITIONS, KV_BLOCK, NARROW_LANES
from plait.kernels.cpu.compiler import signatures as types
from plait.kernels.cpu.jit import intrinsic

MASKED_SCORE, INITIAL_MAX = -1e30, -1e20  # the score of a masked position; the running maximum before any score
RESCALE_LOG2 = 8.0  # how far a score must exceed the running maximum to replace it
LOG2_E = 1.4426950408889634


def _rounded_bits(b: Any, prob: Any) -> Any:
    """Returns the bits of a float32 probability, rounded so that their upper 16 are the nearest bfloat16."""
    return b.add(b.bitcast(prob, v.I32X16), v.constant(v.I32X16, 0x8000))


def _update_max(b: Any, old_max: Any, block_max: Any, scales: Any) -> tuple[Any, Any, Any]:
    """Returns the new running maxima, the rescaling factors, and whether the maximum moved, for a vector of lanes."""
    best = v.maximum(b, old_max, b.fmul(block_max, scales))
    moves = b.fcmp_ordered(">", best, b.fadd(old_max, v.constant(v.F32X16, RESCALE_LOG2)))
    new_max = b.select(moves, best, old_max)
    return new_max, v.exp2(b, b.fsub(old_max, new_max)), moves


def _rescale(b: Any, accumulators: Any, factors: Any, parts: Any) -> None:
    """Multiplies one lane's accumulators [16 * parts] by a factor."""
    loop = v.Loop(b, parts)
    address = b.add(accumulators, b.shl(loop.i, v.I64(6)))
    v.store(b, b.fmul(v.load(b, address, v.F32X16), factors), address)
    loop.end()


@intrinsic
def soft_cap(context: Any, scores: Any, inner: Any, outer: Any, count: Any) -> Any:
    """Replaces 16 * count float32 x by outer * tanh(inner * x); tanh(y) is 1 - 2 / (1 + e ** (2 * y))."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        scores, inner, outer, count = values
        factors = b.fmul(v.splat(b, inner), v.constant(v.F32X16, 2 * LOG2_E))
        outers, limit = v.splat(b, outer), v.constant(v.F32X16, 99.0)  # beyond it 1 / (1 + 2 ** x) is not accurate
        twice = b.fmul(outers, v.constant(v.F32X16, -2.0))
        loop = v.Loop(b, count)
        address = b.add(scores, b.shl(loop.i, v.I64(6)))
        exponent = v.maximum(b, b.fneg(limit), b.fmul(v.load(b, address, v.F32X16), factors))  # NaN stays NaN
        exponent = b.select(b.fcmp_ordered(">", exponent, limit), limit, exponent)
        inverse = v.reciprocal(b, b.fadd(v.constant(v.F32X16, 1.0), v.exp2(b, exponent)))
        v.store(b, v.fma(b, twice, inverse, outers), address)
        loop.end()
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.float32, types.int64), generate


@intrinsic
def online_softmax_update(
    context: Any,
    scores: Any,
    begin: Any,
    end: Any,
    scale: Any,
    running_max: Any,
    running_sum: Any,
    accumulators: Any,
    parts: Any,
) -> Any:
    """Updates one lane with one block: replaces scores [64] of positions [begin, end) by probabilities, others by 0.

    `scale` includes the factor log2(e). `running_max` and `running_sum` are addresses of one float32 each.
    `accumulators` [16 * parts] are rescaled if the maximum moves.
    """

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        scores, begin, end, scale, running_max, running_sum, accumulators, parts = values
        scales = v.splat(b, scale)
        bounds = [v.splat(b, b.trunc(bound, v.I32)) for bound in (begin, end)]
        masked = []
        for i in range(4):
            index = ir.Constant(v.I32X16, [16 * i + lane for lane in range(v.LANES)])
            inside = b.and_(b.icmp_signed(">=", index, bounds[0]), b.icmp_signed("<", index, bounds[1]))
            masked.append(b.select(inside, v.load(b, scores, v.F32X16, 64 * i), v.constant(v.F32X16, MASKED_SCORE)))
        top = v.maximum(b, v.maximum(b, masked[0], masked[1]), v.maximum(b, masked[2], masked[3]))
        top = v.splat(b, v.reduce(b, top, lambda x, y: v.maximum(b, x, y)))
        new_max, factors, moves = _update_max(b, v.broadcast_load(b, running_max), top, scales)
        sum_ = b.fmul(v.load(b, running_sum, v.F32), b.extract_element(factors, v.I32(0)))
        probs = [v.exp2(b, v.fma(b, x, scales, b.fsub(v.constant(v.F32X16, 0.0), new_max))) for x in masked]
        for i, prob in enumerate(probs):
            v.store(b, b.and_(_rounded_bits(b, prob), v.constant(v.I32X16, 0xFFFF0000)), scores, 64 * i)
        for i in (0, 2):
            sum_ = b.fadd(sum_, v.reduce(b, b.fadd(probs[i], probs[i + 1]), b.fadd))
        v.store(b, b.extract_element(new_max, v.I32(0)), running_max)
        v.store(b, sum_, running_sum)
        with b.if_then(b.extract_element(moves, v.I32(0)), likely=False):
            _rescale(b, accumulators, factors, parts)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 3), types.float32, *([types.int64] * 4)), generate


@intrinsic
def merge_partial(
    context: Any,
    accumulators: Any,
    running_max: Any,
    running_sum: Any,
    to_accumulators: Any,
    to_max: Any,
    to_sum: Any,
    parts: Any,
) -> Any:
    """Merges a lane's state over some positions into its state over other positions, at the `to_` addresses.

    Both accumulators, [16 * parts], are rescaled to the larger maximum. A state without positions (its sum is 0)
    changes nothing.
    """

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        accumulators, running_max, running_sum, to_accumulators, to_max, to_sum, parts = values
        own_sum = v.load(b, running_sum, v.F32)
        with b.if_then(b.fcmp_unordered("!=", own_sum, v.F32(0.0))):
            maxima = [v.broadcast_load(b, address) for address in (to_max, running_max)]
            top = v.maximum(b, *maxima)
            to_factor, own_factor = (v.exp2(b, b.fsub(x, top)) for x in maxima)
            scalars = [b.extract_element(x, v.I32(0)) for x in (to_factor, own_factor, top)]
            sum_ = b.fadd(b.fmul(v.load(b, to_sum, v.F32), scalars[0]), b.fmul(own_sum, scalars[1]))
            v.store(b, sum_, to_sum)
            v.store(b, scalars[2], to_max)
            loop = v.Loop(b, parts)
            offset = b.shl(loop.i, v.I64(6))
            to = b.add(to_accumulators, offset)
            scaled = b.fmul(v.load(b, to, v.F32X16), to_factor)
            v.store(b, v.fma(b, v.load(b, b.add(accumulators, offset), v.F32X16), own_factor, scaled), to)
            loop.end()
        return context.get_dummy_value()

    return types.void(*([types.int64] * 7)), generate


@intrinsic
def apply_mask_x16(context: Any, scores: Any, base: Any, kv_begins: Any, kv_ends: Any) -> Any:
    """Masks scores [64, 16] of positions from `base` on, outside each lane's [kv_begins, kv_ends), int32 [16]."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        scores, base, kv_begins, kv_ends = values
        loop = v.Loop(b, v.I64(KV_BLOCK))
        position = v.splat(b, b.trunc(b.add(base, loop.i), v.I32))
        inside = b.and_(
            b.icmp_signed(">=", position, v.load(b, kv_begins, v.I32X16)),
            b.icmp_signed("<", position, v.load(b, kv_ends, v.I32X16)),
        )
        row = b.add(scores, b.shl(loop.i, v.I64(6)))
        v.store(b, b.select(inside, v.load(b, row, v.F32X16), v.constant(v.F32X16, MASKED_SCORE)), row)
        loop.end()
        return context.get_dummy_value()

    return types.void(*([types.int64] * 4)), generate


@intrinsic
def online_softmax_update_x16(
    context: Any,
    scores: Any,
    chunks: Any,
    scale: Any,
    running_max: Any,
    running_sum: Any,
    accumulators: Any,
    parts: Any,
    count: Any,
    out: Any,
) -> Any:
    """Updates `count` lanes: writes the probabilities of scores [32 * chunks, 16] to `out`, bfloat16 [16, 64].

    `running_max` and `running_sum` [16], `accumulators` [16, 16 * parts]. The lanes from `count` to 15 are computed
    too, but their accumulators are not rescaled. The memory of the scores is overwritten.
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
    running_max: Any,
    running_sum: Any,
    accumulators: Any,
    parts: Any,
    count: Any,
    out: Any,
) -> None:
    scales = v.splat(b, scale)
    tops = v.Loop(b, chunks, [v.constant(v.F32X16, MASKED_SCORE)] * 4)
    chunk = b.add(scores, b.shl(tops.i, v.I64(11)))
    maxima = list(tops.carried)
    for k in range(CHUNK_POSITIONS):
        maxima[k % 4] = v.maximum(b, v.load(b, chunk, v.F32X16, 64 * k), maxima[k % 4])
    maxima = tops.end(maxima)
    top = v.maximum(b, v.maximum(b, maxima[0], maxima[1]), v.maximum(b, maxima[2], maxima[3]))
    new_max, factors, moves = _update_max(b, v.load(b, running_max, v.F32X16), top, scales)
    v.store(b, new_max, running_max)
    _rescale_moved(b, moves, count, factors, accumulators, parts)
    negative_max = b.fsub(v.constant(v.F32X16, 0.0), new_max)
    loop = v.Loop(b, chunks, [b.fmul(v.load(b, running_sum, v.F32X16), factors)])
    chunk, target = b.add(scores, b.shl(loop.i, v.I64(11))), b.add(out, b.shl(loop.i, v.I64(6)))
    sums = b.fadd(loop.carried[0], _exp_pairs(b, chunk, scales, negative_max))
    rows = [v.load(b, chunk, v.I32X16, 128 * i) for i in range(v.LANES)]
    for lane, pairs in enumerate(v.transpose_16x16(b, rows)):
        v.store(b, pairs, target, 2 * KV_BLOCK * lane)
    v.store(b, loop.end([sums])[0], running_sum)


@intrinsic
def apply_mask_x4(context: Any, scores: Any, base: Any, kv_begins: Any, kv_ends: Any) -> Any:
    """Masks the scores of 4 lanes, [64, 4], as `apply_mask_x16` does."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        scores, base, kv_begins, kv_ends = values
        bounds = [_load_x4(b, address, v.I32) for address in (kv_begins, kv_ends)]
        offsets = ir.Constant(v.I32X16, [lane // NARROW_LANES for lane in range(v.LANES)])
        loop = v.Loop(b, v.I64(KV_BLOCK * NARROW_LANES // v.LANES))
        position = b.add(v.splat(b, b.trunc(b.add(base, b.shl(loop.i, v.I64(2))), v.I32)), offsets)
        inside = b.and_(b.icmp_signed(">=", position, bounds[0]), b.icmp_signed("<", position, bounds[1]))
        row = b.add(scores, b.shl(loop.i, v.I64(6)))
        v.store(b, b.select(inside, v.load(b, row, v.F32X16), v.constant(v.F32X16, MASKED_SCORE)), row)
        loop.end()
        return context.get_dummy_value()

    return types.void(*([types.int64] * 4)), generate


@intrinsic
def online_softmax_update_x4(
    context: Any,
    scores: Any,
    chunks: Any,
    scale: Any,
    running_max: Any,
    running_sum: Any,
    accumulators: Any,
    parts: Any,
    count: Any,
    out: Any,
) -> Any:
    """Updates up to 4 lanes as `online_softmax_update_x16` does: scores [32 * chunks, 4], probabilities [4, 64]."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        *values, out = values

        def write(b: Any, chunk: Any, address: Any, probs: list[Any]) -> None:
            target = b.add(out, b.shl(chunk, v.I64(6)))
            for lane, positions in enumerate(_transpose_x4(b, [_rounded_bits(b, prob) for prob in probs])):
                v.store(b, positions, target, 2 * KV_BLOCK * lane)

        _online_softmax_x4(b, values, write)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, types.float32, *([i64] * 6)), generate


def _load_x4(b: Any, address: Any, kind: Any) -> Any:
    """Loads 4 numbers, repeated in each quarter of a vector."""
    four = v.load(b, address, v.vector(kind, NARROW_LANES))
    repeat = ir.Constant(v.I32X16, [lane % NARROW_LANES for lane in range(v.LANES)])
    return b.shuffle_vector(four, ir.Constant(four.type, ir.Undefined), repeat)


def _store_x4(b: Any, x: Any, address: Any) -> None:
    """Stores the first 4 numbers of a vector."""
    first = ir.Constant(v.vector(v.I32, NARROW_LANES), [*range(NARROW_LANES)])
    v.store(b, b.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), first), address)


def _reduce_quarters(b: Any, x: Any, combine: Any) -> Any:
    """Combines the four quarters of a vector: 0 with 2, 1 with 3, then both. Each quarter of the result is the same."""
    for step in (8, 4):
        rotated = ir.Constant(v.I32X16, [(lane + step) % v.LANES for lane in range(v.LANES)])
        x = combine(x, b.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), rotated))
    return x


def _online_softmax_x4(b: Any, values: Sequence[Any], write: Callable[[Any, Any, Any, list[Any]], None]) -> None:
    """`values`: the arguments of `online_softmax_update_x4_in_place`.

    `write(builder, chunk, address, probs)` stores a chunk's probabilities, whose scores are at `address`.
    """
    scores, chunks, scale, running_max, running_sum, accumulators, parts, count = values
    scales = v.splat(b, scale)
    tops = v.Loop(b, chunks, [v.constant(v.F32X16, MASKED_SCORE)])
    chunk, maxima = b.add(scores, b.shl(tops.i, v.I64(9))), tops.carried[0]
    for i in range(CHUNK_POSITIONS // NARROW_LANES):
        maxima = v.maximum(b, v.load(b, chunk, v.F32X16, 64 * i), maxima)
    top = _reduce_quarters(b, tops.end([maxima])[0], lambda x, y: v.maximum(b, x, y))
    new_max, factors, moves = _update_max(b, _load_x4(b, running_max, v.F32), top, scales)
    _store_x4(b, new_max, running_max)
    _rescale_moved(b, moves, count, factors, accumulators, parts)
    negative_max = b.fsub(v.constant(v.F32X16, 0.0), new_max)
    loop = v.Loop(b, chunks, [b.fmul(_load_x4(b, running_sum, v.F32), factors)])
    chunk = b.add(scores, b.shl(loop.i, v.I64(9)))
    probs = [
        v.exp2(b, v.fma(b, v.load(b, chunk, v.F32X16, 64 * i), scales, negative_max))
        for i in range(CHUNK_POSITIONS // NARROW_LANES)
    ]
    write(b, loop.i, chunk, probs)
    while len(probs) > 1:
        probs = [b.fadd(x, y) for x, y in zip(probs[: len(probs) // 2], probs[len(probs) // 2 :], strict=True)]
    sums = b.fadd(loop.carried[0], _reduce_quarters(b, probs[0], b.fadd))
    _store_x4(b, loop.end([sums])[0], running_sum)


@intrinsic
def online_softmax_update_x4_in_place(
    context: Any,
    scores: Any,
    chunks: Any,
    scale: Any,
    running_max: Any,
    running_sum: Any,
    accumulators: Any,
    parts: Any,
    count: Any,
) -> Any:
    """Updates up to 4 lanes as `online_softmax_update_x4` does, but replaces the scores by float32 probabilities."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        def write(b: Any, chunk: Any, address: Any, probs: list[Any]) -> None:
            for i, prob in enumerate(probs):
                v.store(b, prob, address, 64 * i)

        _online_softmax_x4(b, values, write)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, types.float32, *([i64] * 5)), generate


def _transpose_x4(b: Any, probs: list[Any]) -> list[Any]:
    """Transposes rounded probabilities: 8 vectors [4 positions, 4 lanes] to 4 vectors of bfloat16 [32 positions]."""
    words = v.vector(v.I16, 2 * v.LANES)
    pick = [2 * (NARROW_LANES * q + lane) + 1 for lane in range(NARROW_LANES) for q in range(8)]
    eights = [
        b.bitcast(b.shuffle_vector(b.bitcast(x, words), b.bitcast(y, words), _mask(pick)), v.I32X16)
        for x, y in zip(probs[::2], probs[1::2], strict=True)
    ]  # [4 lanes, 8 positions]: each quarter of a vector is a lane
    first, last = (_quarters((q, q + 4, q + 1, q + 5)) for q in (0, 2))
    mixed = [[b.shuffle_vector(x, y, mask) for x, y in (eights[:2], eights[2:])] for mask in (first, last)]
    ends = _quarters((0, 1, 4, 5)), _quarters((2, 3, 6, 7))
    return [b.shuffle_vector(*pair, mask) for pair in mixed for mask in ends]


def _mask(indices: list[int]) -> Any:
    return ir.Constant(v.vector(v.I32, len(indices)), indices)


def _quarters(which: tuple[int, ...]) -> Any:
    """Returns the shuffle mask that selects quarters of two vectors."""
    return _mask([4 * quarter + i for quarter in which for i in range(4)])


def _exp_pairs(b: Any, scores: Any, scales: Any, negative_max: Any) -> Any:
    """Replaces scores [32, 16] by probabilities and returns their sums [16].

    Row 2 i then holds those of positions 2 i and 2 i + 1, as pairs of bfloat16.
    """

    def pair(k: int) -> list[Any]:
        rows = [v.load(b, scores, v.F32X16, 64 * (k + i)) for i in range(2)]
        probs = [v.exp2(b, v.fma(b, row, scales, negative_max)) for row in rows]
        low, high = (_rounded_bits(b, prob) for prob in probs)
        upper = b.and_(high, v.constant(v.I32X16, 0xFFFF0000))
        v.store(b, b.or_(b.lshr(low, v.constant(v.I32X16, 16)), upper), scores, 64 * k)
        return probs

    def halves(first: int, step: int) -> list[Any]:
        """Returns two sums, as trees: of positions first, first + step, ..., and of the position after each."""
        if step == CHUNK_POSITIONS:
            return pair(first)
        both = halves(first, 2 * step), halves(first + step, 2 * step)
        return [b.fadd(x, y) for x, y in zip(*both, strict=True)]

    even, odd = halves(0, 2)
    return b.fadd(even, odd)


def _rescale_moved(b: Any, moves: Any, count: Any, factors: Any, accumulators: Any, parts: Any) -> None:
    """Multiplies accumulators [lanes, 16 * parts] by factors [16] for those of the first `count` lanes that moved."""
    moved = b.bitcast(moves, ir.IntType(16))
    moved = b.and_(moved, b.trunc(b.sub(b.shl(v.I64(1), count), v.I64(1)), moved.type))
    any_ = b.icmp_unsigned("!=", moved, ir.Constant(moved.type, 0))
    with b.if_then(any_, likely=False):
        lanes = v.Loop(b, v.I64(v.LANES))
        bit = b.and_(b.lshr(b.zext(moved, v.I64), lanes.i), v.I64(1))
        with b.if_then(b.trunc(bit, ir.IntType(1))):
            factor = v.splat(b, b.extract_element(factors, b.trunc(lanes.i, v.I32)))
            _rescale(b, b.add(accumulators, b.mul(lanes.i, b.shl(parts, v.I64(6)))), factor, parts)
        lanes.end()
