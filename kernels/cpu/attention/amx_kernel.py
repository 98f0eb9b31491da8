"""Attention's innermost part on AMX: 16 lanes, each a query head of a token, against a block of 64 cached positions.

    keys       as the cache has them, a position's channels side by side     bfloat16 [64, D]
    queries    pairs of channels, all lanes of a tile side by side            bfloat16 [D / 2, lanes, 2]
    scores     a position's lanes side by side, as the softmax wants them     float32 [64, 16]
    weights    a lane's positions side by side                                bfloat16 [16, 64]
    values     pairs of positions, a pair's channels side by side             bfloat16 [32, D, 2]
    totals     a lane's channels side by side                                 float32 [16, D]

Up to 4 lanes, a token that decodes alone, go through narrower registers: scores [64, 4], weights [4, 64].
So keys need no turning (Q K^T is computed as K Q^T). Positions come in chunks of 32. A lane's bits do not depend on its
neighbours: the instruction adds up each number of the result by itself, in one order (`cpu_lanes` writes it out).

Knows: addresses. Must not know: pages, rows, threads.
"""

from __future__ import annotations

import struct
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.amx import HAS_AMX
from plait.kernels.cpu.attention.online_softmax import CHUNK_POSITIONS, KV_BLOCK, NARROW_LANES

LANES = 16
VOID = ir.VoidType()
# Matrix registers: 16 rows of 64 bytes; of 4 numbers a row, for the scores of few lanes; of 4 rows, for their totals.
FIRST, SECOND, LEFT, RIGHT, X4_SCORES, X4_QUERIES, X4_ACCUMULATORS, X4_PROBS = (v.I8(i) for i in range(8))
TILE_CONFIG_ROW_BYTES, TILE_CONFIG_ROWS = (
    (64, 64, 64, 64, 4 * NARROW_LANES, 4 * NARROW_LANES, 64, 64),
    (16, 16, 16, 16, 16, 16, NARROW_LANES, NARROW_LANES),
)


def tile_config() -> bytes:
    """What LDTILECFG reads: palette 1, then bytes of a row of each register, then rows."""
    return struct.pack("<2B14x16H16B", 1, 0, *TILE_CONFIG_ROW_BYTES, *[0] * 8, *TILE_CONFIG_ROWS, *[0] * 8)


def _read(b: Any, register: Any, address: Any, stride: Any) -> None:
    v.call_intrinsic(b, "llvm.x86.tileloadd64", VOID, [register, v.pointer_at(b, address, v.I8), stride])


def _write(b: Any, register: Any, address: Any, stride: Any) -> None:
    v.call_intrinsic(b, "llvm.x86.tilestored64", VOID, [register, v.pointer_at(b, address, v.I8), stride])


def _add(b: Any, address: Any, offset: int) -> Any:
    return b.add(address, v.I64(offset))


