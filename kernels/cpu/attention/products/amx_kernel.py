"""Attention's products on AMX: 16 lanes against a block of 64 cached positions.

    scores           a position's lanes side by side, as the softmax reads them     float32 [64, 16]
    probabilities    a lane's positions side by side                                bfloat16 [16, 64]
    accumulators     a lane's channels side by side                                 float32 [16, D]

Queries, keys and values are laid out as `kv_layout` says; scores are computed as K Q^T, so that keys need no transpose.
Up to 4 lanes go through narrower registers: scores [64, 4], probabilities [4, 64]. TDPBF16PS adds up each number of the
result separately and in one order (`f32_kernel` spells it out), so a lane's bits do not depend on its neighbours.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from plait.kernels.cpu import amx
from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.attention.kv_layout import CHUNK_POSITIONS, KV_BLOCK, LANES, NARROW_LANES
from plait.kernels.cpu.compiler.intrinsics import Int, intrinsic_if

VOID = ir.VoidType()
# Matrix registers: four of 16 rows of 64 bytes; two with rows of 4 numbers, and two of 4 rows, for the narrow form.
FIRST, SECOND, LEFT, RIGHT, X4_SCORES, X4_QUERIES, X4_ACCUMULATORS, X4_PROBS = (v.I8(i) for i in range(8))
ROW_BYTES = (64, 64, 64, 64, 4 * NARROW_LANES, 4 * NARROW_LANES, 64, 64)
ROWS = (16, 16, 16, 16, 16, 16, NARROW_LANES, NARROW_LANES)


def tile_config() -> bytes:
    """Returns attention's register shapes, as LDTILECFG reads them."""
    return amx.pack_tile_config(ROW_BYTES, ROWS)


def _load_tile(b: Any, register: Any, address: Any, stride: Any) -> None:
    v.call_intrinsic(b, "llvm.x86.tileloadd64", VOID, [register, v.pointer_at(b, address, v.I8), stride])


def _store_tile(b: Any, register: Any, address: Any, stride: Any) -> None:
    v.call_intrinsic(b, "llvm.x86.tilestored64", VOID, [register, v.pointer_at(b, address, v.I8), stride])


def _add(b: Any, address: Any, offset: int) -> Any:
    return b.add(address, v.I64(offset))


@intrinsic_if(amx.HAS_AMX)
def compute_qk(
    b: Any, queries: Int, query_stride: Int, head_dim: Int, keys: Int, stride: Int, chunks: Int, out: Int
) -> None:
    """Computes the scores of 16 queries (`pack_queries`) and 32 * chunks keys, `stride` bytes apart."""
    positions = v.Loop(b, chunks)
    for register in (FIRST, SECOND):
        v.call_intrinsic(b, "llvm.x86.tilezero", VOID, [register])
    chunk = b.add(keys, b.mul(positions.i, b.mul(stride, v.I64(CHUNK_POSITIONS))))
    channels = v.Loop(b, b.lshr(head_dim, v.I64(5)))
    offset = b.shl(channels.i, v.I64(6))
    _load_tile(b, RIGHT, b.add(queries, b.mul(channels.i, b.shl(query_stride, v.I64(4)))), query_stride)
    for sums, first in ((FIRST, 0), (SECOND, LANES)):
        _load_tile(b, LEFT, b.add(b.add(chunk, offset), b.mul(stride, v.I64(first))), stride)
        v.call_intrinsic(b, "llvm.x86.tdpbf16ps", VOID, [sums, LEFT, RIGHT])
    channels.end()
    target = b.add(out, b.shl(positions.i, v.I64(11)))
    for register, shift in ((FIRST, 0), (SECOND, 64 * LANES)):
        _store_tile(b, register, _add(b, target, shift), v.I64(64))
    positions.end()


@intrinsic_if(amx.HAS_AMX)
def compute_qk_x4(
    b: Any, queries: Int, query_stride: Int, head_dim: Int, keys: Int, stride: Int, chunks: Int, out: Int
) -> None:
    """Computes the scores of 4 queries, [64, 4], as `compute_qk` does."""
    positions = v.Loop(b, b.shl(chunks, v.I64(1)))
    v.call_intrinsic(b, "llvm.x86.tilezero", VOID, [X4_SCORES])
    rows = b.add(keys, b.mul(positions.i, b.mul(stride, v.I64(LANES))))
    channels = v.Loop(b, b.lshr(head_dim, v.I64(5)))
    _load_tile(b, X4_QUERIES, b.add(queries, b.mul(channels.i, b.shl(query_stride, v.I64(4)))), query_stride)
    _load_tile(b, LEFT, b.add(rows, b.shl(channels.i, v.I64(6))), stride)
    v.call_intrinsic(b, "llvm.x86.tdpbf16ps", VOID, [X4_SCORES, LEFT, X4_QUERIES])
    channels.end()
    _store_tile(b, X4_SCORES, b.add(out, b.shl(positions.i, v.I64(8))), v.I64(4 * NARROW_LANES))
    positions.end()


@intrinsic_if(amx.HAS_AMX)
def accumulate_pv(b: Any, probs: Int, values: Int, head_dim: Int, chunks: Int, accumulators: Int) -> None:
    """Adds 32 * chunks values, weighted by 16 lanes' probabilities, to their accumulators."""
    stride = b.shl(head_dim, v.I64(2))
    channels = v.Loop(b, b.lshr(head_dim, v.I64(5)))
    offset = b.shl(channels.i, v.I64(7))
    target = b.add(accumulators, offset)
    for register, shift in ((FIRST, 0), (SECOND, 64)):
        _load_tile(b, register, _add(b, target, shift), stride)
    positions = v.Loop(b, chunks)
    _load_tile(b, LEFT, b.add(probs, b.shl(positions.i, v.I64(6))), v.I64(2 * KV_BLOCK))
    right = b.add(b.add(values, offset), b.mul(positions.i, b.mul(stride, v.I64(LANES))))
    for sums, shift in ((FIRST, 0), (SECOND, 64)):
        _load_tile(b, RIGHT, _add(b, right, shift), stride)
        v.call_intrinsic(b, "llvm.x86.tdpbf16ps", VOID, [sums, LEFT, RIGHT])
    positions.end()
    for register, shift in ((FIRST, 0), (SECOND, 64)):
        _store_tile(b, register, _add(b, target, shift), stride)
    channels.end()


@intrinsic_if(amx.HAS_AMX)
def accumulate_pv_x4(b: Any, probs: Int, values: Int, head_dim: Int, chunks: Int, accumulators: Int) -> None:
    """Adds the weighted values of 4 lanes, as `accumulate_pv` does."""
    stride = b.shl(head_dim, v.I64(2))
    channels = v.Loop(b, b.lshr(head_dim, v.I64(4)))
    offset = b.shl(channels.i, v.I64(6))
    target = b.add(accumulators, offset)
    _load_tile(b, X4_ACCUMULATORS, target, stride)
    positions = v.Loop(b, chunks)
    _load_tile(b, X4_PROBS, b.add(probs, b.shl(positions.i, v.I64(6))), v.I64(2 * KV_BLOCK))
    _load_tile(b, RIGHT, b.add(b.add(values, offset), b.mul(positions.i, b.mul(stride, v.I64(LANES)))), stride)
    v.call_intrinsic(b, "llvm.x86.tdpbf16ps", VOID, [X4_ACCUMULATORS, X4_PROBS, RIGHT])
    positions.end()
    _store_tile(b, X4_ACCUMULATORS, target, stride)
    channels.end()
