"""Passes of 32 rows through panels: how a product in bfloat16 goes through its weight.

A chunk of up to 18 blocks of a tile's 32 columns is widened to a panel, which stays in the first cache while all rows
pass over it: activations are read past that cache (TILELOADDT1), without which a pass takes a third longer. The first
pass widens as it multiplies. Sums that are not whole after a chunk wait in memory. Of a gated product a panel has 16
columns of the gate and 16 of its partner, so that each pass has all that is needed, and its gates are computed while
the next one multiplies:

    chunk    a0 a0 a0 a0 a1 a1 a1 a1 b0 b0 b0 b0      a, b: columns, each in two chunks
    rows      0 32 64 96  0 32 64 96  0 32 64 96
    gated                    0 32 64 96               rows of a whose sums are whole

Knows: tiles, addresses. Must not know: threads, phases.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba

from plait.kernels.cpu import amx, vector_ops
from plait.kernels.cpu.gemm import amx_kernel
from plait.kernels.cpu.gemm.amx_kernel import PANEL_BYTES, RESULT_BYTES, TILE_BYTES
from plait.kernels.cpu.gemm.int8_kernel import HALF_TILE, TILE_OUTPUTS, block_bytes

MAX_CHUNK_BLOCKS = 18  # blocks, at most: 36 KB of a first cache of 48
PASS_ROWS = 2 * amx.TILE_ROWS  # rows of a pass
PASSES_PER_GROUP = 8  # passes whose sums there is room for
GLU_ROWS = 4  # rows that are gated at once
NO_ACTIVATION = -1
RING_MASK, WHOLE_MASK = 1, -1  # how much of a panel is kept: its last two blocks, where only one pass reads it
INT4_BLOCK_BYTES, INT8_BLOCK_BYTES = block_bytes(4), block_bytes(8)
# In a thread's scratch: a panel; sums of two passes that are gated; sums of a group of passes that wait.
GLU_OFFSET = amx.PANELS_OFFSET + MAX_CHUNK_BLOCKS * PANEL_BYTES
SUMS_OFFSET = GLU_OFFSET + 2 * RESULT_BYTES
SCRATCH_BYTES = SUMS_OFFSET + PASSES_PER_GROUP * RESULT_BYTES - amx.PANELS_OFFSET


class GemmTask(NamedTuple):
    """A product's rows through columns first .. last of 32 each, a gated one's 16 of the gate and 16 others."""

    bits: int
    activation: int  # NO_ACTIVATION, or one of `vector_ops`
    weight: int
    blocks: int
    x: int  # tiles of 16 rows and 32 inputs of bfloat16
    out: int  # float32 in rows of `stride` bytes; gated: tiles of bfloat16, `stride` bytes for 16 rows
    stride: int
    first: int
    last: int


class PanelChunk(NamedTuple):
    """Packed blocks, for each half of a panel the first numbers and scales, and where they are widened to."""

    qvalues: int
    scales: int
    other_qvalues: int
    other_scales: int
    blocks: int
    panel: int
    mask: int  # RING or WHOLE


class PendingGlu(NamedTuple):
    """Sums of a pass, 16 of the gate and 16 others a row, and where 16 bfloat16 of each row go."""

    sums: int
    to: int
    stride: int  # bytes from 16 rows to the next
    num_glu_groups: int  # of rows; 0: there is nothing to do


@numba.njit  # type: ignore[untyped-decorator]
def amx_gemm(work: GemmTask, rows: int, scratch: int) -> None:
    """As many rows at a time as there is room for their sums."""
    for begin in range(0, rows, PASSES_PER_GROUP * PASS_ROWS):
        _gemm_row_group(work, begin, min(rows, begin + PASSES_PER_GROUP * PASS_ROWS), scratch)


@numba.njit  # type: ignore[untyped-decorator]
def _gemm_row_group(work: GemmTask, begin: int, end: int, scratch: int) -> None:
    chunks = (
        (work.blocks + MAX_CHUNK_BLOCKS - 1) // MAX_CHUNK_BLOCKS if end - begin > PASS_ROWS else 1
    )  # a ring is no larger for more blocks
    pending = _nothing_pending()
    spare, other = scratch + GLU_OFFSET, scratch + GLU_OFFSET + RESULT_BYTES
    for place in range((work.last - work.first) * chunks):
        columns, index = work.first + place // chunks, place % chunks
        first_block, last_block = index * work.blocks // chunks, (index + 1) * work.blocks // chunks
        chunk = _panel_chunk(work, columns, first_block, last_block, scratch, end - begin)
        for row in range(begin, end, PASS_ROWS):
            sums = scratch + SUMS_OFFSET + (row - begin) // PASS_ROWS * RESULT_BYTES
            out, stride = sums, 4 * TILE_OUTPUTS
            if last_block == work.blocks and work.activation == NO_ACTIVATION:
                out, stride = work.out + row * work.stride + 4 * TILE_OUTPUTS * columns, work.stride
            elif last_block == work.blocks:
                out = spare
            x, x_stride = work.x + 64 * row * work.blocks + TILE_BYTES * first_block, TILE_BYTES * work.blocks
            two_tiles, dequantize = end - row > amx.TILE_ROWS, row == begin
            _pass(
                two_tiles,
                dequantize,
                work.bits,
                x,
                x_stride,
                chunk,
                sums if index else 0,
                out,
                stride,
                work.activation,
                pending,
            )
            pending = _nothing_pending()
            if last_block == work.blocks and work.activation != NO_ACTIVATION:
                to = (
                    work.out
                    + row // amx.TILE_ROWS * work.stride
                    + TILE_BYTES * (columns // 2)
                    + 2 * HALF_TILE * (columns % 2)
                )
                pending = PendingGlu(spare, to, work.stride, (min(PASS_ROWS, end - row) + GLU_ROWS - 1) // GLU_ROWS)
                spare, other = other, spare
    _glu_rows(work.activation, pending, 0, PASS_ROWS // GLU_ROWS)


@numba.njit  # type: ignore[untyped-decorator]
def _nothing_pending() -> Any:
    return PendingGlu(0, 0, 0, 0)


@numba.njit  # type: ignore[untyped-decorator]
def _panel_chunk(work: GemmTask, columns: int, begin: int, end: int, scratch: int, rows: int) -> Any:
    """Blocks begin .. end of some columns, for so many rows."""
    size = INT4_BLOCK_BYTES if work.bits == 4 else INT8_BLOCK_BYTES
    qvalue_bytes, tile_bytes = size - 4 * TILE_OUTPUTS, work.blocks * size
    if work.activation == NO_ACTIVATION:
        half, other_half = 0, 1
        tile = other = work.weight + columns * tile_bytes + begin * size
    else:
        half = other_half = columns % 2
        tile = work.weight + columns // 2 * 2 * tile_bytes + begin * size
        other = tile + tile_bytes
    return PanelChunk(
        tile + half * (qvalue_bytes // 2),
        tile + qvalue_bytes + 2 * HALF_TILE * half,
        other + other_half * (qvalue_bytes // 2),
        other + qvalue_bytes + 2 * HALF_TILE * other_half,
        end - begin,
        scratch + amx.PANELS_OFFSET,
        WHOLE_MASK if rows > PASS_ROWS else RING_MASK,
    )


@numba.njit  # type: ignore[untyped-decorator]
def _pass(
    two_tiles: bool,
    dequantize: bool,
    bits: int,
    x: int,
    x_stride: int,
    chunk: PanelChunk,
    sums: int,
    out: int,
    stride: int,
    activation: int,
    pending: PendingGlu,
) -> None:
    """16 or 32 rows (`two_tiles`) over a chunk, which is widened for it (`dequantize`) or was; `sums` (0: none) to `out`."""
    if two_tiles:
        if sums:
            amx_kernel.load_accumulators(2, sums, 4 * TILE_OUTPUTS)
        else:
            amx_kernel.zero_accumulators(2)
    elif sums:
        amx_kernel.load_accumulators(1, sums, 4 * TILE_OUTPUTS)
    else:
        amx_kernel.zero_accumulators(1)
    num_glu_groups = (PASS_ROWS // GLU_ROWS + chunk.blocks - 1) // chunk.blocks
    if dequantize:
        _dequantize_block(bits, chunk, 0)
    for block in range(chunk.blocks):
        if dequantize and block + 1 < chunk.blocks:
            _dequantize_block(bits, chunk, block + 1)
        panel = chunk.panel + PANEL_BYTES * (block & chunk.mask)
        if two_tiles:
            amx_kernel.multiply_block(2, x + TILE_BYTES * block, x_stride, panel)
        else:
            amx_kernel.multiply_block(1, x + TILE_BYTES * block, x_stride, panel)
        if pending.num_glu_groups:
            _glu_rows(activation, pending, block * num_glu_groups, (block + 1) * num_glu_groups)
    if two_tiles:
        amx_kernel.store_accumulators(2, out, stride)
    else:
        amx_kernel.store_accumulators(1, out, stride)


@numba.njit  # type: ignore[untyped-decorator]
def _dequantize_block(bits: int, chunk: PanelChunk, block: int) -> None:
    to = chunk.panel + PANEL_BYTES * (block & chunk.mask)
    if bits == 4:
        at = block * INT4_BLOCK_BYTES
        amx_kernel.dequantize_half(4, chunk.qvalues + at, chunk.scales + at, to)
        amx_kernel.dequantize_half(4, chunk.other_qvalues + at, chunk.other_scales + at, to + TILE_BYTES)
    else:
        at = block * INT8_BLOCK_BYTES
        amx_kernel.dequantize_half(8, chunk.qvalues + at, chunk.scales + at, to)
        amx_kernel.dequantize_half(8, chunk.other_qvalues + at, chunk.other_scales + at, to + TILE_BYTES)


@numba.njit  # type: ignore[untyped-decorator]
def _glu_rows(activation: int, pending: PendingGlu, begin: int, end: int) -> None:
    """Fours of rows from `begin` on, as far as there are some."""
    for four in range(begin, min(end, pending.num_glu_groups)):
        sums = pending.sums + four * GLU_ROWS * 4 * TILE_OUTPUTS
        to = pending.to + four * GLU_ROWS // amx.TILE_ROWS * pending.stride + 64 * (four * GLU_ROWS % amx.TILE_ROWS)
        if activation == vector_ops.SILU:
            vector_ops.glu_x4_to_bf16(0, sums, to)
        else:
            vector_ops.glu_x4_to_bf16(1, sums, to)
