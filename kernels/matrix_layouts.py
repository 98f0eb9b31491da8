"""Quantized weights in the GGUF type that holds the same numbers, for the packed CPU kernels (numpy).

Integers of 4 bits whose zero point is 8 are Q4_0; with another zero point, integer and zero point differ by -16 to 15,
which is Q5_0. Integers of 8 bits around 128 are Q8_0, and E2M1 with powers of two as scales MXFP4. The scales must be
float16 numbers. Any other weight is rounded to BF16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from plait.kernels.quantized_matrix import E2M1, Floats, Grid, QuantizedMatrix, dequantize

BLOCK = 32  # inputs of a block of these types
CHUNK_WEIGHTS = 1 << 17  # converted at a time: their floats stay in a core's cache
Bytes = npt.NDArray[np.uint8]


def layout_of(grid: Grid, inputs: int) -> str:
    """The type that holds the weight: without rounding, or else "BF16"."""
    if grid.groups is not None or grid.row_block > 1 or inputs % BLOCK or (grid.group % BLOCK and grid.group < inputs):
        return "BF16"
    if grid.kind == "table4":
        is_mxfp4 = grid.table is not None and np.array_equal(grid.table, E2M1) and grid.group == BLOCK
        return "MXFP4" if is_mxfp4 and _are_powers_of_two(grid.scales) else "BF16"
    if grid.kind == "e4m3" or not _are_float16(grid.scales):
        return "BF16"
    zeros = np.asarray(grid.zeros)
    if grid.kind == "int8":
        return "Q8_0" if (zeros == 128).all() else "BF16"
    if (zeros == 8).all():
        return "Q4_0"
    return "Q5_0" if zeros.min() >= 0 and zeros.max() <= 16 else "BF16"


def to_blocks(matrix: QuantizedMatrix, layout: str) -> Bytes:
    """The weight in the blocks of the type that `layout_of` returned, uint8 [N, bytes of a row]."""
    step = max(1, CHUNK_WEIGHTS // matrix.codes.shape[1])
    parts = []
    for first in range(0, len(matrix.codes), step):
        part = _rows(matrix, slice(first, first + step))
        parts.append(_bf16_rows(part) if layout == "BF16" else _block_rows(part, layout))
    return np.concatenate(parts)


def _rows(matrix: QuantizedMatrix, rows: slice) -> QuantizedMatrix:
    """Some outputs of a weight, each with its own scales."""
    grid = matrix.grid
    ids = np.arange(rows.start, min(rows.stop, len(matrix.codes)))
    zeros = grid.zeros if isinstance(grid.zeros, int) else grid.zeros[ids]
    part = Grid(grid.kind, grid.scales[ids // grid.row_block], grid.group, zeros, groups=grid.groups, table=grid.table)
    return QuantizedMatrix(part, matrix.codes[rows])


def _bf16_rows(matrix: QuantizedMatrix) -> Bytes:
    """Rounded to nearest, ties to even. The weights are finite."""
    bits = dequantize(matrix).view(np.uint32)
    is_odd = bits >> np.uint32(16)
    is_odd &= np.uint32(1)
    bits += is_odd
    bits += np.uint32(0x7FFF)
    halves = bits.astype("<u4", copy=False).view("<u2")[:, 1::2]  # the upper half of each
    return np.ascontiguousarray(halves).view(np.uint8)


def _block_rows(matrix: QuantizedMatrix, layout: str) -> Bytes:
    grid, (outputs, inputs) = matrix.grid, matrix.codes.shape
    blocks = inputs // BLOCK
    codes = matrix.codes.reshape(outputs, blocks, BLOCK)
    scales = _of_blocks(grid.scales, grid, blocks)
    if layout == "MXFP4":
        exponents = (np.frexp(scales)[1] + 126).astype(np.uint8)[..., None]
        return np.concatenate([exponents, _nibbles(codes)], -1).reshape(outputs, -1)
    halves = np.ascontiguousarray(scales.astype("<f2"))[..., None].view(np.uint8)
    if layout == "Q4_0":
        fields = [_nibbles(codes)]
    elif layout == "Q8_0":
        fields = [codes ^ np.uint8(128)]
    else:
        zeros = _of_blocks(np.asarray(grid.zeros), grid, blocks)[..., None]
        integers = codes + (16 - zeros).astype(np.uint8)  # from 0 to 31: a carry out of the byte is lost
        fifth = np.packbits(integers >> 4, axis=-1, bitorder="little")  # bit j of the 4 bytes: of input j
        fields = [fifth, _nibbles(integers & np.uint8(15))]
    return np.concatenate([halves, *fields], -1).reshape(outputs, -1)


def _nibbles(codes: Bytes) -> Bytes:
    """Byte j holds input j in its low half and input 16 + j in its high one."""
    packed: Bytes = codes[..., :16] | codes[..., 16:] << np.uint8(4)
    return packed


def _of_blocks(values: npt.NDArray[Any], grid: Grid, blocks: int) -> npt.NDArray[Any]:
    """Values of groups [N, G] as values of blocks, [N, blocks]; one value for everything stays one."""
    if values.ndim == 0:
        return values
    return values[:, np.arange(blocks) * BLOCK // grid.group] if values.shape[1] > 1 else np.repeat(values, blocks, 1)


def _are_float16(scales: Floats) -> bool:
    with np.errstate(over="ignore"):
        return bool((scales.astype(np.float16).astype(np.float32) == scales).all())


def _are_powers_of_two(scales: Floats) -> bool:
    mantissa, exponents = np.frexp(scales)
    return bool((mantissa == 0.5).all() and (exponents >= -126).all())
