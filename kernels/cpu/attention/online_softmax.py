"""The online softmax of attention (Milakov and Gimelshein 2018) over blocks of 64 positions, in powers of two.

Probabilities are 2 ** (score - running maximum). A lane's running maximum changes only when a score exceeds it by more
than 8, so accumulators are rarely rescaled and probabilities stay below 2 ** 8. The running sum adds the probabilities
before they are rounded to bfloat16, 32 positions at a time, as a tree: positions i and i + 16, i and i + 8, and so on;
the result is added to the sum so far.

The update of 1 lane, whose scores are [positions], is here; that of 4 and 16 lanes, whose scores are [positions,
lanes], in `online_softmax_lanes`. All compute the same bits for a lane.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.attention.lane_vectors import MASKED_SCORE
from plait.kernels.cpu.compiler.intrinsics import Float32, Int, intrinsic

INITIAL_MAX = -1e20  # the running maximum before any score
RESCALE_LOG2 = 8.0  # how far a score must exceed the running maximum to replace it
LOG2_E = 1.4426950408889634


def rounded_bits(b: Any, prob: Any) -> Any:
    """Returns the bits of a float32 probability, rounded so that their upper 16 are the nearest bfloat16."""
    return b.add(b.bitcast(prob, v.I32X16), v.constant(v.I32X16, 0x8000))


def update_max(b: Any, old_max: Any, block_max: Any, scales: Any) -> tuple[Any, Any, Any]:
    """Returns the new running maxima, the rescaling factors, and whether the maximum moved, for a vector of lanes."""
    best = v.maximum(b, old_max, b.fmul(block_max, scales))
    moves = b.fcmp_ordered(">", best, b.fadd(old_max, v.constant(v.F32X16, RESCALE_LOG2)))
    new_max = b.select(moves, best, old_max)
    return new_max, v.exp2(b, b.fsub(old_max, new_max)), moves


def rescale(b: Any, accumulators: Any, factors: Any, parts: Any) -> None:
    """Multiplies one lane's accumulators [16 * parts] by a factor."""
    loop = v.Loop(b, parts)
    address = b.add(accumulators, b.shl(loop.i, v.I64(6)))
    v.store(b, b.fmul(v.load(b, address, v.F32X16), factors), address)
    loop.end()


@intrinsic
def soft_cap(b: Any, scores: Int, inner: Float32, outer: Float32, count: Int) -> None:
    """Replaces 16 * count float32 x by outer * tanh(inner * x); tanh(y) is 1 - 2 / (1 + e ** (2 * y))."""
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


@intrinsic
def online_softmax_update(
    b: Any,
    scores: Int,
    begin: Int,
    end: Int,
    scale: Float32,
    running_max: Int,
    running_sum: Int,
    accumulators: Int,
    parts: Int,
) -> None:
    """Updates one lane with one block: replaces scores [64] of positions [begin, end) by probabilities, others by 0.

    `scale` includes the factor log2(e). `running_max` and `running_sum` are addresses of one float32 each.
    `accumulators` [16 * parts] are rescaled if the maximum moves.
    """
    scales = v.splat(b, scale)
    bounds = [v.splat(b, b.trunc(bound, v.I32)) for bound in (begin, end)]
    masked = []
    for i in range(4):
        index = ir.Constant(v.I32X16, [16 * i + lane for lane in range(v.LANES)])
        inside = b.and_(b.icmp_signed(">=", index, bounds[0]), b.icmp_signed("<", index, bounds[1]))
        masked.append(b.select(inside, v.load(b, scores, v.F32X16, 64 * i), v.constant(v.F32X16, MASKED_SCORE)))
    top = v.maximum(b, v.maximum(b, masked[0], masked[1]), v.maximum(b, masked[2], masked[3]))
    top = v.splat(b, v.reduce(b, top, lambda x, y: v.maximum(b, x, y)))
    new_max, factors, moves = update_max(b, v.broadcast_load(b, running_max), top, scales)
    sum_ = b.fmul(v.load(b, running_sum, v.F32), b.extract_element(factors, v.I32(0)))
    probs = [v.exp2(b, v.fma(b, x, scales, b.fsub(v.constant(v.F32X16, 0.0), new_max))) for x in masked]
    for i, prob in enumerate(probs):
        v.store(b, b.and_(rounded_bits(b, prob), v.constant(v.I32X16, 0xFFFF0000)), scores, 64 * i)
    for i in (0, 2):
        sum_ = b.fadd(sum_, v.reduce(b, b.fadd(probs[i], probs[i + 1]), b.fadd))
    v.store(b, b.extract_element(new_max, v.I32(0)), running_max)
    v.store(b, sum_, running_sum)
    with b.if_then(b.extract_element(moves, v.I32(0)), likely=False):
        rescale(b, accumulators, factors, parts)


@intrinsic
def merge_partial(
    b: Any,
    accumulators: Int,
    running_max: Int,
    running_sum: Int,
    to_accumulators: Int,
    to_max: Int,
    to_sum: Int,
    parts: Int,
) -> None:
    """Merges a lane's state over some positions into its state over other positions, at the `to_` addresses.

    Both accumulators, [16 * parts], are rescaled to the larger maximum. A state without positions (its sum is 0)
    changes nothing.
    """
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
