"""Weights in 4 to 8 bits: quantization, and the layout of those in 8 bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from plait.kernels.coded_weights import (
    CodedWeight,
    concat_coded_outputs,
    pack_int4,
    select_coded_outputs,
)


@dataclass(frozen=True)
class Int8Weight:
    """A weight [N, K] as values times scales: one scale per output channel, or per `group` inputs of it."""

    values: torch.Tensor  # [N, K] int8
    scales: torch.Tensor  # [N] float32, or [ceil(K / group), N] in any float
    group: int = 32  # a multiple of 32

    @property
    def is_grouped(self) -> bool:
        return self.scales.dim() == 2


@dataclass(frozen=True)
class Float8Weight(Int8Weight):
    """As `Int8Weight`; the values are the bits of float8 e4m3fn, [N, K] uint8, all of them numbers."""

    quantizes_activations: bool = True  # whether the checkpoint is made for activations in float8
    output_block: int = 1  # each so many outputs, from the first on, have the same scales

    @property
    def activation_group(self) -> int | None:
        """Input channels of activations that share a scale: a divisor of `group`; None: all of a token's."""
        if not self.is_grouped:
            return None
        return 128 if self.group % 128 == 0 else 64


QuantizedWeight = CodedWeight | Int8Weight
SimpleWeight = torch.Tensor | QuantizedWeight  # a weight [N, K] in one format


@dataclass(frozen=True)
class StackedWeight:
    """Weights [N, K] in different formats, whose outputs are concatenated."""

    parts: tuple[SimpleWeight, ...]


LinearWeight = SimpleWeight | StackedWeight


def num_outputs(weight: SimpleWeight) -> int:
    """Returns N of a weight [N, K]."""
    if isinstance(weight, torch.Tensor):
        return len(weight)
    return len(weight.values) if isinstance(weight, Int8Weight) else weight.out_features


def quantize_int4(weight: torch.Tensor, group: int, *, with_minima: bool = False) -> CodedWeight:
    """Rounds weight [N, K] to 4 bits with a scale per group: symmetric as GGUF's Q4_0, or with minima as Q4_1."""
    out_features, in_features = weight.shape
    grouped = pad(weight.float(), (0, -in_features % group)).view(out_features, -1, group)
    if with_minima:
        low, high = grouped.amin(-1), grouped.amax(-1)
        scales, minima = ((high - low) / 15).half(), low.half()
        integers = (grouped - minima.float()[..., None]) / scales.float()[..., None]
    else:
        largest = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True))[..., 0]  # signed; becomes the integer -8
        scales, minima = (largest / -8).half(), None
        integers = grouped / scales.float()[..., None] + 8
    integers = integers.nan_to_num(8.0).round().clamp(0, 15).view(out_features, -1)[:, :in_features]
    return pack_int4(integers, scales, minima, group)


def int8_from_gguf(raw: torch.Tensor, shape: tuple[int, int]) -> Int8Weight:
    """Repacks Q8_0 blocks `raw` (uint8) of a weight [N, K] without loss. ValueError for a wrong number of bytes."""
    out_features, in_features = shape
    if in_features % 32 or raw.numel() != out_features * in_features // 32 * 34:
        raise ValueError(f"{raw.numel()} bytes do not hold Q8_0 of shape {shape}")
    blocks = raw.reshape(out_features, in_features // 32, 34)
    scales = blocks[..., :2].contiguous().view(torch.float16)[..., 0]
    return Int8Weight(blocks[..., 2:].contiguous().view(torch.int8).view(shape), scales.T.contiguous())


def quantize_int8(weight: torch.Tensor) -> Int8Weight:
    """Rounds weight [N, K] to 8 bits with one scale per output channel."""
    scales = weight.float().abs().amax(1).clamp(min=1e-12) / 127
    return Int8Weight((weight.float() / scales[:, None]).round().clamp(-127, 127).to(torch.int8), scales)


def stack_outputs(parts: Sequence[SimpleWeight]) -> LinearWeight:
    """Concatenates the output channels of weights with the same inputs: as one weight where their formats allow it."""
    stacked: list[SimpleWeight] = []
    for part in parts:
        try:
            stacked[-1:] = [concat_outputs([*stacked[-1:], part])]
        except ValueError:
            stacked.append(part)
    return stacked[0] if len(stacked) == 1 else StackedWeight(tuple(stacked))


def concat_outputs(parts: Sequence[SimpleWeight]) -> SimpleWeight:
    """Concatenates the output channels of weights with the same inputs. ValueError if their formats differ."""
    if len(parts) == 1:
        return parts[0]
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    int8_parts = [part for part in parts if isinstance(part, Int8Weight)]
    coded_parts = [part for part in parts if isinstance(part, CodedWeight)]
    if len(tensors) == len(parts):
        return torch.cat(tensors)
    if len(coded_parts) == len(parts):
        return concat_coded_outputs(coded_parts)
    if len(int8_parts) == len(parts):
        kinds = {_kind(part) for part in int8_parts}
        if len(kinds) == 1:
            return _concat_int8_outputs(int8_parts)
    raise ValueError("weights in different forms cannot be one weight")


def _kind(part: Int8Weight) -> tuple[object, ...]:
    """What must be equal in weights that can be one."""
    group = part.group if part.is_grouped else None
    return (type(part), group, part.quantizes_activations if isinstance(part, Float8Weight) else None)


def _concat_int8_outputs(parts: Sequence[Int8Weight]) -> Int8Weight:
    first, values = parts[0], torch.cat([part.values for part in parts])
    scales = torch.cat([part.scales for part in parts], dim=-1)
    if not isinstance(first, Float8Weight):
        return replace(first, values=values, scales=scales)
    blocks = [part.output_block for part in parts if isinstance(part, Float8Weight)]
    block = math.gcd(*blocks, *(len(part.values) for part in parts[:-1]))  # each part begins with a complete block
    return replace(first, values=values, scales=scales, output_block=block)


def select_outputs(weight: SimpleWeight, rows: torch.Tensor) -> SimpleWeight:
    """Returns the weight [n, K] of the output channels `rows` [n], in that order and in the same format."""
    if isinstance(weight, torch.Tensor):
        return weight[rows]
    if isinstance(weight, CodedWeight):
        return select_coded_outputs(weight, rows)
    if isinstance(weight, Float8Weight):
        weight = replace(weight, output_block=1)
    return replace(weight, values=weight.values[rows], scales=weight.scales[..., rows])
