"""Weights as codes of 4 to 6 bits, arranged for matrix products on a GPU: GGUF's blocks without a number changed, those
of published checkpoints, and weights that are rounded here.

The input channels are in spans of 64, padded to whole pairs of spans. Four bits of a span's codes of one output channel
are 32 bytes: byte j has channel j in its low nibble and channel 32 + j in its high one. The spans of all output
channels are adjacent, so that a tile of a matrix product is contiguous in memory. The fifth and sixth bits of 32 codes
are one word each.

    packed[s, n, j] = q[n, 64 s + j] & 15 | (q[n, 64 s + 32 + j] & 15) << 4
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
# GGUF's formats -> the bits of their codes as they are held
CODE_BITS = dict(Q2_K=4, Q3_K=4, Q4_0=4, Q4_1=4, Q4_K=4, Q5_0=5, Q5_1=5, Q5_K=5, Q6_K=6)


@dataclass(frozen=True, kw_only=True)
class CodedWeight:
    """A weight [N, K] as codes q of 4 to 6 bits: scale * (q - offset), scale * q + minimum, or scale * table[q].

    A scale is scales[k // group, n], times super_scales[k // 256, n] where there are such; a minimum likewise. S spans
    of 64 input channels cover K; what pads has a scale of 0. `order` [K] int64: the weight's columns are input channels
    order[0], order[1], ...; None: in their own order.
    """

    packed: torch.Tensor  # [S, N, 32] uint8, the low bits
    scales: torch.Tensor  # [64 S / group, N] uint8, int8 or float
    group: int  # input channels that share a scale: 16 or a multiple of 32
    in_features: int  # K
    offset: int = 0  # 0 with minima and with a table
    minima: torch.Tensor | None = None  # like scales
    high: torch.Tensor | None = None  # [2 S, P, N] int32: bit j of word (h, p, n) is bit 4 + p of channel 32 h + j
    super_scales: torch.Tensor | None = None  # [64 S / 256, N] float16
    super_minima: torch.Tensor | None = None  # like super_scales
    table: torch.Tensor | None = None  # [16] float32
    order: torch.Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.packed.shape[1]

    @property
    def planes(self) -> int:
        """The number of bits of a code beyond four."""
        return 0 if self.high is None else self.high.shape[1]


def weight_from_gguf(raw: torch.Tensor, quantization: str, shape: tuple[int, int]) -> CodedWeight:
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
        return _by_group(of_blocks.reshape(outs, channels // step), spans * SPAN // step)

    scales = by_input(blocks.scales, group)
    assert scales is not None
    packed, high = _pack(blocks.codes.reshape(shape), CODE_BITS[quantization] - 4, blocks.offset)
    return CodedWeight(
        packed=packed,
        scales=scales,
        group=group,
        in_features=channels,
        offset=blocks.offset,
        minima=by_input(blocks.minima, group),
        high=high,
        super_scales=by_input(blocks.block_scales, SUPERBLOCK),
        super_minima=by_input(blocks.block_minima, SUPERBLOCK),
    )


def pack_int4(
    integers: torch.Tensor,
    scales: torch.Tensor,
    minima: torch.Tensor | None,
    group: int,
    table: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
) -> CodedWeight:
    """Packs integers [N, K] from 0 to 15 with scales (and minima) [N, ceil(K / group)]; without minima and without a
    table, 8 is the weight 0.

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
    offset = 8 if minima is None and table is None else 0
    packed, _ = _pack(integers.to(torch.uint8), 0, offset)
    groups = -(-(len(packed) * SPAN) // group)
    return CodedWeight(
        packed=packed,
        scales=_by_group(scales, groups),
        group=group,
        in_features=in_features,
        offset=offset,
        minima=None if minima is None else _by_group(minima, groups),
        table=table,
        order=order,
    )


def _by_group(values: torch.Tensor, groups: int) -> torch.Tensor:
    """Scales or minima [N, G] as [groups, N], padded with 0."""
    return pad(values, (0, groups - values.shape[1])).T.contiguous()


def _pack(codes: torch.Tensor, planes: int, offset: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Packs codes [N, K] uint8, padded with `offset`: low bits [S, N, 32], and words of high bits [2 S, planes, N]."""
    padded = pad(codes, (0, -codes.shape[1] % SPAN_PAIR), value=offset)
    codes = padded.view(len(codes), -1, 2, HALF_SPAN)  # [N, S, 2, 32]
    low = codes & 15
    packed = (low[:, :, 0] | (low[:, :, 1] << 4)).transpose(0, 1).contiguous()
    if not planes:
        return packed, None
    shifts = torch.arange(HALF_SPAN, device=codes.device)
    words = [(((codes >> (4 + plane)) & 1).long() << shifts).sum(-1).to(torch.int32) for plane in range(planes)]
    return packed, torch.stack(words, dim=-1).flatten(1, 2).permute(1, 2, 0).contiguous()  # of [N, S, 2, planes]


def in_input_order(values: torch.Tensor, weight: CodedWeight) -> torch.Tensor:
    """Moves columns [n, K] from the weight's order to that of the inputs."""
    if weight.order is None:
        return values
    result = torch.empty_like(values)
    result[:, weight.order] = values
    return result


def concat_coded_outputs(parts: Sequence[CodedWeight]) -> CodedWeight:
    """Concatenates the output channels of weights of one format. ValueError if their formats or inputs differ.

    4-bit weights with and without minima fit together: -8 times the scale is a minimum.
    """
    if any(part.minima is not None for part in parts):
        parts = [_with_minima(part) for part in parts]
    first = parts[0]
    if not all(_layout(part) == _layout(first) and _share_tensors(first, part) for part in parts):
        raise ValueError("weights in different forms cannot be one weight")
    return _map_tensors(
        first, lambda name: torch.cat([getattr(part, name) for part in parts], 1 if name == "packed" else -1)
    )


def _with_minima(weight: CodedWeight) -> CodedWeight:
    """The weight with minima in place of its offset, if it has 4 bits, one scale for a number, and no table."""
    if weight.minima is not None or weight.planes or weight.super_scales is not None or weight.table is not None:
        return weight
    return replace(weight, minima=weight.scales * -weight.offset, offset=0)


def select_coded_outputs(weight: CodedWeight, rows: torch.Tensor) -> CodedWeight:
    """Returns the weight [n, K] of the output channels `rows` [n], in that order."""
    return _map_tensors(
        weight,
        lambda name: getattr(weight, name)[:, rows] if name == "packed" else getattr(weight, name)[..., rows],
    )


def _layout(weight: CodedWeight) -> tuple[object, ...]:
    """What weights must share to be one. Scales that are floats may have different types."""
    kind = torch.float32 if weight.scales.is_floating_point() else weight.scales.dtype
    return weight.group, weight.offset, weight.in_features, weight.planes, weight.minima is None, kind


def _share_tensors(first: CodedWeight, second: CodedWeight) -> bool:
    """Whether two weights have the same table and the same order of inputs."""
    pairs = ((first.table, second.table), (first.order, second.order))
    return all(
        one is other or (one is not None and other is not None and torch.equal(one, other)) for one, other in pairs
    )


def _map_tensors(weight: CodedWeight, change: Callable[[str], torch.Tensor]) -> CodedWeight:
    """The weight with its tensors of output channels changed."""
    names = [
        field.name
        for field in fields(weight)
        if isinstance(getattr(weight, field.name), torch.Tensor) and field.name not in ("table", "order")
    ]
    changed: dict[str, Any] = {name: change(name) for name in names}
    return replace(weight, **changed)
