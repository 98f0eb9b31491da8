"""Matrix products with codes of 4 to 6 bits, and their dequantization: codes, scales and bits as they are held.

The tile is that of quantized_matmul.py. The fifth and sixth bits of 32 codes of an output are one word each, so that
they are extracted by a shift.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from plait.kernels.coded_weights import SPAN_PAIR, CodedWeight
from plait.kernels.triton.linear.quantized_matmul import check_operands, finish, launch, pairs_of_split


@triton.jit
def _codes(packed, high_ptr, half_span, n, outs, j, HALF: tl.constexpr, PLANES: tl.constexpr):
    """The codes [n, 32] of 32 input channels, int32; `packed` [n, 32] has their lowest four bits."""
    codes = (packed >> (4 * HALF)) & 15
    for plane in tl.static_range(PLANES):
        word = tl.load(high_ptr + (half_span * PLANES + plane).to(tl.int64) * outs + n, mask=n < outs, other=0)
        codes |= ((word[:, None] >> j[None, :]) & 1) << (4 + plane)
    return codes


@triton.jit
def _scaled(values_ptr, super_ptr, first, n, outs, j, GROUP: tl.constexpr, HAS_SUPER: tl.constexpr):
    """Scales or minima, float32 [n, 32 or 1], of the 32 input channels from `first` on."""
    at = (first // GROUP) * outs + n
    values = tl.load(values_ptr + at, mask=n < outs, other=0).to(tl.float32)[:, None]
    if GROUP == 16:
        later = tl.load(values_ptr + at + outs, mask=n < outs, other=0).to(tl.float32)[:, None]
        values = tl.where(j[None, :] < 16, values, later)
    if HAS_SUPER:
        values *= tl.load(super_ptr + (first // 256) * outs + n, mask=n < outs, other=0.0).to(tl.float32)[:, None]
    return values


@triton.jit
def _coded_matmul(
    x_ptr,
    packed_ptr,
    high_ptr,
    scales_ptr,
    minima_ptr,
    super_scales_ptr,
    super_minima_ptr,
    table_ptr,
    bias_ptr,
    out_ptr,
    rows,
    outs,
    channels,
    pairs,
    pairs_per_split,
    x_stride,
    out_stride,
    GROUP: tl.constexpr,
    OFFSET: tl.constexpr,
    PLANES: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
    HAS_SUPER: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    split = tl.program_id(2)
    j = tl.arange(0, 32)
    x_row = x_ptr + m[None, :].to(tl.int64) * x_stride  # [1, BM]
    acc = tl.zeros((BN, BM), tl.float32)
    for number in range(0, pairs_of_split(split, pairs_per_split, pairs)):
        pair = split * pairs_per_split + number
        for step in tl.static_range(2):
            span = pair * 2 + step
            at = (span.to(tl.int64) * outs + n)[:, None] * 32 + j[None, :]
            packed = tl.load(packed_ptr + at, mask=(n < outs)[:, None], other=0).to(tl.int32)  # [BN, 32]
            for half in tl.static_range(2):
                first = span * 64 + half * 32
                k = first + j
                x = tl.load(x_row + k[:, None], mask=(k < channels)[:, None] & (m < rows)[None, :], other=0.0)
                codes = _codes(packed, high_ptr, span * 2 + half, n, outs, j, half, PLANES)
                if HAS_TABLE:
                    scale = _scaled(scales_ptr, super_scales_ptr, first, n, outs, j, GROUP, HAS_SUPER)
                    wide = tl.load(table_ptr + codes) * scale
                else:  # 2^23 + q has q in its lowest bits: one OR and one subtraction convert an integer to float32
                    numbers = (codes | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + OFFSET)
                    wide = numbers * _scaled(scales_ptr, super_scales_ptr, first, n, outs, j, GROUP, HAS_SUPER)
                if HAS_MINIMA:
                    wide += _scaled(minima_ptr, super_minima_ptr, first, n, outs, j, GROUP, HAS_SUPER)
                acc = tl.dot(wide.to(x.dtype), x, acc)
    finish(acc, out_ptr, bias_ptr, m, n, rows, outs, out_stride, split, HAS_BIAS, SPLITS)


@triton.jit
def _dequantize_coded(
    packed_ptr,
    high_ptr,
    scales_ptr,
    minima_ptr,
    super_scales_ptr,
    super_minima_ptr,
    table_ptr,
    rows_ptr,
    out_ptr,
    first_out,
    count,
    outs,
    channels,
    GROUP: tl.constexpr,
    OFFSET: tl.constexpr,
    PLANES: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
    HAS_SUPER: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    HAS_ROWS: tl.constexpr,
):
    i = tl.program_id(0) * 64 + tl.arange(0, 64)
    n = first_out + i
    if HAS_ROWS:
        n = tl.load(rows_ptr + i, mask=i < count, other=0)
    n = tl.where(i < count, n, outs)  # beyond the last: nothing is read
    span = tl.program_id(1)
    j = tl.arange(0, 32)
    at = (span.to(tl.int64) * outs + n)[:, None] * 32 + j[None, :]
    packed = tl.load(packed_ptr + at, mask=(n < outs)[:, None], other=0).to(tl.int32)  # [64, 32]
    for half in tl.static_range(2):
        first = span * 64 + half * 32
        codes = _codes(packed, high_ptr, span * 2 + half, n, outs, j, half, PLANES)
        numbers = tl.load(table_ptr + codes) if HAS_TABLE else codes.to(tl.float32) - OFFSET
        wide = numbers * _scaled(scales_ptr, super_scales_ptr, first, n, outs, j, GROUP, HAS_SUPER)
        if HAS_MINIMA:
            wide += _scaled(minima_ptr, super_minima_ptr, first, n, outs, j, GROUP, HAS_SUPER)
        to = out_ptr + i[:, None].to(tl.int64) * channels + first + j[None, :]
        inside = (i < count)[:, None] & (first + j < channels)[None, :]
        tl.store(to, wide.to(out_ptr.dtype.element_ty), mask=inside)


def coded_matmul(
    x: torch.Tensor, weight: CodedWeight, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `reference_matmul.coded_matmul`, for x in bfloat16 or float16 with K contiguous; else ValueError."""
    out = check_operands(x, weight.in_features, weight.out_features, bias, out)
    x = x if weight.order is None else x[:, weight.order]
    launch(_coded_matmul, _tensors(weight), x, bias, out, len(weight.packed) // 2, **_constants(weight))
    return out


def dequantize_coded(
    weight: CodedWeight, rows: torch.Tensor | None, first: int, count: int, dtype: torch.dtype
) -> torch.Tensor:
    """Dequantizes the output channels `rows`, or `count` of them from `first` on, to [count, K]."""
    out = torch.empty((count, weight.in_features), dtype=dtype, device=weight.packed.device)
    if count:
        _dequantize_coded[triton.cdiv(count, 64), triton.cdiv(weight.in_features, SPAN_PAIR // 2)](
            *_tensors(weight), rows, out, first, count, weight.out_features, weight.in_features,
            HAS_ROWS=rows is not None, num_warps=4, **_constants(weight),
        )  # fmt: skip
    return out


def _tensors(weight: CodedWeight) -> tuple[torch.Tensor | None, ...]:
    scales = weight.scales, weight.minima, weight.super_scales, weight.super_minima
    return weight.packed, weight.high, *scales, weight.table


def _constants(weight: CodedWeight) -> dict[str, Any]:
    return {
        "GROUP": weight.group,
        "OFFSET": weight.offset,
        "PLANES": weight.planes,
        "HAS_MINIMA": weight.minima is not None,
        "HAS_SUPER": weight.super_scales is not None,
        "HAS_TABLE": weight.table is not None,
    }
