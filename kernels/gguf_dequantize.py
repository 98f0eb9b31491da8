"""Dequantizes GGUF's block formats to float32.

A format stores each row in blocks of a fixed number of values and bytes (`GGUF_BLOCK_SHAPES`). Every value is
`scale * integer`, or `scale * integer + minimum`, in the order of operations that ggml uses, so results are equal to
the last bit. Layouts: https://github.com/ggml-org/ggml, ggml-common.h.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

# format -> (values per block, bytes per block)
GGUF_BLOCK_SHAPES: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}


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
    return _DECODE[quantization](raw.reshape(-1, size)).reshape(shape)


_FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _read_float16(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Reads the float16 at byte `at` of each block, as float32 [N, 1]."""
    pair = blocks[:, at : at + 2].clone(memory_format=torch.contiguous_format)
    return pair.view(torch.float16).to(torch.float32)


def _unpack_bits(packed: torch.Tensor, width: int, group: int) -> torch.Tensor:
    """Unpacks unsigned fields of `width` bits from bytes [N, B] to uint8 [N, B * 8 / width].

    For each group of `group` bytes, the lowest field of every byte comes first, then the next field of each.
    """
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
    grouped = packed.reshape(packed.shape[0], -1, 1, group)  # [N, B/group, 1, group]
    spread = (grouped >> shifts.view(-1, 1)).bitwise_and_(2**width - 1)  # [N, B/group, 8/width, group]
    return spread.reshape(packed.shape[0], -1)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    integers = blocks[:, 2:].view(torch.int8).to(torch.float32)  # [N, 32]
    return integers.mul_(_read_float16(blocks, 0))


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    integers = _unpack_bits(blocks[:, 2:], 4, 16).to(torch.float32).sub_(8)
    return integers.mul_(_read_float16(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    integers = _unpack_bits(blocks[:, 4:], 4, 16).to(torch.float32)
    return integers.mul_(_read_float16(blocks, 0)).add_(_read_float16(blocks, 2))


def _unpack_5_bits(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Unpacks 32 integers of 5 bits: their highest bits are a little-endian word [N, 4], the rest nibbles [N, 16]."""
    return (_unpack_bits(low, 4, 16) | (_unpack_bits(high, 1, 1) << 4)).to(torch.float32)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return _unpack_5_bits(blocks[:, 2:6], blocks[:, 6:]).sub_(16).mul_(_read_float16(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    return _unpack_5_bits(blocks[:, 4:8], blocks[:, 8:]).mul_(_read_float16(blocks, 0)).add_(_read_float16(blocks, 2))


# The K formats: 256 values in 8 or 16 sub-blocks, each with a small integer scale.


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales = blocks[:, :16]  # low nibble: scale, high nibble: minimum, one byte per 16 values
    scale = _read_float16(blocks, 80) * (scales & 15).to(torch.float32)  # [N, 16]
    minimum = _read_float16(blocks, 82) * (scales >> 4).to(torch.float32)
    integers = _unpack_bits(blocks[:, 16:80], 2, 32).to(torch.float32).view(-1, 16, 16)
    return integers.mul_(scale.unsqueeze(-1)).sub_(minimum.unsqueeze(-1))


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    # Sixteen 6-bit scales: low 4 bits in 8 bytes, high 2 bits in 4.
    low, high = _unpack_bits(blocks[:, 96:104], 4, 8), _unpack_bits(blocks[:, 104:108], 2, 4)
    scale = _read_float16(blocks, 108) * (low | (high << 4)).to(torch.float32).sub_(32)  # [N, 16]
    # A clear bit in the mask subtracts 4.
    borrow = (_unpack_bits(blocks[:, :32], 1, 32) ^ 1) << 2
    integers = _unpack_bits(blocks[:, 32:96], 2, 32).to(torch.float32).sub_(borrow).view(-1, 16, 16)
    return integers.mul_(scale.unsqueeze(-1))


def _scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q4_K and Q5_K: eight scales and eight minima, 6 bits each in 12 bytes from 4 on; float32 [N, 8, 1]."""
    first, second, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = torch.cat([first & 63, (mixed & 15) | ((first >> 2) & 48)], dim=1)
    minimum = torch.cat([second & 63, (mixed >> 4) | ((second >> 2) & 48)], dim=1)
    return (
        (_read_float16(blocks, 0) * scale.to(torch.float32)).unsqueeze(-1),
        (_read_float16(blocks, 2) * minimum.to(torch.float32)).unsqueeze(-1),
    )


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scale, minimum = _scales_and_minima(blocks)
    integers = _unpack_bits(blocks[:, 16:], 4, 32).to(torch.float32).view(-1, 8, 32)
    return integers.mul_(scale).sub_(minimum)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scale, minimum = _scales_and_minima(blocks)
    fields = _unpack_bits(blocks[:, 48:], 4, 32) | (_unpack_bits(blocks[:, 16:48], 1, 32) << 4)
    return fields.to(torch.float32).view(-1, 8, 32).mul_(scale).sub_(minimum)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    scale = _read_float16(blocks, 208) * blocks[:, 192:208].view(torch.int8).to(torch.float32)  # [N, 16]
    fields = _unpack_bits(blocks[:, :128], 4, 64) | (_unpack_bits(blocks[:, 128:192], 2, 32) << 4)
    return fields.to(torch.float32).sub_(32).view(-1, 16, 16).mul_(scale.unsqueeze(-1))


_DECODE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
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
