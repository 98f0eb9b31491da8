"""The online softmax (`online_softmax`) of 4 or of 16 lanes at once.

The update of `update_bf16` writes probabilities for products in bfloat16, that of `update_int8` for products in
integers. Both add up a lane's probabilities in the order that `online_softmax` describes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.attention.kv_layout import CHUNK_POSITIONS, KV_BLOCK, NARROW_LANES, shuffled
from plait.kernels.cpu.attention.lane_vectors import MASKED_SCORE, Lanes, LaneVectors, ProbsWriter
from plait.kernels.cpu.attention.online_softmax import rescale, rounded_bits, update_max
from plait.kernels.cpu.attention.products import int8_vnni_kernel
from plait.kernels.cpu.compiler.intrinsics import Float32, Int, intrinsic, intrinsic_if


@intrinsic
def update_bf16(
    b: Any,
    lanes: Lanes,
    scores: Int,
    chunks: Int,
    scale: Float32,
    running_max: Int,
    running_sum: Int,
    accumulators: Int,
    parts: Int,
    count: Int,
    out: Int,
) -> None:
    """Updates `count` lanes: writes the probabilities of scores [32 * chunks, lanes] to `out`, bfloat16 [lanes, 64].

    `lanes` is 4 or 16; `running_max` and `running_sum` [lanes], `accumulators` [lanes, 16 * parts]. The lanes from
    `count` on are computed too, but their accumulators are not rescaled. The memory of the scores is overwritten.
    """
    arguments = chunks, scale, running_max, running_sum, accumulators, parts, count
    vectors = LaneVectors(b, lanes)
    writer = _bf16_writer_x4(b, out) if vectors.lanes == NARROW_LANES else _bf16_writer_x16(b, scores, out)
    _update(vectors, scores, arguments, writer)


@intrinsic_if(int8_vnni_kernel.HAS_VNNI)
def update_int8(
    b: Any,
    lanes: Lanes,
    scores: Int,
    chunks: Int,
    scale: Float32,
    running_max: Int,
    running_sum: Int,
    accumulators: Int,
    parts: Int,
    count: Int,
    value_scales: Int,
    largest: Int,
    out: Int,
    factors: Int,
) -> None:
    """Updates lanes as `update_bf16` does, but writes integers for `int8_vnni_kernel.accumulate_pv`.

    A probability times its position's scale, of `value_scales` [64], is rounded to 16 bits; `largest` [lanes] are the
    largest scales of the positions that each lane sees. `factors` [lanes] receives what its integers stand for.
    """
    arguments = chunks, scale, running_max, running_sum, accumulators, parts, count
    vectors = LaneVectors(b, lanes)
    writer = int8_vnni_kernel.probs_writer(vectors, value_scales, out)
    units = _update(vectors, scores, arguments, writer, vectors.load(largest))
    vectors.store(units, factors)


def _update(
    vectors: LaneVectors, scores: Any, arguments: Sequence[Any], writer: ProbsWriter, largest_scales: Any = None
) -> Any:
    """Generates an update; `arguments`: those of `update_bf16` from `chunks` to `count`.

    With `largest_scales` [lanes] the probabilities that are written are divided by `int8_vnni_kernel.unit_of` the
    largest product of a probability and a scale. Returns these units.
    """
    b, (chunks, scale, running_max, running_sum, accumulators, parts, count) = vectors.b, arguments
    scales = v.splat(b, scale)
    top = vectors.reduce(_largest(vectors, scores, chunks), lambda x, y: v.maximum(b, x, y))
    new_max, factors, moves = update_max(b, vectors.load(running_max), top, scales)
    vectors.store(new_max, running_max)
    _rescale_moved(b, moves, count, factors, accumulators, parts)
    negative_max = b.fsub(v.constant(v.F32X16, 0.0), new_max)
    units = shift = None
    if largest_scales is not None:
        largest_prob = v.exp2(b, v.fma(b, top, scales, negative_max))
        units, shift = int8_vnni_kernel.unit_of(b, b.fmul(largest_prob, largest_scales))
    loop = v.Loop(b, chunks, [b.fmul(vectors.load(running_sum), factors)])
    chunk = b.add(scores, b.mul(loop.i, v.I64(4 * CHUNK_POSITIONS * vectors.lanes)))

    def prob(i: int) -> Any:
        return v.exp2(b, v.fma(b, v.load(b, chunk, v.F32X16, 64 * i), scales, negative_max), shift)

    sums = vectors.reduce(_write_and_sum(b, CHUNK_POSITIONS // vectors.positions, prob, writer, loop.i), b.fadd)
    writer.end(loop.i)
    before = loop.carried[0]
    (sums,) = loop.end([b.fadd(before, sums) if units is None else v.fma(b, sums, units, before)])
    vectors.store(sums, running_sum)
    return units


def _largest(vectors: LaneVectors, scores: Any, chunks: Any) -> Any:
    """Returns the largest scores of each lane and position of a vector."""
    b, partial = vectors.b, 4 if vectors.lanes > NARROW_LANES else 1
    loop = v.Loop(b, chunks, [v.constant(v.F32X16, MASKED_SCORE)] * partial)
    chunk = b.add(scores, b.mul(loop.i, v.I64(4 * CHUNK_POSITIONS * vectors.lanes)))
    maxima = list(loop.carried)
    for i in range(CHUNK_POSITIONS // vectors.positions):
        maxima[i % partial] = v.maximum(b, v.load(b, chunk, v.F32X16, 64 * i), maxima[i % partial])
    maxima = loop.end(maxima)
    while len(maxima) > 1:
        maxima = [v.maximum(b, x, y) for x, y in zip(maxima[::2], maxima[1::2], strict=True)]
    return maxima[0]


def _write_and_sum(b: Any, count: int, prob: Callable[[int], Any], writer: ProbsWriter, chunk: Any) -> Any:
    """Computes and writes `count` vectors of probabilities; returns their sum, as a tree: i with i + count / 2 first.

    A group is computed when the tree needs it, so that few vectors are in registers.
    """

    def tree(first: int, step: int) -> list[Any]:
        if step == count // writer.group:
            probs = [prob(writer.group * first + i) for i in range(writer.group)]
            writer.write(chunk, writer.group * first, probs)
            return probs
        both = tree(first, 2 * step), tree(first + step, 2 * step)
        return [b.fadd(x, y) for x, y in zip(*both, strict=True)]

    sums = tree(0, 1)
    while len(sums) > 1:
        sums = [b.fadd(x, y) for x, y in zip(sums[: len(sums) // 2], sums[len(sums) // 2 :], strict=True)]
    return sums[0]


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
            rescale(b, b.add(accumulators, b.mul(lanes.i, b.shl(parts, v.I64(6)))), factor, parts)
        lanes.end()


def _bf16_writer_x16(b: Any, scores: Any, out: Any) -> ProbsWriter:
    """Writes pairs of positions over their scores, then transposes a chunk's."""

    def chunk_of(chunk: Any) -> Any:
        return b.add(scores, b.shl(chunk, v.I64(11)))

    def write(chunk: Any, first: int, probs: list[Any]) -> None:
        low, high = (rounded_bits(b, prob) for prob in probs)
        upper = b.and_(high, v.constant(v.I32X16, 0xFFFF0000))
        v.store(b, b.or_(b.lshr(low, v.constant(v.I32X16, 16)), upper), chunk_of(chunk), 64 * first)

    def end(chunk: Any) -> None:
        rows = [v.load(b, chunk_of(chunk), v.I32X16, 128 * i) for i in range(v.LANES)]
        for lane, pairs in enumerate(v.transpose_16x16(b, rows)):
            v.store(b, pairs, b.add(out, b.shl(chunk, v.I64(6))), 2 * KV_BLOCK * lane)

    return ProbsWriter(2, write, end)


