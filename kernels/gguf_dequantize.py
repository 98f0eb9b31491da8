"""Reads GGUF's block formats: the integers, scales and minima of each block, and the float32 values they stand for.

A format stores each row in blocks of a fixed number of values and bytes (`GGUF_BLOCK_SHAPES`). Every value is
`scale * (integer - offset)`, or `scale * integer + minimum`, in the order of operations that ggml uses, so results are
equal to the last bit. Layouts: https://github.com/ggml-org/ggml, ggml-common.h.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from plait.kernels.gguf_types import BLOCK_SHAPES


@dataclass(frozen=True)
class BlockFields:
    """What B blocks of V values hold. Scales, and minima, are multiplied by their block's where there is one.

    >>> read_blocks(torch.zeros(144, dtype=torch.uint8), "Q4_K").scales.shape
    torch.Size([1, 8])
    """

    codes: torch.Tensor  # [B, V] uint8 or int8
    scales: torch.Tensor  # [B, G] uint8, int8 or float16, for groups of V / G values
    offset: int = 0  # the code of the value 0, in formats without minima
    minima: torch.Tensor | None = None  # [B, G] uint8 or float16
    block_scales: torch.Tensor | None = None  # [B, 1] float16
    block_minima: torch.Tensor | None = None  # [B, 1] float16


def read_blocks(raw: torch.Tensor, quantization: str) -> BlockFields:
    """Returns the fields of blocks (uint8, any shape, any device) of a quantized format.

    Raises ValueError for a format without blocks, or bytes that are not complete blocks.
    """
    size = GGUF_BLOCK_SHAPES.get(quantization, (0, 0))[1]
    if quantization not in _READERS or raw.dtype != torch.uint8 or raw.numel() % size:
        raise ValueError(f"{raw.numel()} bytes of {raw.dtype} are not blocks of {quantization}")
    return _READERS[quantization](raw.reshape(-1, size))


def dequantize(raw: torch.Tensor, quantization: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns the float32 tensor of `shape` that the blocks `raw` (uint8, any shape, any device) encode.

    The result never shares memory with `raw`. Raises ValueError for a format that is not in `GGUF_BLOCK_SHAPES`, or a
    byte count that does not fit the shape.

    >>> dequantize(torch.tensor([0, 0, 128, 63], dtype=torch.uint8), "F32", (1,))
    tensor([1.])
    """
    if quantization not in GGUF_BLOCK_SHAPES:
        raise ValueError(f"{quantization} cannot be dequantized; supported are {', '.join(GGUF_BLOCK_SHAPES)}")
    values, size = GGUF_BLOCK_SHAPES[quantization]
    count = math.prod(shape)
    if raw.dtype != torch.uint8 or not shape or shape[-1] % values or raw.numel() != count // values * size:
        raise ValueError(f"{raw.numel()} bytes of {raw.dtype} do not hold {quantization} of shape {shape}")
    if quantization in _FLOAT_DTYPES:
        # A copy is aligned, and the caller's bytes may be a file mapped read-only.
        return raw.reshape(-1).clone().view(_FLOAT_DTYPES[quantization]).to(torch.float32).reshape(shape)
    return _values_of(read_blocks(raw, quantization)).reshape(shape)


def _values_of(fields: BlockFields) -> torch.Tensor:
    """The values [B, V] of blocks in float32."""
    numbers = fields.codes.to(torch.float32)
    if fields.offset:
        numbers.sub_(fields.offset)
    grouped = numbers.view(len(numbers), fields.scales.shape[1], -1)
    grouped.mul_(_scaled(fields.scales, fields.block_scales).unsqueeze(-1))
    if fields.minima is not None:
        grouped.add_(_scaled(fields.minima, fields.block_minima).unsqueeze(-1))
    return numbers


def _scaled(values: torch.Tensor, block: torch.Tensor | None) -> torch.Tensor:
    """Scales or minima [B, G] in float32."""
    wide = values.to(torch.float32)
    return wide if block is None else block.to(torch.float32) * wide


_FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _read_float16(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Reads the float16 at byte `at` of each block, [B, 1]."""
    return blocks[:, at : at + 2].clone(memory_format=torch.contiguous_format).view(torch.float16)


def _unpack_bits(packed: torch.Tensor, width: int, group: int) -> torch.Tensor:
    """Unpacks unsigned fields of `width` bits from bytes [B, b] to uint8 [B, b * 8 / width].

    For each group of `group` bytes, the lowest field of every byte comes first, then the next field of each.
    """
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
    grouped = packed.reshape(packed.shape[0], -1, 1, group)  # [B, b/group, 1, group]
    spread = (grouped >> shifts.view(-1, 1)).bitwise_and_(2**width - 1)  # [B, b/group, 8/width, group]
    return spread.reshape(packed.shape[0], -1)


def _q8_0(blocks: torch.Tensor) -> BlockFields:
    return BlockFields(blocks[:, 2:].view(torch.int8), _read_float16(blocks, 0))


def _q4_0(blocks: torch.Tensor) -> BlockFields:
    return BlockFields(_unpack_bits(blocks[:, 2:], 4, 16), _read_float16(blocks, 0), offset=8)


def _q4_1(blocks: torch.Tensor) -> BlockFields:
    codes = _unpack_bits(blocks[:, 4:], 4, 16)
    return BlockFields(codes, _read_float16(blocks, 0), minima=_read_float16(blocks, 2))


def _unpack_5_bits(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Unpacks 32 integers of 5 bits: their highest bits are a little-endian word [B, 4], the rest nibbles [B, 16]."""
    return _unpack_bits(low, 4, 16) | (_unpack_bits(high, 1, 1) << 4)


def _q5_0(blocks: torch.Tensor) -> BlockFields:
    return BlockFields(_unpack_5_bits(blocks[:, 2:6], blocks[:, 6:]), _read_float16(blocks, 0), offset=16)


def _q5_1(blocks: torch.Tensor) -> BlockFields:
    codes = _unpack_5_bits(blocks[:, 4:8], blocks[:, 8:])
    return BlockFields(codes, _read_float16(blocks, 0), minima=_read_float16(blocks, 2))


# The K formats: 256 values in 8 or 16 groups, each with a small integer scale. Their minima are subtracted.


def _q2_k(blocks: torch.Tensor) -> BlockFields:
    scales = blocks[:, :16]  # low nibble: scale, high nibble: minimum, one byte per 16 values
    codes = _unpack_bits(blocks[:, 16:80], 2, 32)
    scale, minimum = _read_float16(blocks, 80), -_read_float16(blocks, 82)
    return BlockFields(codes, scales & 15, 0, scales >> 4, scale, minimum)


def _q3_k(blocks: torch.Tensor) -> BlockFields:
    # Sixteen 6-bit scales: low 4 bits in 8 bytes, high 2 bits in 4.
    low, high = _unpack_bits(blocks[:, 96:104], 4, 8), _unpack_bits(blocks[:, 104:108], 2, 4)
    scales = (low | (high << 4)).to(torch.int8).sub_(32)  # [B, 16]
    codes = _unpack_bits(blocks[:, 32:96], 2, 32) | (_unpack_bits(blocks[:, :32], 1, 32) << 2)
    return BlockFields(codes, scales, offset=4, block_scales=_read_float16(blocks, 108))


def _with_minima(blocks: torch.Tensor, codes: torch.Tensor) -> BlockFields:
    """Q4_K and Q5_K: eight scales and eight minima, 6 bits each in 12 bytes from 4 on."""
    first, second, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, (mixed & 15) | ((first >> 2) & 48)], dim=1)
    minima = torch.cat([second & 63, (mixed >> 4) | ((second >> 2) & 48)], dim=1)
    return BlockFields(codes, scales, 0, minima, _read_float16(blocks, 0), -_read_float16(blocks, 2))


def _q4_k(blocks: torch.Tensor) -> BlockFields:
    return _with_minima(blocks, _unpack_bits(blocks[:, 16:], 4, 32))


def _q5_k(blocks: torch.Tensor) -> BlockFields:
    return _with_minima(blocks, _unpack_bits(blocks[:, 48:], 4, 32) | (_unpack_bits(blocks[:, 16:48], 1, 32) << 4))


def _q6_k(blocks: torch.Tensor) -> BlockFields:
    codes = _unpack_bits(blocks[:, :128], 4, 64) | (_unpack_bits(blocks[:, 128:192], 2, 32) << 4)
    return BlockFields(codes, blocks[:, 192:208].view(torch.int8), 32, block_scales=_read_float16(blocks, 208))


_READERS: dict[str, Callable[[torch.Tensor], BlockFields]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
GGUF_BLOCK_SHAPES = {name: BLOCK_SHAPES[name] for name in (*_FLOAT_DTYPES, *_READERS)}
"""The formats that are read: name -> (values per block, bytes per block)."""