@intrinsic  # type: ignore[untyped-decorator]
def pack_queries(context: Any, rows: Any, head_dim: Any, out: Any, out_stride: Any) -> Any:
    """Bfloat16 [16, size] to pairs of channels [size / 2, 16, 2], `out_stride` bytes from one pair to the next."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        rows, head_dim, out, out_stride = values
        stride = b.shl(head_dim, v.I64(1))
        loop = v.Loop(b, b.lshr(head_dim, v.I64(5)))
        here, to = b.add(rows, b.shl(loop.i, v.I64(6))), b.add(out, b.mul(loop.i, b.shl(out_stride, v.I64(4))))
        lanes = [v.load(b, b.add(here, b.mul(stride, v.I64(i))), v.I32X16) for i in range(LANES)]
        for i, each in enumerate(v.transpose_16x16(b, lanes)):
            v.store(b, each, b.add(to, b.mul(out_stride, v.I64(i))))
        loop.end()
        return context.get_dummy_value()

    return types.void(*([types.int64] * 4)), generate


_LOW, _HIGH = ([8 * q + i for q in range(4) for i in half] for half in (range(4), range(4, 8)))  # of 32 channels
_ZIPS = [ir.Constant(v.vector(v.I32, 2 * v.LANES), [x for i in half for x in (i, i + 32)]) for half in (_LOW, _HIGH)]
_SORTED = [(_LOW + _HIGH).index(channel) for channel in range(32)]


@intrinsic  # type: ignore[untyped-decorator]
def pack_values(context: Any, values: Any, stride: Any, head_dim: Any, pairs: Any, out: Any) -> Any:
    """Bfloat16 rows [2 * pairs, size], `stride` bytes apart, to pairs of them [pairs, size, 2].

    Of 32 channels those in the lower halves of their eights come first: that is how a vector is zipped at once.
    """

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        rows, stride, head_dim, pairs, out = arguments
        loop = v.Loop(b, pairs)
        here, to = (
            b.add(rows, b.mul(loop.i, b.shl(stride, v.I64(1)))),
            b.add(out, b.mul(loop.i, b.shl(head_dim, v.I64(2)))),
        )
        parts = v.Loop(b, b.lshr(head_dim, v.I64(5)))
        place = b.add(here, b.shl(parts.i, v.I64(6)))
        pair = [v.load(b, each, v.vector(v.I16, 2 * v.LANES)) for each in (place, b.add(place, stride))]
        for i, each in enumerate(_ZIPS):
            v.store(b, b.shuffle_vector(*pair, each), b.add(to, b.shl(parts.i, v.I64(7))), 64 * i)
        parts.end()
        loop.end()
        return context.get_dummy_value()

    return types.void(*([types.int64] * 5)), generate


@intrinsic  # type: ignore[untyped-decorator]
def unpermute_channels(context: Any, total: Any, head_dim: Any) -> Any:
    """Float32 [size] in the order of `pack_values`, in place, to their own."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        total, head_dim = values
        loop = v.Loop(b, b.lshr(head_dim, v.I64(5)))
        here = b.add(total, b.shl(loop.i, v.I64(7)))
        pair = [v.load(b, here, v.F32X16, 64 * i) for i in range(2)]
        for i in range(2):
            v.store(b, b.shuffle_vector(*pair, ir.Constant(v.I32X16, _SORTED[16 * i : 16 * i + 16])), here, 64 * i)
        loop.end()
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def compute_qk(
    context: Any, queries: Any, query_stride: Any, head_dim: Any, keys: Any, stride: Any, chunks: Any, out: Any
) -> Any:
    """Products of 16 queries with 32 * chunks keys, which lie `stride` bytes apart; `query_stride` as in `pack_queries`."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        if HAS_AMX:
            _compute_qk(b, *values)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 7)), generate


def _compute_qk(
    b: Any, queries: Any, query_stride: Any, head_dim: Any, keys: Any, stride: Any, chunks: Any, out: Any
) -> None:
    positions = v.Loop(b, chunks)
    for each in (FIRST, SECOND):
        v.call_intrinsic(b, "llvm.x86.tilezero", VOID, [each])
    here = b.add(keys, b.mul(positions.i, b.mul(stride, v.I64(CHUNK_POSITIONS))))
    channels = v.Loop(b, b.lshr(head_dim, v.I64(5)))
    offset = b.shl(channels.i, v.I64(6))
    _read(b, RIGHT, b.add(queries, b.mul(channels.i, b.shl(query_stride, v.I64(4)))), query_stride)
    for sums, first in ((FIRST, 0), (SECOND, LANES)):
        _read(b, LEFT, b.add(b.add(here, offset), b.mul(stride, v.I64(first))), stride)
        v.call_intrinsic(b, "llvm.x86.tdpbf16ps", VOID, [sums, LEFT, RIGHT])
    channels.end()
    to = b.add(out, b.shl(positions.i, v.I64(11)))
    for each, more in ((FIRST, 0), (SECOND, 64 * LANES)):
        _write(b, each, _add(b, to, more), v.I64(64))
    positions.end()


@intrinsic  # type: ignore[untyped-decorator]
def compute_qk_x4(
    context: Any, queries: Any, query_stride: Any, head_dim: Any, keys: Any, stride: Any, chunks: Any, out: Any
) -> Any:
    """`compute_qk` for 4 queries, to [64, 4]."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        if HAS_AMX:
            _compute_qk_x4(b, *values)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 7)), generate


def _compute_qk_x4(
    b: Any, queries: Any, query_stride: Any, head_dim: Any, keys: Any, stride: Any, chunks: Any, out: Any
) -> None:
    positions = v.Loop(b, b.shl(chunks, v.I64(1)))
    v.call_intrinsic(b, "llvm.x86.tilezero", VOID, [X4_SCORES])
    here = b.add(keys, b.mul(positions.i, b.mul(stride, v.I64(LANES))))
    channels = v.Loop(b, b.lshr(head_dim, v.I64(5)))
    _read(b, X4_QUERIES, b.add(queries, b.mul(channels.i, b.shl(query_stride, v.I64(4)))), query_stride)
    _read(b, LEFT, b.add(here, b.shl(channels.i, v.I64(6))), stride)
    v.call_intrinsic(b, "llvm.x86.tdpbf16ps", VOID, [X4_SCORES, LEFT, X4_QUERIES])
    channels.end()
    _write(b, X4_SCORES, b.add(out, b.shl(positions.i, v.I64(8))), v.I64(4 * NARROW_LANES))
    positions.end()


