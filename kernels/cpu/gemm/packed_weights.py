"""Builds packed weights from GGUF's formats or from floats: 4 or 8 bits in blocks of 32 with scale and minimum.

Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 are converted without loss: the qvalues and the float16 scales stay the same, and where
the format subtracts a zero point (8, 16, 128) the minimum is minus the zero point times the scale, which is exact.
Float weights are rounded: in 4 bits between the block's smallest and largest value, in 8 bits by the largest magnitude.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from plait.kernels.cpu.gemm.packed_layout import HALF_TILE, QUANT_BLOCK, TILE_OUTPUTS, block_bytes
from plait.kernels.cpu.kernel_args import aligned_empty

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.float16]

# format -> (bits of the packed weight, zero point)
LOSSLESS_GGUF_FORMATS = {"Q4_0": (4, 8), "Q4_1": (4, 0), "Q5_0": (8, 16), "Q5_1": (8, 0), "Q8_0": (8, 128)}


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [O, C] in blocks of 32 inputs: scale * qvalue + minimum.

    `qvalues` uint8 [O, C / 32, 32]; `scales` and `minima` float16 [O, C / 32].
    """

    qvalues: Bytes
    scales: Halves
    minima: Halves
    bits: int

    def dequantize(self) -> npt.NDArray[np.float32]:
        """Returns the weight as float32 [O, C]."""
        scales, minima = (x.astype(np.float32)[..., None] for x in (self.scales, self.minima))
        return (self.qvalues.astype(np.float32) * scales + minima).reshape(len(self.qvalues), -1)


@dataclass(frozen=True)
class PackedWeight:
    """A weight in the layout of `packed_layout`; behind the `outputs` real rows the last tile has zeros."""

    data: Bytes  # [tiles, blocks, block_bytes]
    bits: int
    outputs: int

    @property
    def address(self) -> int:
        return int(self.data.ctypes.data)

    @property
    def inputs(self) -> int:
        return int(self.data.shape[1]) * QUANT_BLOCK


