"""Attention's innermost part on AVX-512 BF16, for CPUs without AMX: the arrays of `cpu_flash`, by VDPBF16PS.

A vector holds 16 numbers of 32 bits, each a pair of bfloat16 on its way in and a float32 sum on its way out. For 16
lanes a sum is a lane's; a pair of a key's channels meets all of them. For up to 4 lanes a sum is a quarter of a
lane's score, so that 4 pairs of a key's channels meet 4 lanes at once. Both give a lane the same bits: the sums of
every fourth pair in order, then the first two and the last two, then both.

Knows: addresses. Must not know: pages, rows, threads.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.attention.online_softmax import CHUNK_POSITIONS, KV_BLOCK, NARROW_LANES

LANES = 16
PARTIAL_SUMS = 4  # sums of a score
UNROLL = 8  # positions, or lanes, whose sums are in registers at the same time


def _zeros(count: int) -> list[Any]:
    return [v.constant(v.F32X16, 0.0)] * count


def _pair(b: Any, address: Any, offset: int = 0) -> Any:
    """A pair of bfloat16 at an address, 16 times."""
    return v.broadcast_load(b, address, v.I32, offset)


def _permuted(b: Any, x: Any, y: Any, mask: list[int]) -> Any:
    return b.shuffle_vector(x, y, ir.Constant(v.vector(v.I32, len(mask)), mask))


def _within(pattern: tuple[int, ...]) -> list[int]:
    """The same choice in each quarter of two vectors: 0 to 3 of the first, 4 to 7 of the second."""
    return [
        4 * quarter + (i if i < NARROW_LANES else v.LANES + i - NARROW_LANES) for quarter in range(4) for i in pattern
    ]


_OUTER, _INNER = _within((0, 2, 4, 6)), _within((1, 3, 5, 7))
_TURNED = [4 * (i % 4) + i // 4 for i in range(v.LANES)]  # a quarter's numbers, one to each quarter


@intrinsic  # type: ignore[untyped-decorator]
def compute_qk(
    context: Any, queries: Any, query_stride: Any, head_dim: Any, keys: Any, stride: Any, chunks: Any, out: Any
) -> Any:
    """As `cpu_flash.compute_qk`."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        if v.HAS_BF16_DOT:
            _compute_qk(b, *values)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 7)), generate


def _compute_qk(
    b: Any, queries: Any, query_stride: Any, head_dim: Any, keys: Any, stride: Any, chunks: Any, out: Any
) -> None:
    fours = v.Loop(b, b.shl(chunks, v.I64(3)))
    here = b.add(keys, b.mul(fours.i, b.shl(stride, v.I64(2))))
    rows = [b.add(here, b.mul(stride, v.I64(i))) for i in range(4)]
    pairs = v.Loop(b, b.lshr(head_dim, v.I64(3)), _zeros(4 * PARTIAL_SUMS))
    offset, query = b.shl(pairs.i, v.I64(4)), b.add(queries, b.mul(pairs.i, b.shl(query_stride, v.I64(2))))
    found = list(pairs.carried)
    for part in range(PARTIAL_SUMS):
        lanes = v.load(b, b.add(query, b.mul(query_stride, v.I64(part))), v.I32X16)
        for i, row in enumerate(rows):
            place = PARTIAL_SUMS * i + part
            found[place] = v.dot_bf16(b, found[place], lanes, _pair(b, b.add(row, offset), 4 * part))
    found = pairs.end(found)
    to = b.add(out, b.shl(fours.i, v.I64(8)))
    for i in range(4):
        first, second, third, last = found[PARTIAL_SUMS * i : PARTIAL_SUMS * (i + 1)]
        v.store(b, b.fadd(b.fadd(first, second), b.fadd(third, last)), to, 64 * i)
    fours.end()


@intrinsic  # type: ignore[untyped-decorator]
def pack_queries_x4(context: Any, queries: Any, query_stride: Any, head_dim: Any, out: Any) -> Any:
    """4 lanes of queries [size / 2, lanes, 2] as `compute_qk_x4` reads them: [size / 8, lane, 4 pairs]."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        queries, query_stride, head_dim, out = values
        loop = v.Loop(b, b.lshr(head_dim, v.I64(3)))
        here = b.add(queries, b.mul(loop.i, b.shl(query_stride, v.I64(2))))
        parts = [
            v.load(b, b.add(here, b.mul(query_stride, v.I64(i))), v.vector(v.I32, NARROW_LANES))
            for i in range(PARTIAL_SUMS)
        ]
        halves = [_permuted(b, parts[i], parts[i + 1], list(range(8))) for i in (0, 2)]
        both = _permuted(b, halves[0], halves[1], list(range(16)))
        v.store(b, _permuted(b, both, both, _TURNED), b.add(out, b.shl(loop.i, v.I64(6))))
        loop.end()
        return context.get_dummy_value()

    return types.void(*([types.int64] * 4)), generate


@intrinsic  # type: ignore[untyped-decorator]
def compute_qk_x4(context: Any, queries: Any, head_dim: Any, keys: Any, stride: Any, chunks: Any, out: Any) -> Any:
    """As `cpu_flash.compute_qk_x4`, for queries as `pack_queries_x4` leaves them."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        if v.HAS_BF16_DOT:
            _compute_qk_x4(b, *values)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 6)), generate