def _bf16_writer_x4(b: Any, out: Any) -> ProbsWriter:
    def write(chunk: Any, first: int, probs: list[Any]) -> None:
        target = b.add(out, b.shl(chunk, v.I64(6)))
        for lane, positions in enumerate(_transpose_x4(b, [rounded_bits(b, prob) for prob in probs])):
            v.store(b, positions, target, 2 * KV_BLOCK * lane)

    return ProbsWriter(CHUNK_POSITIONS // NARROW_LANES, write)


def _transpose_x4(b: Any, probs: list[Any]) -> list[Any]:
    """Transposes rounded probabilities: 8 vectors [4 positions, 4 lanes] to 4 vectors of bfloat16 [32 positions]."""
    words = v.vector(v.I16, 2 * v.LANES)
    pick = [2 * (NARROW_LANES * q + lane) + 1 for lane in range(NARROW_LANES) for q in range(8)]
    eights = [
        b.bitcast(shuffled(b, b.bitcast(x, words), b.bitcast(y, words), pick), v.I32X16)
        for x, y in zip(probs[::2], probs[1::2], strict=True)
    ]  # [4 lanes, 8 positions]: each quarter of a vector is a lane
    first, last = (_quarters((q, q + 4, q + 1, q + 5)) for q in (0, 2))
    mixed = [[shuffled(b, x, y, mask) for x, y in (eights[:2], eights[2:])] for mask in (first, last)]
    ends = _quarters((0, 1, 4, 5)), _quarters((2, 3, 6, 7))
    return [shuffled(b, x, y, mask) for x, y in mixed for mask in ends]


def _quarters(which: tuple[int, ...]) -> list[int]:
    """Returns the shuffle mask that selects quarters of two vectors."""
    return [4 * quarter + i for quarter in which for i in range(4)]