def from_gguf(raw: Bytes, quantization: str, shape: tuple[int, ...]) -> QuantizedWeight | None:
    """Converts the stored bytes of a matrix, uint8 [O, bytes of a row]; None if that would not be exact."""
    if quantization not in LOSSLESS_GGUF_FORMATS or len(shape) != 2 or shape[1] % QUANT_BLOCK:
        return None
    bits, zero_point = LOSSLESS_GGUF_FORMATS[quantization]
    blocks = raw.reshape(shape[0], shape[1] // QUANT_BLOCK, -1)
    scales, has_minimum = _half(blocks, 0), quantization.endswith("1")
    with np.errstate(over="ignore"):
        minima = _half(blocks, 2) if has_minimum else (-zero_point * scales.astype(np.float32)).astype(np.float16)
    header = 4 if has_minimum else 2  # bytes of float16 before the qvalues
    if not np.isfinite(minima).all():
        return None  # zero point times scale exceeds float16
    if quantization == "Q8_0":
        qvalues = blocks[..., header:] ^ np.uint8(128)  # signed to unsigned, 128 added
    else:
        low = blocks[..., header + 4 * (bits == 8) :]
        qvalues = np.concatenate([low & 15, low >> 4], axis=-1)
        if bits == 8:
            fifth_bits = np.unpackbits(blocks[..., header : header + 4], axis=-1, bitorder="little")
            qvalues |= fifth_bits << 4
    return QuantizedWeight(qvalues, scales, minima, bits)


def _half(blocks: Bytes, offset: int) -> Halves:
    """Returns the float16 at a byte offset of each block."""
    halves: Halves = np.ascontiguousarray(blocks[..., offset : offset + 2]).view("<f2")[..., 0]
    return halves


def quantize(weight: npt.NDArray[np.float32], bits: int) -> QuantizedWeight:
    """Quantizes a float weight [O, C] to 4 or 8 bits. Raises ValueError unless C is a multiple of 32."""
    if weight.shape[1] % QUANT_BLOCK:
        raise ValueError(f"the weight's {weight.shape[1]} inputs are not a multiple of {QUANT_BLOCK}")
    blocks = weight.reshape(len(weight), -1, QUANT_BLOCK)
    if bits == 8:
        scales = (np.abs(blocks).max(-1) / np.float32(127)).astype(np.float16)
        minima = np.float16(-128) * scales
    else:
        lowest, highest = blocks.min(-1), blocks.max(-1)
        scales, minima = ((highest - lowest) / np.float32(15)).astype(np.float16), lowest.astype(np.float16)
    steps = scales.astype(np.float32)[..., None]
    offsets = blocks - minima.astype(np.float32)[..., None]
    qvalues = np.divide(offsets, steps, out=np.zeros_like(blocks), where=steps > 0)
    return QuantizedWeight(np.rint(qvalues).clip(0, 2**bits - 1).astype(np.uint8), scales, minima, bits)


def concat_outputs(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Concatenates weights with the same inputs along their outputs; the result has the larger number of bits."""
    return QuantizedWeight(
        np.concatenate([part.qvalues for part in parts]),
        np.concatenate([part.scales for part in parts]),
        np.concatenate([part.minima for part in parts]),
        max(part.bits for part in parts),
    )


def interleave_tiles(first: QuantizedWeight, second: QuantizedWeight) -> QuantizedWeight:
    """Interleaves two weights of the same shape: 32 outputs of the first, then 32 of the second."""
    return QuantizedWeight(
        _interleave(first.qvalues, second.qvalues),
        _interleave(first.scales, second.scales),
        _interleave(first.minima, second.minima),
        max(first.bits, second.bits),
    )


def _interleave(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> npt.NDArray[Any]:
    shape = (-1, 1, TILE_OUTPUTS, *first.shape[1:])
    both = np.concatenate([first.reshape(shape), second.reshape(shape)], axis=1)
    return both.reshape(-1, *first.shape[1:])


def pack(weight: QuantizedWeight) -> PackedWeight:
    """Packs a weight into tiles (`packed_layout`)."""
    outputs, blocks, _ = weight.qvalues.shape
    # [tiles, blocks, half, output, four inputs each, input] -> [tiles, blocks, half, four inputs each, output, input]
    qvalues = _split_tiles(weight.qvalues).reshape(-1, blocks, 2, HALF_TILE, 8, 4).swapaxes(3, 4)
    if weight.bits == 4:
        qvalues = qvalues[:, :, :, 0::2] | qvalues[:, :, :, 1::2] << 4
    halves = [np.ascontiguousarray(_split_tiles(x)).view(np.uint8) for x in (weight.scales, weight.minima)]
    return _concat_block_parts([qvalues.reshape(len(qvalues), blocks, -1), *halves], weight.bits, outputs)


def _concat_block_parts(parts: Sequence[Bytes], bits: int, outputs: int) -> PackedWeight:
    """Concatenates the bytes of each block's parts, in memory that begins at a cache line."""
    data = aligned_empty((*parts[0].shape[:2], block_bytes(bits)), np.uint8)
    np.concatenate(parts, axis=-1, out=data)
    return PackedWeight(data, bits, outputs)


def select_outputs(weight: PackedWeight, ids: npt.NDArray[np.int64]) -> PackedWeight:
    """Returns a weight with only the outputs `ids` [k], in that order; products with it have the same bits."""
    bits, blocks = weight.bits, weight.data.shape[1]
    tile, lane = ids // TILE_OUTPUTS, ids % TILE_OUTPUTS
    all_qvalues = weight.data[..., : -4 * TILE_OUTPUTS].reshape(-1, blocks, 2, bits, HALF_TILE, 4)
    qvalues = all_qvalues[tile, :, lane // HALF_TILE, :, lane % HALF_TILE]  # [k, blocks, bits, 4]
    all_halves = weight.data[..., -4 * TILE_OUTPUTS :].reshape(-1, blocks, 2, TILE_OUTPUTS, 2)
    pairs = all_halves[tile, :, :, lane]  # [k, blocks, 2, 2]
    parts = _pad_outputs(qvalues).reshape(-1, 2, HALF_TILE, blocks, bits, 4).transpose(0, 3, 1, 4, 2, 5)
    halves = _pad_outputs(pairs).reshape(-1, TILE_OUTPUTS, blocks, 2, 2).transpose(0, 2, 3, 1, 4)
    count = len(parts)
    return _concat_block_parts([parts.reshape(count, blocks, -1), halves.reshape(count, blocks, -1)], bits, len(ids))


def _pad_outputs(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Fills up the outputs, along the first axis, with zeros to whole tiles."""
    missing = -len(x) % TILE_OUTPUTS
    return np.concatenate([x, np.zeros((missing, *x.shape[1:]), x.dtype)]) if missing else x


def _split_tiles(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Reshapes [O, blocks, ...] to [tiles, blocks, 32, ...]."""
    return _pad_outputs(x).reshape(-1, TILE_OUTPUTS, *x.shape[1:]).swapaxes(1, 2)
