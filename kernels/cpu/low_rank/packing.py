"""Packs the updates of an adapter for `low_rank/row_updates.py`, in one call that leaves Python's global lock.

Each row of `down` and each column of `up` is divided by its largest magnitude. Then `down` is rounded to the layout
Q8_0, as `packed_weights` rounds and packs it, and `up` to float16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.compiler.intrinsics import Float32, Int, carray, intrinsic
from plait.kernels.cpu.compiler.library import KernelLibrary
from plait.kernels.cpu.gemm.layouts import DOWN_LAYOUT, DOWN_OUTPUTS, HALF_TILE, LINE, QUANT_BLOCK, TILE_OUTPUTS
from plait.kernels.cpu.kernel_args import as_pointer
from plait.kernels.cpu.kernel_types import FIRST_TERM, TERMS_OF_TILE, TILE_COLUMNS, UP_AT
from plait.kernels.cpu.vector_ops import largest_magnitude

UNIT_BYTES, UP_BYTES = DOWN_LAYOUT.unit_bytes, 2 * TILE_OUTPUTS  # of a block of `down`, and of a term of a tile of `up`


class Part(NamedTuple):
    """An update, or biases, of a product: addresses and sizes of what is packed, and where it is written."""

    up: int  # float32 [N, r]
    outputs: int  # N
    ranks: int  # r
    output: int  # the product's first output that changes
    term: int  # its first term
    tiles: int  # the table of the product's tiles of outputs
    factors: int = 0  # float32 of the product's terms; 0: `up` is not divided
    down: int = 0  # float32 [r, K]
    inputs: int = 0  # K; 0: there is no `down`
    packed: int = 0  # the first tile of the product's `down`


NUM_COLUMNS = len(Part._fields)


def pack(parts: Sequence[Part]) -> None:
    """Packs parts."""
    if parts:
        table = np.array(parts, np.int64)
        scratch = np.empty(max(part.ranks * (part.outputs + 3 * TILE_OUTPUTS) for part in parts), np.float32)
        function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(LIBRARY.load()["pack_parts"])
        function(table.ctypes.data, len(table), scratch.ctypes.data)


def pack_parts(address: int, count: int, scratch: int) -> None:
    """Packs `count` parts. scratch: room for `up` of any part, with 96 outputs more."""
    rows = carray(as_pointer(address), (count, NUM_COLUMNS), np.int64)
    for i in range(count):
        row = rows[i]
        part = Part(row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7], row[8], row[9])
        _pack_up(part, scratch)
        if part.inputs:
            _pack_down(part)


def _pack_up(part: Part, scratch: int) -> None:
    """Writes `up` to the tiles of its outputs, and the divisors of its columns to the factors."""
    first, first_tile = part.output % TILE_OUTPUTS, part.output // TILE_OUTPUTS
    end = first + part.outputs
    num_tiles = (end + TILE_OUTPUTS - 1) // TILE_OUTPUTS
    stride = num_tiles * TILE_OUTPUTS + HALF_TILE  # no power of 2: a cache would hold few rows at once
    up = carray(as_pointer(part.up), (part.outputs, part.ranks), np.float32)
    columns = carray(as_pointer(scratch), (part.ranks, stride), np.float32)
    for i in range(num_tiles * TILE_OUTPUTS):
        is_inside = i >= first and i < end
        for rank in range(part.ranks):
            columns[rank, i] = up[i - first, rank] if is_inside else np.float32(0.0)
    tiles = carray(as_pointer(part.tiles), (first_tile + num_tiles, TILE_COLUMNS), np.int64)
    for rank in range(part.ranks):
        column, divisor = scratch + 4 * stride * rank, np.float32(1.0)
        if part.factors:
            divisor = _divisor(column, num_tiles * TILE_OUTPUTS)
            _factors(part)[rank] = divisor
        for i in range(num_tiles):
            tile = tiles[first_tile + i]
            place = part.term + rank - tile[FIRST_TERM]
            if place < tile[TERMS_OF_TILE]:
                _round_to_float16(column + 4 * TILE_OUTPUTS * i, divisor, tile[UP_AT] + UP_BYTES * place)


def _pack_down(part: Part) -> None:
    """Writes the rows of `down` as outputs of a packed weight, and multiplies the factors by their divisors."""
    blocks, factors = part.inputs // QUANT_BLOCK, _factors(part)
    for rank in range(part.ranks):
        term, row = part.term + rank, part.down + 4 * part.inputs * rank
        divisor = _divisor(row, part.inputs)
        factors[rank] *= divisor
        tile = part.packed + term // DOWN_OUTPUTS * blocks * UNIT_BYTES
        for block in range(blocks):
            unit = tile + UNIT_BYTES * block
            _round_block(row + 4 * QUANT_BLOCK * block, divisor, unit, term % DOWN_OUTPUTS)


def _factors(part: Part) -> Any:
    return carray(as_pointer(part.factors + 4 * part.term), (part.ranks,), np.float32)


def _divisor(x: int, count: int) -> Any:
    """Returns the largest magnitude of `count` float32, a multiple of 16, or 1 if all are 0."""
    largest = largest_magnitude(x, count // 16)
    return largest if largest else np.float32(1.0)


@intrinsic
def _round_block(b: Any, x: Int, divisor: Float32, unit: Int, lane: Int) -> None:
    """Writes 32 float32, divided by `divisor`, as an output of a unit."""
    divisors = v.splat(b, divisor)
    parts = [b.fdiv(v.load(b, x, v.F32X16, 64 * i), divisors) for i in range(2)]
    bits = [b.and_(b.bitcast(part, v.I32X16), v.constant(v.I32X16, 0x7FFFFFFF)) for part in parts]
    largest = b.bitcast(v.reduce(b, v.larger_bits(b, *bits), partial(v.larger_bits, b)), v.F32)
    scale = b.fptrunc(b.fdiv(largest, v.F32(127.0)), v.F16)
    v.store(b, scale, b.add(unit, b.mul(lane, v.I64(2))))
    steps = v.splat(b, b.fpext(scale, v.F32))  # where it is 0, the quants do not matter
    lines = b.add(unit, b.mul(lane, v.I64(4)))
    for i, part in enumerate(parts):
        rounded = v.call_intrinsic(b, "llvm.nearbyint.v16f32", v.F32X16, [b.fdiv(part, steps)])
        clipped = v.minimum(b, v.maximum(b, rounded, v.constant(v.F32X16, -128.0)), v.constant(v.F32X16, 127.0))
        integers = b.add(b.fptosi(clipped, v.I32X16), v.constant(v.I32X16, DOWN_LAYOUT.offset))
        words = b.bitcast(b.trunc(integers, v.vector(v.I8)), v.vector(v.I32, 4))
        for j in range(4):
            v.store(b, b.extract_element(words, v.I32(j)), lines, DOWN_LAYOUT.blocks_offset + LINE * (4 * i + j))


@intrinsic
def _round_to_float16(b: Any, x: Int, divisor: Float32, out: Int) -> None:
    """Writes 32 float32, divided by `divisor`, as float16."""
    for i in range(2):
        quotient = b.fdiv(v.load(b, x, v.F32X16, 64 * i), v.splat(b, divisor))
        v.store(b, b.fptrunc(quotient, v.vector(v.F16)), out, 32 * i)


LIBRARY = KernelLibrary("low-rank", pack_parts)
