"""Blocking of bfloat16 products on AMX: widens a weight panel by panel, and passes all rows over each panel.

A chunk of up to 18 blocks of 32 columns is dequantized to a panel, which stays in the first-level cache while all rows
pass over it, 32 at a time. Activations are read past that cache (TILELOADDT1); otherwise a pass takes a third longer.
The first pass dequantizes as it multiplies. Sums that are not complete after a chunk wait in memory. For a gated
product (GLU) a panel has 16 columns of the gate and the 16 matching columns of `up`, so each pass yields complete
pairs, and their activation is computed during the next pass:

    chunk       a0 a0 a0 a0 a1 a1 a1 a1 b0 b0 b0 b0      a, b: columns, each in two chunks
    rows         0 32 64 96  0 32 64 96  0 32 64 96
    GLU of                      0 32 64 96               rows of a whose sums are complete
"""

from __future__ import annotations

from typing import Any, NamedTuple

from plait.kernels.cpu import amx, vector_ops
from plait.kernels.cpu.amx import PASS_ROWS
from plait.kernels.cpu.gemm import amx_kernel
from plait.kernels.cpu.gemm.amx_kernel import PANEL_BYTES, RESULT_BYTES, TILE_BYTES
from plait.kernels.cpu.gemm.layout_calls import call_dequantize, call_pass
from plait.kernels.cpu.gemm.layouts import HALF_TILE, TILE_OUTPUTS

MAX_CHUNK_BLOCKS = 18  # blocks of a chunk: 36 KB of a first-level cache of 48
PASSES_PER_GROUP = 8  # passes whose incomplete sums the scratch holds
GLU_ROWS = 4  # rows of one call of the GLU
NO_ACTIVATION = -1
RING_MASK, WHOLE_MASK = 3, -1  # a panel that only one pass reads is a ring of its last four blocks
# A thread's scratch: a panel; the sums of two passes for the GLU; the incomplete sums of a group of passes.
GLU_OFFSET = amx.PANELS_OFFSET + MAX_CHUNK_BLOCKS * PANEL_BYTES
SUMS_OFFSET = GLU_OFFSET + 2 * RESULT_BYTES
SCRATCH_BYTES = SUMS_OFFSET + PASSES_PER_GROUP * RESULT_BYTES - amx.PANELS_OFFSET


class TileStream(NamedTuple):
    """The tiles of a packed weight: the address of the first, and the bytes from one to the next."""

    dequantize: int  # addresses of its layout's functions (`layout_kernels`)
    multiply_pass: int
    tiles: int
    stride: int


class GemmTask(NamedTuple):
    """A product with a range of columns, in units of 32; of a gated product 16 of the gate and 16 of `up`."""

    activation: int  # NO_ACTIVATION, or one of `vector_ops`
    weight: TileStream
    other: TileStream  # of a gated product `up`, otherwise the weight again
    blocks: int  # blocks of 32 inputs
    x: int  # address of bfloat16 tiles of 16 rows and 32 inputs
    out: int  # address of float32 rows of `stride` bytes; gated: of bfloat16 tiles, `stride` bytes for 16 rows
    stride: int
    first: int  # the first unit of columns
    last: int  # the one after the last


class PanelChunk(NamedTuple):
    """The packed blocks of a chunk: for each half of a panel the layout's function, the tile and which half of it."""

    multiply_pass: int  # the function for a pass over both halves; 0: their layouts differ
    dequantize: int
    tile: int
    half: int
    other_dequantize: int
    other_tile: int
    other_half: int
    begin: int  # the first block
    blocks: int
    panel: int
    mask: int  # RING_MASK or WHOLE_MASK


class PendingGlu(NamedTuple):
    """The complete sums of a pass, in each row 16 of the gate and 16 of `up`, that wait for their GLU."""

    sums: int
    out: int  # address of the first row's 16 bfloat16
    stride: int  # bytes from 16 rows of `out` to the next 16
    num_groups: int  # groups of GLU_ROWS rows; 0: nothing waits


def amx_gemm(task: GemmTask, rows: int, scratch: int) -> None:
    """Computes a task for all rows, in groups whose incomplete sums fit into the scratch."""
    for begin in range(0, rows, PASSES_PER_GROUP * PASS_ROWS):
        _gemm_row_group(task, begin, min(rows, begin + PASSES_PER_GROUP * PASS_ROWS), scratch)


