"""Reads GGUF's blocks into integers and scales, without rounding.

Layouts: https://github.com/ggml-org/ggml, ggml-common.h. `Blocks` are uint8 [N, bytes of a block], N blocks of 32
inputs or of a superblock of 256.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.uint16]


class Unpacked(NamedTuple):
    """The contents of N blocks: `quants` [N, inputs]; `scales` and `minima` as `layouts` stores them, [N, bytes].

    `scale` and `minimum` are the bits of the block's float16, [N].
    """

    quants: Bytes
    scale: Halves
    minimum: Halves | None = None
    scales: Bytes | None = None
    minima: Bytes | None = None


def _half(blocks: Bytes, offset: int) -> Halves:
    """The 16 bits at a byte offset of each block."""
    halves: Halves = np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<u2")[:, 0]
    return halves


def _fields(packed: Bytes, width: int, group: int, at: int = 0) -> Bytes:
    """Unpacks fields of `width` bits: of each `group` bytes, the lowest field of every byte, then the next fields.

    A field becomes the bits from `at` on of its byte.
    """
    kind: Any = np.uint8 if group % 4 else np.uint32
    words = np.ascontiguousarray(packed).view(kind)
    grouped = words.reshape(len(packed), -1, group // words.itemsize)
    mask = kind(int.from_bytes(bytes([2**width - 1 << at]) * words.itemsize, "little"))
    fields = np.empty((*grouped.shape[:2], 8 // width, grouped.shape[2]), words.dtype)
    for i in range(8 // width):
        by = width * i - at
        shifted = grouped >> kind(by) if by > 0 else grouped << kind(-by) if by else grouped
        np.bitwise_and(shifted, mask, out=fields[:, :, i])
    return fields.view(np.uint8).reshape(len(packed), -1)


def _signed(scales: Bytes, offset: int) -> Bytes:
    """Subtracts an offset; the result's bytes are signed."""
    return scales - np.uint8(offset)


def _q4_0(blocks: Bytes) -> Unpacked:
    return Unpacked(_fields(blocks[:, 2:], 4, 16), _half(blocks, 0))


def _q4_1(blocks: Bytes) -> Unpacked:
    return Unpacked(_fields(blocks[:, 4:], 4, 16), _half(blocks, 0), _half(blocks, 2))


# The eight bits of a byte, each as bit 4 of a byte, in a word.
_FIFTH_BITS = (np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") * np.uint8(16)).view(
    np.uint64
)[:, 0]


def _five_bits(high: Bytes, low: Bytes) -> Bytes:
    """Joins the nibbles `low` [N, 16] and the fifth bits `high` [N, 4] of 32 integers."""
    return _fields(low, 4, 16) | _FIFTH_BITS[high].view(np.uint8)


def _q5_0(blocks: Bytes) -> Unpacked:
    return Unpacked(_five_bits(blocks[:, 2:6], blocks[:, 6:]), _half(blocks, 0))


def _q5_1(blocks: Bytes) -> Unpacked:
    return Unpacked(_five_bits(blocks[:, 4:8], blocks[:, 8:]), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Bytes) -> Unpacked:
    return Unpacked(blocks[:, 2:] ^ np.uint8(128), _half(blocks, 0))  # signed to unsigned, 128 added


def _q2_k(blocks: Bytes) -> Unpacked:
    return Unpacked(_fields(blocks[:, 16:80], 2, 32), _half(blocks, 80), _half(blocks, 82), blocks[:, :16])


def _q3_k(blocks: Bytes) -> Unpacked:
    quants = _fields(blocks[:, 32:96], 2, 32) | _fields(blocks[:, :32], 1, 32, at=2)
    scales = _fields(blocks[:, 96:104], 4, 8) | _fields(blocks[:, 104:108], 2, 4, at=4)
    return Unpacked(quants, _half(blocks, 108), scales=_signed(scales, 32))


def _scales_and_minima(blocks: Bytes) -> tuple[Bytes, Bytes]:
    """Q4_K and Q5_K: eight scales and eight minima of 6 bits in the 12 bytes from 4 on."""
    first, second, mixed = np.ascontiguousarray(blocks[:, 4:16]).view(np.uint32).T
    six, four, upper = np.uint32(0x3F3F3F3F), np.uint32(0x0F0F0F0F), np.uint32(0x30303030)
    scales, minima = np.empty((2, len(blocks), 2), np.uint32)
    scales[:, 0], scales[:, 1] = first & six, (mixed & four) | ((first >> np.uint32(2)) & upper)
    minima[:, 0] = second & six
    minima[:, 1] = ((mixed >> np.uint32(4)) & four) | ((second >> np.uint32(2)) & upper)
    return scales.view(np.uint8), minima.view(np.uint8)


def _q4_k(blocks: Bytes) -> Unpacked:
    return Unpacked(_fields(blocks[:, 16:], 4, 32), _half(blocks, 0), _half(blocks, 2), *_scales_and_minima(blocks))


def _q5_k(blocks: Bytes) -> Unpacked:
    quants = _fields(blocks[:, 48:], 4, 32) | _fields(blocks[:, 16:48], 1, 32, at=4)
    return Unpacked(quants, _half(blocks, 0), _half(blocks, 2), *_scales_and_minima(blocks))


def _q6_k(blocks: Bytes) -> Unpacked:
    quants = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32, at=4)
    return Unpacked(quants, _half(blocks, 208), scales=blocks[:, 192:208])


def _iq4_xs(blocks: Bytes) -> Unpacked:
    scales = _fields(blocks[:, 4:8], 4, 1) | _fields(blocks[:, 2:4], 2, 1, at=4)
    return Unpacked(_fields(blocks[:, 8:], 4, 16), _half(blocks, 0), scales=_signed(scales, 32))


def _mxfp4(blocks: Bytes) -> Unpacked:
    """The scale is 2^(e - 128), half of what the exponent stands for, because the table has doubled numbers."""
    exponents = blocks[:, 0].astype(np.uint16)
    normal = (exponents - (exponents > 0)) << 7  # bfloat16 of 2^(e - 128); below 2^-126 it is subnormal
    scale = np.where(exponents > 1, normal, np.uint16(0x20) << exponents).astype(np.uint16)
    return Unpacked(_fields(blocks[:, 1:], 4, 16), scale)


UNPACK: dict[str, Callable[[Bytes], Unpacked]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _q4_0,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
