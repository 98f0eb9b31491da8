"""Linear layers for weights in any format: chooses the matrix product by the number of rows, and dequantizes.

Up to MAX_FUSED_DEQUANT_ROWS tokens, a quantized weight is dequantized inside the product, where reading it is most of
the work. With more tokens, every tile of tokens would dequantize it again; then it is dequantized once to memory (a
few bytes per value, against 2 * rows operations), some outputs at a time, for the faster dense product. Float8 weights
of checkpoints made for float8 activations are multiplied as they are instead, where the tensor cores can.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional

from plait.kernels.coded_weights import CodedWeight, in_input_order
from plait.kernels.quantized_weights import (
    Float8Weight,
    LinearWeight,
    QuantizedWeight,
    SimpleWeight,
    StackedWeight,
    num_outputs,
)
from plait.kernels.triton.attention.tile_config import gpu_spec
from plait.kernels.triton.float8 import float8_over_256
from plait.kernels.triton.linear import float8_matmul as float8
from plait.kernels.triton.linear.coded_matmul import coded_matmul, dequantize_coded
from plait.kernels.triton.linear.quantized_matmul import int8_matmul

MAX_FUSED_DEQUANT_ROWS = 512
MAX_WIDENED_FLOAT8_ROWS = 64  # with more, activations are rounded to float8; up to here, memory bounds the product
DEQUANT_CHUNK_ELEMENTS = 1 << 25  # elements of a weight dequantized at a time: 64 MB


def linear(x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns x [M, K] times weight [N, K] transposed, plus bias [N]; [M, N] in x's dtype."""
    if isinstance(weight, torch.Tensor):
        return functional.linear(x, weight, bias)
    if not isinstance(weight, StackedWeight):
        return _quantized_linear(x, weight, bias, None)
    out = torch.empty((len(x), sum(map(num_outputs, weight.parts))), dtype=x.dtype, device=x.device)
    first = 0
    for part in weight.parts:
        last = first + num_outputs(part)
        part_bias, part_out = None if bias is None else bias[first:last], out[:, first:last]
        if isinstance(part, torch.Tensor):
            part_out.copy_(functional.linear(x, part, part_bias))
        else:
            _quantized_linear(x, part, part_bias, part_out)
        first = last
    return out


def _quantized_linear(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    if isinstance(weight, Float8Weight) and multiplies_float8(len(x), weight, x.device):
        return float8.float8_matmul(x, weight, bias, out)
    if len(x) > MAX_FUSED_DEQUANT_ROWS:
        return _dequantize_then_matmul(x, weight, bias, out)
    if isinstance(weight, CodedWeight):
        return coded_matmul(x, weight, bias, out)
    return int8_matmul(x, weight, bias, out)


def multiplies_float8(rows: int, weight: Float8Weight, device: torch.device) -> bool:
    """Whether a product of `rows` tokens rounds activations to float8."""
    is_possible = weight.quantizes_activations and gpu_spec(device).capability >= float8.MIN_CAPABILITY
    return is_possible and rows > MAX_WIDENED_FLOAT8_ROWS


def dequantize_rows(weight: SimpleWeight, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As `reference_matmul.dequantize_rows`; for a quantized weight, `rows` [n] are contiguous int32 or int64."""
    if isinstance(weight, torch.Tensor):
        return weight[rows]
    wide = _dequantize(weight, rows, 0, len(rows), dtype)
    return in_input_order(wide, weight) if isinstance(weight, CodedWeight) else wide


def _dequantize_then_matmul(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    outs = num_outputs(weight)
    if isinstance(weight, CodedWeight) and weight.order is not None:
        x = x[:, weight.order]
    if out is None:
        out = torch.empty((len(x), outs), dtype=x.dtype, device=x.device)
    step = max(64, DEQUANT_CHUNK_ELEMENTS // x.shape[1])
    for first in range(0, outs, step):
        last = min(outs, first + step)
        wide = _dequantize(weight, None, first, last - first, x.dtype)
        torch.mm(x, wide.T, out=out[:, first:last])
    return out if bias is None else out.add_(bias)


def _dequantize(
    weight: QuantizedWeight, rows: torch.Tensor | None, first: int, count: int, dtype: torch.dtype
) -> torch.Tensor:
    """Dequantizes the output channels `rows`, or `count` of them from `first` on: [count, K], in the weight's order."""
    if isinstance(weight, CodedWeight):
        return dequantize_coded(weight, rows, first, count, dtype)
    channels = weight.values.shape[1]
    out = torch.empty((count, channels), dtype=dtype, device=weight.scales.device)
    if count:
        _dequantize_int8[triton.cdiv(count, 64), triton.cdiv(channels, 64)](
            weight.values, weight.scales, rows, out, first, count, num_outputs(weight), channels,
            GROUP=weight.group if weight.is_grouped else 0, IS_FLOAT8=isinstance(weight, Float8Weight),
            HAS_ROWS=rows is not None, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _dequantize_int8(
    values_ptr,
    scales_ptr,
    rows_ptr,
    out_ptr,
    first,
    count,
    outs,
    channels,
    GROUP: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
    HAS_ROWS: tl.constexpr,
):
    i = tl.program_id(0) * 64 + tl.arange(0, 64)
    n = first + i
    if HAS_ROWS:
        n = tl.load(rows_ptr + i, mask=i < count, other=0)
    k = tl.program_id(1) * 64 + tl.arange(0, 64)
    inside = (i < count)[:, None] & (k < channels)[None, :]
    values = tl.load(values_ptr + n[:, None].to(tl.int64) * channels + k[None, :], mask=inside, other=0)
    if GROUP:
        scale = tl.load(scales_ptr + (k // GROUP)[None, :] * outs + n[:, None], mask=inside, other=0.0).to(tl.float32)
    else:
        scale = tl.load(scales_ptr + n, mask=i < count, other=0.0)[:, None]
    number = float8_over_256(values).to(tl.float32) * 256.0 if IS_FLOAT8 else values.to(tl.float32)
    wide = number * scale
    tl.store(out_ptr + i[:, None].to(tl.int64) * channels + k[None, :], wide.to(out_ptr.dtype.element_ty), mask=inside)
