"""Weights in the form that the CPU's matrix products read: 4 or 8 bits in blocks of 32 with a scale and a minimum.

GGUF's Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 go over as they are: the same numbers, the same float16 scales, and where the
format subtracts a middle (8, 16, 128), that middle times the scale as the minimum, which is exact. Other weights
are rounded: 4 bits to the block's smallest and largest value, 8 bits to the largest magnitude.

Knows: both layouts. Must not know: names of weights, models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from plait.kernels.cpu_tile import BLOCK, HALF, WIDTH, block_bytes

# format -> (bits we keep, bytes of a block before the numbers, middle that is taken off)
EXACT = {"Q4_0": (4, 8), "Q4_1": (4, 0), "Q5_0": (8, 16), "Q5_1": (8, 0), "Q8_0": (8, 128)}


@dataclass(frozen=True)
class Blocks:
    """A weight [O, C] in blocks of 32 inputs: scale * number + minimum.

    `numbers` uint8 [O, C / 32, 32]; `scales` and `minima` float16 [O, C / 32].
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor
    bits: int

    def rows(self, ids: torch.Tensor) -> Blocks:
        """Some of its rows."""
        return Blocks(self.numbers[ids], self.scales[ids], self.minima[ids], self.bits)

    def dense(self) -> torch.Tensor:
        """[O, C] float32."""
        wide = self.numbers.float() * self.scales.float()[..., None] + self.minima.float()[..., None]
        return wide.flatten(1)


@dataclass(frozen=True)
class Packed:
    """A weight as `cpu_tile` describes it; `outputs` of its rows are real, the last tile is filled up with zeros."""

    data: torch.Tensor  # uint8 [tiles, blocks, block_bytes]
    bits: int
    outputs: int

    @property
    def address(self) -> int:
        return self.data.data_ptr()

    @property
    def inputs(self) -> int:
        return self.data.shape[1] * BLOCK


def from_gguf(raw: torch.Tensor, quantization: str, shape: tuple[int, ...]) -> Blocks | None:
    """The stored numbers of a matrix, raw uint8 [O, bytes of a row]; None where they do not fit the form exactly."""
    if quantization not in EXACT or len(shape) != 2 or shape[1] % BLOCK:
        return None
    bits, middle = EXACT[quantization]
    blocks = raw.reshape(shape[0], shape[1] // BLOCK, -1)
    scales, has_minimum = _half(blocks, 0), quantization.endswith("1")
    minima = _half(blocks, 2) if has_minimum else -middle * scales
    at = 4 if has_minimum else 2
    if not bool(minima.isfinite().all()):
        return None  # the middle times the scale is beyond float16
    if quantization == "Q8_0":
        numbers = blocks[..., at:] ^ 128  # from signed to 128 more
    else:
        low = blocks[..., at + 4 * (bits == 8) :]
        numbers = torch.cat([low & 15, low >> 4], dim=-1)
        if bits == 8:
            fifth = (blocks[..., at : at + 4, None] >> torch.arange(8, dtype=torch.uint8)) & 1
            numbers |= fifth.flatten(-2) << 4
    return Blocks(numbers, scales.contiguous(), minima.contiguous(), bits)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte `at` of each block."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0]


def rounded(weight: torch.Tensor, bits: int) -> Blocks:
    """A float weight [O, C] in 4 or 8 bits. ValueError unless C is a multiple of 32."""
    if weight.shape[1] % BLOCK:
        raise ValueError(f"rows of {weight.shape[1]} are no multiple of {BLOCK}")
    blocks = weight.float().reshape(len(weight), -1, BLOCK)
    if bits == 8:
        largest = blocks.abs().amax(-1)
        scales = (largest / 127).half()
        minima = -128 * scales
    else:
        lowest, highest = blocks.amin(-1), blocks.amax(-1)
        scales, minima = ((highest - lowest) / 15).half(), lowest.half()
    steps = scales.float()[..., None]
    numbers = torch.where(steps > 0, (blocks - minima.float()[..., None]) / steps.clamp_min(1e-30), 0.0)
    return Blocks(numbers.round().clamp(0, 2**bits - 1).to(torch.uint8), scales, minima, bits)


def stacked(parts: Sequence[Blocks]) -> Blocks:
    """Weights with the same inputs as one, their outputs one after the other; 4 bits beside 8 become 8."""
    return Blocks(
        torch.cat([part.numbers for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat([part.minima for part in parts]),
        max(part.bits for part in parts),
    )


def alternating(first: Blocks, second: Blocks) -> Blocks:
    """Two weights of the same shape, 32 outputs of the one, then 32 of the other."""
    return Blocks(
        _alternate(first.numbers, second.numbers),
        _alternate(first.scales, second.scales),
        _alternate(first.minima, second.minima),
        max(first.bits, second.bits),
    )


def _alternate(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    shape = (-1, 1, WIDTH, *first.shape[1:])
    return torch.cat([first.reshape(shape), second.reshape(shape)], 1).flatten(0, 2)


def pack(weight: Blocks) -> Packed:
    """The tiles of `cpu_tile`."""
    outputs, blocks, _ = weight.numbers.shape
    # [tiles, blocks, half, output, four inputs each, input] -> [tiles, blocks, half, four inputs each, output, input]
    numbers = _tiled(weight.numbers).reshape(-1, blocks, 2, HALF, 8, 4).transpose(3, 4)
    if weight.bits == 4:
        numbers = numbers[:, :, :, 0::2] | numbers[:, :, :, 1::2] << 4
    ends = [_tiled(each).contiguous().view(torch.uint8) for each in (weight.scales, weight.minima)]
    data = torch.cat([numbers.reshape(len(numbers), blocks, -1), *ends], dim=-1)
    assert data.shape[-1] == block_bytes(weight.bits)
    return Packed(data.contiguous(), weight.bits, outputs)


def columns(weight: Packed, ids: torch.Tensor) -> Packed:
    """The weight of some outputs [k] only, in that order: products with it have the same bits."""
    bits, blocks = weight.bits, weight.data.shape[1]
    tile, lane = ids // WIDTH, ids % WIDTH
    place = lane % HALF
    halves = weight.data[..., : -4 * WIDTH].view(-1, blocks, 2, bits, HALF, 4)
    numbers = halves[tile, :, lane // HALF, :, place]  # [k, blocks, bits, 4]
    pairs = weight.data[..., -4 * WIDTH :].view(-1, blocks, 2, WIDTH, 2)[tile, :, :, lane]  # [k, blocks, 2, 2]
    parts = _filled(numbers).reshape(-1, 2, HALF, blocks, bits, 4).permute(0, 3, 1, 4, 2, 5)
    ends = _filled(pairs).reshape(-1, WIDTH, blocks, 2, 2).permute(0, 2, 3, 1, 4)
    data = torch.cat([parts.reshape(len(parts), blocks, -1), ends.reshape(len(parts), blocks, -1)], dim=-1)
    return Packed(data.contiguous(), bits, len(ids))


def _filled(x: torch.Tensor) -> torch.Tensor:
    """Outputs along the first axis, filled up with zeros to whole tiles."""
    return torch.cat([x, x.new_zeros(-len(x) % WIDTH, *x.shape[1:])])


def _tiled(x: torch.Tensor) -> torch.Tensor:
    """[O, blocks, ...] to [tiles, blocks, 32, ...]"""
    return _filled(x).reshape(-1, WIDTH, *x.shape[1:]).transpose(1, 2)