def _compute_qk_x4(b: Any, queries: Any, head_dim: Any, keys: Any, stride: Any, chunks: Any, out: Any) -> None:
    loop = v.Loop(b, b.shl(chunks, v.I64(2)))
    here = b.add(keys, b.mul(loop.i, b.mul(stride, v.I64(UNROLL))))
    rows = [b.add(here, b.mul(stride, v.I64(i))) for i in range(UNROLL)]
    pairs = v.Loop(b, b.lshr(head_dim, v.I64(3)), _zeros(UNROLL))
    lanes, offset = v.load(b, b.add(queries, b.shl(pairs.i, v.I64(6))), v.I32X16), b.shl(pairs.i, v.I64(4))
    four, again = v.vector(v.I32, PARTIAL_SUMS), [i % PARTIAL_SUMS for i in range(v.LANES)]
    keys_of = [v.load(b, b.add(row, offset), four) for row in rows]
    sums = [
        v.dot_bf16(b, sum_, lanes, _permuted(b, key, key, again))
        for sum_, key in zip(pairs.carried, keys_of, strict=True)
    ]
    sums = pairs.end(sums)
    to = b.add(out, b.shl(loop.i, v.I64(7)))
    for i in range(2):
        v.store(b, _four_positions(b, sums[4 * i : 4 * i + 4]), to, 64 * i)
    loop.end()


def _four_positions(b: Any, sums: list[Any]) -> Any:
    """Of 4 positions' sums [lane, part]: the scores [position, lane]."""
    while len(sums) > 1:
        pairs = zip(sums[::2], sums[1::2], strict=True)
        sums = [b.fadd(_permuted(b, x, y, _OUTER), _permuted(b, x, y, _INNER)) for x, y in pairs]
    return _permuted(b, sums[0], sums[0], _TURNED)


@intrinsic  # type: ignore[untyped-decorator]
def accumulate_pv(context: Any, weights: Any, values_: Any, head_dim: Any, chunks: Any, totals: Any) -> Any:
    """As `cpu_flash.accumulate_pv`."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        if v.HAS_BF16_DOT:
            weights, values, head_dim, chunks, totals = arguments
            for first in range(0, LANES, UNROLL):
                lanes_at = b.add(weights, v.I64(2 * KV_BLOCK * first))
                _accumulate_pv(
                    b, UNROLL, lanes_at, values, head_dim, chunks, b.add(totals, b.mul(head_dim, v.I64(4 * first)))
                )
        return context.get_dummy_value()

    return types.void(*([types.int64] * 5)), generate


@intrinsic  # type: ignore[untyped-decorator]
def accumulate_pv_x4(context: Any, weights: Any, values_: Any, head_dim: Any, chunks: Any, totals: Any) -> Any:
    """As `cpu_flash.accumulate_pv_x4`."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        if v.HAS_BF16_DOT:
            _accumulate_pv(b, NARROW_LANES, *arguments)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 5)), generate


def _accumulate_pv(b: Any, lanes: int, weights: Any, values: Any, head_dim: Any, chunks: Any, totals: Any) -> None:
    """32 channels of so many lanes at a time."""
    stride = b.shl(head_dim, v.I64(2))  # of a lane's totals, and of a pair of positions
    channels = v.Loop(b, b.lshr(head_dim, v.I64(5)))
    offset = b.shl(channels.i, v.I64(7))
    rows = [b.add(b.add(totals, offset), b.mul(stride, v.I64(lane))) for lane in range(lanes)]
    before = [v.load(b, row, v.F32X16, 64 * i) for row in rows for i in range(2)]
    pairs = v.Loop(b, b.mul(chunks, v.I64(CHUNK_POSITIONS // 2)), before)
    here, weight_at = b.add(b.add(values, offset), b.mul(pairs.i, stride)), b.add(weights, b.shl(pairs.i, v.I64(2)))
    both = [v.load(b, here, v.I32X16, 64 * i) for i in range(2)]
    found = []
    for lane in range(lanes):
        weight = _pair(b, weight_at, 2 * KV_BLOCK * lane)
        found += [v.dot_bf16(b, pairs.carried[2 * lane + i], weight, both[i]) for i in range(2)]
    for i, sum_ in enumerate(pairs.end(found)):
        v.store(b, sum_, rows[i // 2], 64 * (i % 2))
    channels.end()
