"""Weights in the form that the CPU's matrix products read: 4 or 8 bits in blocks of 32 with a scale and a minimum.

GGUF's Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 go over as they are: the same numbers, the same float16 scales, and where the
format subtracts a middle (8, 16, 128), that middle times the scale as the minimum, which is exact. Other weights
are rounded: 4 bits to the block's smallest and largest value, 8 bits to the largest magnitude.

Knows: both layouts. Must not know: names of weights, models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from plait.kernels.cpu.gemm.int8_kernel import HALF_TILE, QUANT_BLOCK, TILE_OUTPUTS, block_bytes
from plait.kernels.cpu.kernel_args import aligned_empty

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.float16]

# format -> (bits we keep, bytes of a block before the numbers, middle that is taken off)
LOSSLESS_GGUF_FORMATS = {"Q4_0": (4, 8), "Q4_1": (4, 0), "Q5_0": (8, 16), "Q5_1": (8, 0), "Q8_0": (8, 128)}


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [O, C] in blocks of 32 inputs: scale * number + minimum.

    `qvalues` uint8 [O, C / 32, 32]; `scales` and `minima` float16 [O, C / 32].
    """

    qvalues: Bytes
    scales: Halves
    minima: Halves
    bits: int

    def dequantize(self) -> npt.NDArray[np.float32]:
        """[O, C] float32."""
        scales, minima = (each.astype(np.float32)[..., None] for each in (self.scales, self.minima))
        return (self.qvalues.astype(np.float32) * scales + minima).reshape(len(self.qvalues), -1)


@dataclass(frozen=True)
class PackedWeight:
    """A weight as `cpu_tile` describes it; `outputs` of its rows are real, the last tile is filled up with zeros."""

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
    """The stored numbers of a matrix, raw uint8 [O, bytes of a row]; None where they do not fit the form exactly."""
    if quantization not in LOSSLESS_GGUF_FORMATS or len(shape) != 2 or shape[1] % QUANT_BLOCK:
        return None
    bits, middle = LOSSLESS_GGUF_FORMATS[quantization]
    blocks = raw.reshape(shape[0], shape[1] // QUANT_BLOCK, -1)
    scales, has_minimum = _half(blocks, 0), quantization.endswith("1")
    with np.errstate(over="ignore"):
        minima = _half(blocks, 2) if has_minimum else (-middle * scales.astype(np.float32)).astype(np.float16)
    at = 4 if has_minimum else 2
    if not np.isfinite(minima).all():
        return None  # the middle times the scale is beyond float16
    if quantization == "Q8_0":
        qvalues = blocks[..., at:] ^ np.uint8(128)  # from signed to 128 more
    else:
        low = blocks[..., at + 4 * (bits == 8) :]
        qvalues = np.concatenate([low & 15, low >> 4], axis=-1)
        if bits == 8:
            fifth = np.unpackbits(blocks[..., at : at + 4], axis=-1, bitorder="little")
            qvalues |= fifth << 4
    return QuantizedWeight(qvalues, scales, minima, bits)


def _half(blocks: Bytes, at: int) -> Halves:
    """The float16 at byte `at` of each block."""
    found: Halves = np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0]
    return found


def quantize(weight: npt.NDArray[np.float32], bits: int) -> QuantizedWeight:
    """A float weight [O, C] in 4 or 8 bits. ValueError unless C is a multiple of 32."""
    if weight.shape[1] % QUANT_BLOCK:
        raise ValueError(f"rows of {weight.shape[1]} are no multiple of {QUANT_BLOCK}")
    blocks = weight.reshape(len(weight), -1, QUANT_BLOCK)
    if bits == 8:
        scales = (np.abs(blocks).max(-1) / np.float32(127)).astype(np.float16)
        minima = np.float16(-128) * scales
    else:
        lowest, highest = blocks.min(-1), blocks.max(-1)
        scales, minima = ((highest - lowest) / np.float32(15)).astype(np.float16), lowest.astype(np.float16)
    steps = scales.astype(np.float32)[..., None]
    above = blocks - minima.astype(np.float32)[..., None]
    qvalues = np.divide(above, steps, out=np.zeros_like(blocks), where=steps > 0)
    return QuantizedWeight(np.rint(qvalues).clip(0, 2**bits - 1).astype(np.uint8), scales, minima, bits)


