"""The memory layout of a packed weight: tiles of 32 outputs, in blocks of 32 inputs with float16 scales and minima.

A weight is [tiles, blocks] of blocks, and a block of a tile is

    qvalues    2 halves x 16 outputs x 32 inputs of 4 bits (512 bytes) or 8 bits (1,024 bytes), unsigned
    scales     32 float16
    minima     32 float16        weight = scale * qvalue + minimum

64 bytes of qvalues hold 4 inputs of each of 16 outputs; at 4 bits the upper half of each byte holds the 4 inputs after.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from plait.kernels.cpu.jit import inner_njit
from plait.kernels.cpu.vector_ops import half_to_float

QUANT_BLOCK = 32  # inputs that share a scale
TILE_OUTPUTS = 32  # outputs of a tile
HALF_TILE = TILE_OUTPUTS // 2  # outputs whose qvalues lie side by side


def block_bytes(bits: int) -> int:
    """Bytes of one block of a tile."""
    return QUANT_BLOCK * TILE_OUTPUTS * bits // 8 + 4 * TILE_OUTPUTS


INT4_BLOCK_BYTES, INT8_BLOCK_BYTES = block_bytes(4), block_bytes(8)


@inner_njit
def packed_block_bytes(bits: int) -> int:
    """`block_bytes` for kernels; `bits` is 4 or 8."""
    return INT4_BLOCK_BYTES if bits == 4 else INT8_BLOCK_BYTES


@numba.njit  # type: ignore[untyped-decorator]
def dequantize_row(packed: Any, bits: int, row: int, out: Any) -> None:
    """Dequantizes output `row` of a packed weight (int8 bytes) to `out` [C] float32."""
    blocks, lane = len(out) // QUANT_BLOCK, row % TILE_OUTPUTS
    size = packed_block_bytes(bits)
    tile = (row // TILE_OUTPUTS) * blocks * size
    half, output = lane // HALF_TILE, lane % HALF_TILE
    qvalue_bytes = size - 4 * TILE_OUTPUTS
    for block in range(blocks):
        start = tile + block * size
        offset = start + qvalue_bytes + 2 * lane
        scale = _float16_at(packed, offset)
        minimum = _float16_at(packed, offset + 2 * TILE_OUTPUTS)
        start += half * (qvalue_bytes // 2) + 4 * output
        for i in range(QUANT_BLOCK):
            if bits == 8:
                qvalue = np.uint8(packed[start + 64 * (i // 4) + i % 4])
            else:
                qvalue = np.uint8(packed[start + 64 * (i // 8) + i % 4]) >> np.uint8(4 * (i // 4 % 2)) & np.uint8(15)
            out[block * QUANT_BLOCK + i] = np.float32(qvalue) * scale + minimum


@inner_njit
def _float16_at(packed: Any, offset: int) -> Any:
    bits = np.uint16(np.uint8(packed[offset])) | np.uint16(np.uint8(packed[offset + 1])) << np.uint16(8)
    return half_to_float(bits)
