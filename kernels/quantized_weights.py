"""Weights in 4 and 8 bits: their memory layout, quantization and dequantization.

Int4: the input channels are in spans of 64, padded to whole pairs of spans. A span of one output channel is 32 bytes:
byte j has channel j in its low nibble and channel 32 + j in its high one. The spans of all output channels are
adjacent, so that a tile of a matrix product is contiguous in memory.

    packed[s, n, j] = q[n, 64 s + j] | q[n, 64 s + 32 + j] << 4
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from plait.kernels.gguf_weights import (
    SPAN,
    SPAN_PAIR,
    GGUFWeight,
    concat_gguf_outputs,
    dequantize_gguf,
    select_gguf_outputs,
)


@dataclass(frozen=True)
class Int4Weight:
    """A weight [N, K] as 4-bit integers q: scale * (q - 8), scale * q + minimum, or scale * table[q].

    `order` [K] int64: the weight's columns are input channels order[0], order[1], ...; None: in their own order.
    """

    packed: torch.Tensor  # [S, N, 32] uint8, S spans
    scales: torch.Tensor  # [S * 64 / group, N] float16, bfloat16 or float32
    minima: torch.Tensor | None  # like scales
    group: int  # input channels that share a scale: a multiple of 32
    in_features: int  # K
    table: torch.Tensor | None = None  # [16] float32
    order: torch.Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.packed.shape[1]


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


QuantizedWeight = Int4Weight | Int8Weight | GGUFWeight
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


def pack_int4(integers: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None, group: int) -> Int4Weight:
    """Packs integers [N, K] from 0 to 15 with scales (and minima) [N, ceil(K / group)]. Padding dequantizes to 0.

    Raises ValueError if the group is no multiple of 32, or the shapes do not fit.
    """
    out_features, in_features = integers.shape
    if group < 32 or group % 32:
        raise ValueError(f"int4 weights come in groups of a multiple of 32, not {group}")
    if scales.shape != (out_features, -(-in_features // group)) or (
        minima is not None and minima.shape != scales.shape
    ):
        raise ValueError(
            f"scales {tuple(scales.shape)} do not fit weights {tuple(integers.shape)} in groups of {group}"
        )
    extra = -in_features % SPAN_PAIR
    spans = pad(integers.to(torch.uint8), (0, extra), value=8).view(out_features, -1, 2, SPAN // 2)  # [N, S, 2, 32]
    packed = spans[:, :, 0] | (spans[:, :, 1] << 4)
    groups = -(-(in_features + extra) // group)

    def side_by_side(values: torch.Tensor) -> torch.Tensor:
        return pad(values, (0, groups - values.shape[1])).T.contiguous()

    lowest = None if minima is None else side_by_side(minima)
    return Int4Weight(packed.transpose(0, 1).contiguous(), side_by_side(scales), lowest, group, in_features)


def quantize_int4(weight: torch.Tensor, group: int, *, with_minima: bool = False) -> Int4Weight:
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


def int4_from_gguf(raw: torch.Tensor, quantization: str, shape: tuple[int, int]) -> Int4Weight:
    """Repacks Q4_0 or Q4_1 blocks `raw` (uint8) of a weight [N, K] without loss. ValueError for other formats."""
    size = {"Q4_0": 18, "Q4_1": 20}.get(quantization)
    if size is None:
        raise ValueError(f"{quantization} cannot be held as int4 without loss; Q4_0 and Q4_1 can")
    out_features, in_features = shape
    if in_features % 32 or raw.numel() != out_features * in_features // 32 * size:
        raise ValueError(f"{raw.numel()} bytes do not hold {quantization} of shape {shape}")
    blocks = raw.reshape(out_features, in_features // 32, size)
    heads = blocks[..., : size - 16].contiguous().view(torch.float16)  # [N, K / 32, 1 or 2]
    nibbles = blocks[..., size - 16 :]  # byte j: channel j low, channel 16 + j high
    integers = torch.cat([nibbles & 15, nibbles >> 4], dim=-1).reshape(shape)
    return pack_int4(integers, heads[..., 0], heads[..., 1] if quantization == "Q4_1" else None, 32)


def dequantize_int4(weight: Int4Weight) -> torch.Tensor:
    """Returns the float32 weight [N, K], its columns in the order of the inputs."""
    spans = torch.stack([weight.packed & 15, weight.packed >> 4], dim=2)  # [S, N, 2, 32]
    codes = spans.permute(1, 0, 2, 3).reshape(weight.out_features, len(weight.packed) * SPAN)
    codes = codes[:, : weight.in_features]

    def of_inputs(values: torch.Tensor) -> torch.Tensor:
        return values.float().T.repeat_interleave(weight.group, dim=1)[:, : weight.in_features]

    if weight.table is not None:
        values = of_inputs(weight.scales) * weight.table[codes.long()]
    elif weight.minima is None:
        values = of_inputs(weight.scales) * (codes.float() - 8)
    else:
        values = of_inputs(weight.scales) * codes.float() + of_inputs(weight.minima)
    return in_input_order(values, weight)


def in_input_order(values: torch.Tensor, weight: Int4Weight) -> torch.Tensor:
    """Moves columns [n, K] from the weight's order to that of the inputs."""
    if weight.order is None:
        return values
    result = torch.empty_like(values)
    result[:, weight.order] = values
    return result