def concat_outputs(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Weights with the same inputs as one, their outputs one after the other; 4 bits beside 8 become 8."""
    return QuantizedWeight(
        np.concatenate([part.qvalues for part in parts]),
        np.concatenate([part.scales for part in parts]),
        np.concatenate([part.minima for part in parts]),
        max(part.bits for part in parts),
    )


def interleave_tiles(first: QuantizedWeight, second: QuantizedWeight) -> QuantizedWeight:
    """Two weights of the same shape, 32 outputs of the one, then 32 of the other."""
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
    """The tiles of `cpu_tile`."""
    outputs, blocks, _ = weight.qvalues.shape
    # [tiles, blocks, half, output, four inputs each, input] -> [tiles, blocks, half, four inputs each, output, input]
    qvalues = _split_tiles(weight.qvalues).reshape(-1, blocks, 2, HALF_TILE, 8, 4).swapaxes(3, 4)
    if weight.bits == 4:
        qvalues = qvalues[:, :, :, 0::2] | qvalues[:, :, :, 1::2] << 4
    ends = [np.ascontiguousarray(_split_tiles(each)).view(np.uint8) for each in (weight.scales, weight.minima)]
    return _concat_block_parts([qvalues.reshape(len(qvalues), blocks, -1), *ends], weight.bits, outputs)


def _concat_block_parts(parts: Sequence[Bytes], bits: int, outputs: int) -> PackedWeight:
    """Blocks whose bytes are those of the parts, one after the other, from a cache line on."""
    data = aligned_empty((*parts[0].shape[:2], block_bytes(bits)), np.uint8)
    np.concatenate(parts, axis=-1, out=data)
    return PackedWeight(data, bits, outputs)


def select_outputs(weight: PackedWeight, ids: npt.NDArray[np.int64]) -> PackedWeight:
    """The weight of some outputs [k] only, in that order: products with it have the same bits."""
    bits, blocks = weight.bits, weight.data.shape[1]
    tile, lane = ids // TILE_OUTPUTS, ids % TILE_OUTPUTS
    halves = weight.data[..., : -4 * TILE_OUTPUTS].reshape(-1, blocks, 2, bits, HALF_TILE, 4)
    qvalues = halves[tile, :, lane // HALF_TILE, :, lane % HALF_TILE]  # [k, blocks, bits, 4]
    ends_of = weight.data[..., -4 * TILE_OUTPUTS :].reshape(-1, blocks, 2, TILE_OUTPUTS, 2)
    pairs = ends_of[tile, :, :, lane]  # [k, blocks, 2, 2]
    parts = _pad_outputs(qvalues).reshape(-1, 2, HALF_TILE, blocks, bits, 4).transpose(0, 3, 1, 4, 2, 5)
    ends = _pad_outputs(pairs).reshape(-1, TILE_OUTPUTS, blocks, 2, 2).transpose(0, 2, 3, 1, 4)
    count = len(parts)
    return _concat_block_parts([parts.reshape(count, blocks, -1), ends.reshape(count, blocks, -1)], bits, len(ids))


def _pad_outputs(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Outputs along the first axis, filled up with zeros to whole tiles."""
    missing = -len(x) % TILE_OUTPUTS
    return np.concatenate([x, np.zeros((missing, *x.shape[1:]), x.dtype)]) if missing else x


def _split_tiles(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[O, blocks, ...] to [tiles, blocks, 32, ...]"""
    return _pad_outputs(x).reshape(-1, TILE_OUTPUTS, *x.shape[1:]).swapaxes(1, 2)
