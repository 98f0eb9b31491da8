"""Weights of GGUF's blocks of 2 to 6 bits, arranged for matrix products on a GPU without changing a number.

Four bits of every code are packed as in `Int4Weight`. The fifth and sixth bits of 32 codes are one word each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.nn.functional import pad

from plait.kernels.gguf_dequantize import GGUF_BLOCK_SHAPES, read_blocks

SPAN = 64  # input channels of 32 bytes of `packed`
SPAN_PAIR = 2 * SPAN  # kernels process two spans at a time
HALF_SPAN = 32
SUPERBLOCK = 256  # input channels that share a super_scale
CODE_BITS = {"Q2_K": 4, "Q3_K": 4, "Q4_K": 4, "Q5_0": 5, "Q5_1": 5, "Q5_K": 5, "Q6_K": 6}  # as they are held


@dataclass(frozen=True)
class GGUFWeight:
    """A weight [N, K] as integers q of 4 to 6 bits: scale * (q - offset), or scale * q + minimum.

    A scale is scales[k // group, n], times super_scales[k // 256, n] where there are such; a minimum likewise. S spans
    of 64 input channels cover K, padded to whole pairs of spans; what pads has a scale of 0.
    """

    packed: torch.Tensor  # [S, N, 32] uint8: byte j has the low bits of channel 64 s + j, and of 32 channels later
    high: torch.Tensor | None  # [2 S, P, N] int32: bit j of word (h, p, n) is bit 4 + p of channel 32 h + j
    scales: torch.Tensor  # [64 S / group, N] uint8, int8 or float16
    minima: torch.Tensor | None  # like scales
    super_scales: torch.Tensor | None  # [64 S / 256, N] float16
    super_minima: torch.Tensor | None  # like super_scales
    group: int  # input channels that share a scale: 16 or 32
    offset: int
    in_features: int  # K

    @property
    def out_features(self) -> int:
        return self.packed.shape[1]

    @property
    def planes(self) -> int:
        """The number of bits of a code beyond four."""
        return 0 if self.high is None else self.high.shape[1]


def weight_from_gguf(raw: torch.Tensor, quantization: str, shape: tuple[int, int]) -> GGUFWeight:
    """Rearranges blocks `raw` (uint8) of a weight [N, K] in a format of CODE_BITS, on the device that has them.

    Raises ValueError for other formats, or a number of bytes that does not fit the shape.
    """
    outs, channels = shape
    values, size = GGUF_BLOCK_SHAPES.get(quantization, (1, 0))
    if quantization not in CODE_BITS or channels % values or raw.numel() != outs * channels // values * size:
        raise ValueError(f"{raw.numel()} bytes do not hold {quantization} of shape {shape}")
    blocks = read_blocks(raw, quantization)
    group = values // blocks.scales.shape[1]
    spans = -(-channels // SPAN_PAIR) * 2

    def by_input(of_blocks: torch.Tensor | None, step: int) -> torch.Tensor | None:
        if of_blocks is None:
            return None
        rows = of_blocks.reshape(outs, channels // step)
        return pad(rows, (0, spans * SPAN // step - rows.shape[1])).T.contiguous()

    scales = by_input(blocks.scales, group)
    assert scales is not None
    codes = pad(blocks.codes.reshape(shape), (0, spans * SPAN - channels))
    packed, high = _pack(codes.view(outs, spans, 2, HALF_SPAN), CODE_BITS[quantization] - 4)
    return GGUFWeight(
        packed, high, scales, by_input(blocks.minima, group), by_input(blocks.block_scales, SUPERBLOCK),
        by_input(blocks.block_minima, SUPERBLOCK), group, blocks.offset, channels,
    )  # fmt: skip


def _pack(codes: torch.Tensor, planes: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Packs codes [N, S, 2, 32] uint8 into low bits [S, N, 32] and words of high bits [2 S, planes, N]."""
    low = codes & 15
    packed = (low[:, :, 0] | (low[:, :, 1] << 4)).transpose(0, 1).contiguous()
    if not planes:
        return packed, None
    shifts = torch.arange(HALF_SPAN, device=codes.device)
    words = [(((codes >> (4 + plane)) & 1).long() << shifts).sum(-1).to(torch.int32) for plane in range(planes)]
    return packed, torch.stack(words, dim=-1).flatten(1, 2).permute(1, 2, 0).contiguous()  # of [N, S, 2, planes]


def dequantize_gguf(weight: GGUFWeight) -> torch.Tensor:
    """Returns the float32 weight [N, K], equal to the blocks' values to the last bit."""
    halves = torch.stack([weight.packed & 15, weight.packed >> 4], dim=1).flatten(0, 1).to(torch.int32)  # [2 S, N, 32]
    shifts = torch.arange(HALF_SPAN, dtype=torch.int32, device=halves.device)
    for plane in range(weight.planes):
        assert weight.high is not None
        halves |= ((weight.high[:, plane, :, None] >> shifts) & 1) << (4 + plane)
    numbers = (halves - weight.offset).permute(1, 0, 2).flatten(1).float()

    def of_inputs(values: torch.Tensor, of_superblocks: torch.Tensor | None) -> torch.Tensor:
        wide = values.float().T.repeat_interleave(weight.group, dim=1)
        if of_superblocks is None:
            return wide
        return of_superblocks.float().T.repeat_interleave(SUPERBLOCK, dim=1)[:, : wide.shape[1]] * wide

    numbers *= of_inputs(weight.scales, weight.super_scales)
    if weight.minima is not None:
        numbers += of_inputs(weight.minima, weight.super_minima)
    return numbers[:, : weight.in_features]


def concat_gguf_outputs(parts: Sequence[GGUFWeight]) -> GGUFWeight:
    """Concatenates the output channels of weights of one format. ValueError if their formats or inputs differ."""
    if len({_layout(part) for part in parts}) > 1:
        raise ValueError("weights in different forms cannot be one weight")
    return _map_tensors(
        parts[0], lambda name: torch.cat([getattr(part, name) for part in parts], 1 if name == "packed" else -1)
    )


def select_gguf_outputs(weight: GGUFWeight, rows: torch.Tensor) -> GGUFWeight:
    """Returns the weight [n, K] of the output channels `rows` [n], in that order."""
    return _map_tensors(
        weight,
        lambda name: getattr(weight, name)[:, rows] if name == "packed" else getattr(weight, name)[..., rows],
    )


def _layout(weight: GGUFWeight) -> tuple[object, ...]:
    """What weights must share to be one."""
    return weight.group, weight.offset, weight.in_features, weight.planes, weight.minima is None, weight.scales.dtype


def _map_tensors(weight: GGUFWeight, change: Callable[[str], torch.Tensor]) -> GGUFWeight:
    names = [field.name for field in fields(weight) if isinstance(getattr(weight, field.name), torch.Tensor)]
    changed: dict[str, Any] = {name: change(name) for name in names}
    return replace(weight, **changed)