@intrinsic  # type: ignore[untyped-decorator]
def accumulate_pv(context: Any, weights: Any, values_: Any, head_dim: Any, chunks: Any, totals: Any) -> Any:
    """Adds 32 * chunks values by 16 lanes' weights to their totals."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        if HAS_AMX:
            _accumulate_pv(b, *arguments)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 5)), generate


def _accumulate_pv(b: Any, weights: Any, values: Any, head_dim: Any, chunks: Any, totals: Any) -> None:
    stride = b.shl(head_dim, v.I64(2))
    channels = v.Loop(b, b.lshr(head_dim, v.I64(5)))
    offset = b.shl(channels.i, v.I64(7))
    here = b.add(totals, offset)
    for each, more in ((FIRST, 0), (SECOND, 64)):
        _read(b, each, _add(b, here, more), stride)
    positions = v.Loop(b, chunks)
    _read(b, LEFT, b.add(weights, b.shl(positions.i, v.I64(6))), v.I64(2 * KV_BLOCK))
    right = b.add(b.add(values, offset), b.mul(positions.i, b.mul(stride, v.I64(LANES))))
    for sums, more in ((FIRST, 0), (SECOND, 64)):
        _read(b, RIGHT, _add(b, right, more), stride)
        v.call_intrinsic(b, "llvm.x86.tdpbf16ps", VOID, [sums, LEFT, RIGHT])
    positions.end()
    for each, more in ((FIRST, 0), (SECOND, 64)):
        _write(b, each, _add(b, here, more), stride)
    channels.end()


@intrinsic  # type: ignore[untyped-decorator]
def accumulate_pv_x4(context: Any, weights: Any, values_: Any, head_dim: Any, chunks: Any, totals: Any) -> Any:
    """`accumulate_pv` for 4 lanes."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        if HAS_AMX:
            _accumulate_pv_x4(b, *arguments)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 5)), generate


def _accumulate_pv_x4(b: Any, weights: Any, values: Any, head_dim: Any, chunks: Any, totals: Any) -> None:
    stride = b.shl(head_dim, v.I64(2))
    channels = v.Loop(b, b.lshr(head_dim, v.I64(4)))
    offset = b.shl(channels.i, v.I64(6))
    here = b.add(totals, offset)
    _read(b, X4_ACCUMULATORS, here, stride)
    positions = v.Loop(b, chunks)
    _read(b, X4_PROBS, b.add(weights, b.shl(positions.i, v.I64(6))), v.I64(2 * KV_BLOCK))
    _read(b, RIGHT, b.add(b.add(values, offset), b.mul(positions.i, b.mul(stride, v.I64(LANES)))), stride)
    v.call_intrinsic(b, "llvm.x86.tdpbf16ps", VOID, [X4_ACCUMULATORS, X4_PROBS, RIGHT])
    positions.end()
    _write(b, X4_ACCUMULATORS, here, stride)
    channels.end()


@intrinsic  # type: ignore[untyped-decorator]
def are_consecutive(context: Any, pages: Any, chunks: Any) -> Any:
    """Whether 32 * chunks int32 at an address count upwards one by one."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        pages, chunks = values
        first = v.broadcast_load(b, pages, v.I32)
        loop = v.Loop(b, chunks, [v.constant(v.I32X16, 0)])
        different = loop.carried[0]
        for i in range(2):
            index = ir.Constant(v.I32X16, [16 * i + lane for lane in range(v.LANES)])
            expected = b.add(b.add(first, index), v.splat(b, b.trunc(b.shl(loop.i, v.I64(5)), v.I32)))
            found = v.load(b, b.add(pages, b.shl(loop.i, v.I64(7))), v.I32X16, 64 * i)
            different = b.or_(different, b.xor(found, expected))
        (different,) = loop.end([different])
        bits = b.bitcast(b.icmp_unsigned("!=", different, v.constant(v.I32X16, 0)), ir.IntType(16))
        return b.icmp_unsigned("==", bits, ir.Constant(bits.type, 0))

    return types.boolean(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def copy(context: Any, address: Any, out: Any, count: Any) -> Any:
    """64 * count bytes."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        address, out, count = values
        loop = v.Loop(b, count)
        offset = b.shl(loop.i, v.I64(6))
        v.store(b, v.load(b, b.add(address, offset), v.I32X16), b.add(out, offset))
        loop.end()
        return context.get_dummy_value()

    return types.void(*([types.int64] * 3)), generate