def _gemm_row_group(task: GemmTask, begin: int, end: int, scratch: int) -> None:
    """Computes rows [begin, end) of a task."""
    # A single pass keeps only a ring of two blocks, so it needs no chunks.
    chunks = (task.blocks + MAX_CHUNK_BLOCKS - 1) // MAX_CHUNK_BLOCKS if end - begin > PASS_ROWS else 1
    pending = _nothing_pending()
    glu_sums, next_glu_sums = scratch + GLU_OFFSET, scratch + GLU_OFFSET + RESULT_BYTES
    for i in range((task.last - task.first) * chunks):
        columns, index = task.first + i // chunks, i % chunks
        first_block, last_block = index * task.blocks // chunks, (index + 1) * task.blocks // chunks
        chunk = _panel_chunk(task, columns, first_block, last_block, scratch, end - begin)
        for row in range(begin, end, PASS_ROWS):
            sums = scratch + SUMS_OFFSET + (row - begin) // PASS_ROWS * RESULT_BYTES
            out, stride = sums, 4 * TILE_OUTPUTS
            if last_block == task.blocks and task.activation == NO_ACTIVATION:
                out, stride = task.out + row * task.stride + 4 * TILE_OUTPUTS * columns, task.stride
            elif last_block == task.blocks:
                out = glu_sums
            x, x_stride = task.x + 64 * row * task.blocks + TILE_BYTES * first_block, TILE_BYTES * task.blocks
            tiles, dequantize = 1 + int(end - row > amx.TILE_ROWS), row == begin
            before = sums if index else 0
            _pass(tiles, dequantize, x, x_stride, chunk, before, out, stride, task.activation, pending)
            pending = _nothing_pending()
            if last_block == task.blocks and task.activation != NO_ACTIVATION:
                tile = task.out + row // amx.TILE_ROWS * task.stride + TILE_BYTES * (columns // 2)
                groups = (min(PASS_ROWS, end - row) + GLU_ROWS - 1) // GLU_ROWS
                pending = PendingGlu(glu_sums, tile + 2 * HALF_TILE * (columns % 2), task.stride, groups)
                glu_sums, next_glu_sums = next_glu_sums, glu_sums
    _glu_rows(task.activation, pending, 0, PASS_ROWS // GLU_ROWS)


def _nothing_pending() -> Any:
    return PendingGlu(0, 0, 0, 0)


def _panel_chunk(task: GemmTask, columns: int, begin: int, end: int, scratch: int, rows: int) -> Any:
    """Returns the chunk of blocks [begin, end) of a unit of columns, to be read by `rows` rows."""
    weight, other = task.weight, task.other
    if task.activation == NO_ACTIVATION:
        half, other_half, tile = 0, 1, columns
    else:
        half = other_half = columns % 2
        tile = columns // 2
    return PanelChunk(
        weight.multiply_pass if weight.dequantize == other.dequantize else 0,
        weight.dequantize,
        weight.tiles + tile * weight.stride,
        half,
        other.dequantize,
        other.tiles + tile * other.stride,
        other_half,
        begin,
        end - begin,
        scratch + amx.PANELS_OFFSET,
        WHOLE_MASK if rows > PASS_ROWS else RING_MASK,
    )


def _pass(
    tiles: int,
    dequantize: bool,
    x: int,
    x_stride: int,
    chunk: PanelChunk,
    sums: int,
    out: int,
    stride: int,
    activation: int,
    pending: PendingGlu,
) -> None:
    """Multiplies 16 * tiles rows, 16 or 32, with a chunk, dequantizing it first if `dequantize`.

    Starts from the sums at `sums` (0: from zero) and writes the new ones to `out`. Meanwhile computes `pending`.
    """
    if sums:
        amx_kernel.load_accumulators(tiles, sums, 4 * TILE_OUTPUTS)
    else:
        amx_kernel.zero_accumulators(tiles)
    if dequantize and chunk.multiply_pass:
        _glu_rows(activation, pending, 0, PASS_ROWS // GLU_ROWS)
        call_pass(
            chunk.multiply_pass,
            (
                chunk.tile, chunk.half, chunk.other_tile, chunk.other_half, chunk.begin, chunk.blocks, chunk.panel,
                chunk.mask, x, x_stride, tiles - 1,
            ),
        )  # fmt: skip
    else:
        _multiply_blocks(tiles, dequantize, x, x_stride, chunk, activation, pending)
    amx_kernel.store_accumulators(tiles, out, stride)


def _multiply_blocks(
    tiles: int, dequantize: bool, x: int, x_stride: int, chunk: PanelChunk, activation: int, pending: PendingGlu
) -> None:
    """Multiplies with the blocks of a chunk; dequantizes them one ahead if `dequantize`, as two layouts do it."""
    groups_per_block = (PASS_ROWS // GLU_ROWS + chunk.blocks - 1) // chunk.blocks
    if dequantize:
        _dequantize_block(chunk, 0)
    for block in range(chunk.blocks):
        if dequantize and block + 1 < chunk.blocks:
            _dequantize_block(chunk, block + 1)
        panel = chunk.panel + PANEL_BYTES * (block & chunk.mask)
        amx_kernel.multiply_block(tiles, x + TILE_BYTES * block, x_stride, panel)
        if pending.num_groups:
            _glu_rows(activation, pending, block * groups_per_block, (block + 1) * groups_per_block)


def _dequantize_block(chunk: PanelChunk, block: int) -> None:
    """Dequantizes a block of a chunk to its panel."""
    panel, index = chunk.panel + PANEL_BYTES * (block & chunk.mask), chunk.begin + block
    call_dequantize(chunk.dequantize, chunk.tile, index, chunk.half, panel)
    call_dequantize(chunk.other_dequantize, chunk.other_tile, index, chunk.other_half, panel + TILE_BYTES)


def _glu_rows(activation: int, pending: PendingGlu, begin: int, end: int) -> None:
    """Computes the GLU of groups [begin, end) of a pass, as far as there are so many."""
    for group in range(begin, min(end, pending.num_groups)):
        row = group * GLU_ROWS
        sums = pending.sums + row * 4 * TILE_OUTPUTS
        out = pending.out + row // amx.TILE_ROWS * pending.stride + 64 * (row % amx.TILE_ROWS)
        vector_ops.glu_x4_to_bf16(activation, sums, out)