def int8_from_gguf(raw: torch.Tensor, shape: tuple[int, int]) -> Int8Weight:
    """Repacks Q8_0 blocks `raw` (uint8) of a weight [N, K] without loss. ValueError for a wrong number of bytes."""
    out_features, in_features = shape
    if in_features % 32 or raw.numel() != out_features * in_features // 32 * 34:
        raise ValueError(f"{raw.numel()} bytes do not hold Q8_0 of shape {shape}")
    blocks = raw.reshape(out_features, in_features // 32, 34)
    scales = blocks[..., :2].contiguous().view(torch.float16)[..., 0]
    return Int8Weight(blocks[..., 2:].contiguous().view(torch.int8).view(shape), scales.T.contiguous())


def unscaled_values(weight: Int8Weight) -> torch.Tensor:
    """Returns the values [N, K] in float32, without their scales."""
    is_float8 = isinstance(weight, Float8Weight)
    return (weight.values.view(torch.float8_e4m3fn) if is_float8 else weight.values).float()


def dequantize_int8(weight: Int8Weight) -> torch.Tensor:
    """Returns the float32 weight [N, K]."""
    scales = weight.scales[:, None]
    if weight.is_grouped:
        scales = weight.scales.float().T.repeat_interleave(weight.group, dim=1)[:, : weight.values.shape[1]]
    return unscaled_values(weight) * scales


def quantize_int8(weight: torch.Tensor) -> Int8Weight:
    """Rounds weight [N, K] to 8 bits with one scale per output channel."""
    scales = weight.float().abs().amax(1).clamp(min=1e-12) / 127
    return Int8Weight((weight.float() / scales[:, None]).round().clamp(-127, 127).to(torch.int8), scales)


def dequantize(weight: QuantizedWeight) -> torch.Tensor:
    """Returns the float32 weight [N, K], its columns in the order of the inputs."""
    if isinstance(weight, GGUFWeight):
        return dequantize_gguf(weight)
    return dequantize_int4(weight) if isinstance(weight, Int4Weight) else dequantize_int8(weight)


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
    """Concatenates the output channels of weights with the same inputs. ValueError if their formats differ.

    4-bit weights with and without minima fit together: -8 times the scale is a minimum.
    """
    if len(parts) == 1:
        return parts[0]
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    int4_parts = [part for part in parts if isinstance(part, Int4Weight)]
    int8_parts = [part for part in parts if isinstance(part, Int8Weight)]
    gguf_parts = [part for part in parts if isinstance(part, GGUFWeight)]
    if len(tensors) == len(parts):
        return torch.cat(tensors)
    if len(gguf_parts) == len(parts):
        return concat_gguf_outputs(gguf_parts)
    if len(int4_parts) == len(parts) and all(_fit(int4_parts[0], part) for part in int4_parts):
        return _concat_int4_outputs(int4_parts)
    if len(int8_parts) == len(parts):
        kinds = {_kind(part) for part in int8_parts}
        if len(kinds) == 1:
            return _concat_int8_outputs(int8_parts)
    raise ValueError("weights in different forms cannot be one weight")


def _fit(first: Int4Weight, second: Int4Weight) -> bool:
    """Whether two weights can be one: with the same inputs, groups, order and table."""
    pairs = ((first.table, second.table), (first.order, second.order))
    return (first.group, first.in_features) == (second.group, second.in_features) and all(
        one is other or (one is not None and other is not None and torch.equal(one, other)) for one, other in pairs
    )


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


def _concat_int4_outputs(parts: Sequence[Int4Weight]) -> Int4Weight:
    minima = None
    if any(part.minima is not None for part in parts):
        minima = torch.cat([part.scales * -8 if part.minima is None else part.minima for part in parts], dim=1)
    packed = torch.cat([part.packed for part in parts], dim=1)
    return replace(parts[0], packed=packed, scales=torch.cat([part.scales for part in parts], dim=1), minima=minima)


def select_outputs(weight: SimpleWeight, rows: torch.Tensor) -> SimpleWeight:
    """Returns the weight [n, K] of the output channels `rows` [n], in that order and in the same format."""
    if isinstance(weight, torch.Tensor):
        return weight[rows]
    if isinstance(weight, GGUFWeight):
        return select_gguf_outputs(weight, rows)
    if isinstance(weight, Float8Weight):
        weight = replace(weight, output_block=1)
    if isinstance(weight, Int8Weight):
        return replace(weight, values=weight.values[rows], scales=weight.scales[..., rows])
    minima = None if weight.minima is None else weight.minima[:, rows]
    return replace(weight, packed=weight.packed[:, rows], scales=weight.scales[:, rows], minima=minima)
