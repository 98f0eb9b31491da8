"""Quantized weights as float32, and their products with activations in float32 or 16 bits, in plain torch.

Products are summed in float32 and rounded once to the input's dtype. Quantized weights are rounded to x's dtype before
the product, so the result is that of the dequantized model in that dtype.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from plait.kernels.coded_weights import HALF_SPAN, SUPERBLOCK, CodedWeight, in_input_order
from plait.kernels.operators import DenseLinearOp, LinearOp
from plait.kernels.quantized_weights import (
    Float8Weight,
    Int8Weight,
    LinearWeight,
    QuantizedWeight,
    SimpleWeight,
    StackedWeight,
    num_outputs,
    select_outputs,
)


def dequantize_coded(weight: CodedWeight) -> torch.Tensor:
    """Returns the float32 weight [N, K], its columns in the order of the inputs.

    Values of GGUF's blocks are equal to the last bit.
    """
    halves = torch.stack([weight.packed & 15, weight.packed >> 4], dim=1).flatten(0, 1).to(torch.int32)  # [2 S, N, 32]
    shifts = torch.arange(HALF_SPAN, dtype=torch.int32, device=halves.device)
    for plane in range(weight.planes):
        assert weight.high is not None
        halves |= ((weight.high[:, plane, :, None] >> shifts) & 1) << (4 + plane)
    codes = halves.permute(1, 0, 2).flatten(1)[:, : weight.in_features]
    numbers = (codes - weight.offset).float() if weight.table is None else weight.table[codes.long()]

    def of_inputs(values: torch.Tensor, of_superblocks: torch.Tensor | None) -> torch.Tensor:
        wide = values.float().T.repeat_interleave(weight.group, dim=1)[:, : weight.in_features]
        if of_superblocks is None:
            return wide
        return of_superblocks.float().T.repeat_interleave(SUPERBLOCK, dim=1)[:, : wide.shape[1]] * wide

    numbers *= of_inputs(weight.scales, weight.super_scales)
    if weight.minima is not None:
        numbers += of_inputs(weight.minima, weight.super_minima)
    return in_input_order(numbers, weight)


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


def dequantize(weight: QuantizedWeight) -> torch.Tensor:
    """Returns the float32 weight [N, K], its columns in the order of the inputs."""
    return dequantize_coded(weight) if isinstance(weight, CodedWeight) else dequantize_int8(weight)


def coded_matmul(
    x: torch.Tensor, weight: CodedWeight, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N]; returns [M, N] in x's dtype."""
    return _finish(x.float() @ dequantize_coded(weight).to(x.dtype).float().T, bias, x.dtype, out)


def int8_matmul(
    x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `coded_matmul`, also for float8; with one scale per output channel, the scale multiplies the sum."""
    if weight.is_grouped:
        return _finish(x.float() @ dequantize_int8(weight).to(x.dtype).float().T, bias, x.dtype, out)
    return _finish((x.float() @ unscaled_values(weight).T) * weight.scales, bias, x.dtype, out)


def _finish(
    product: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, out: torch.Tensor | None
) -> torch.Tensor:
    result = (product if bias is None else product + bias.float()).to(dtype)
    return result if out is None else out.copy_(result)


def make_linear(dense: DenseLinearOp = functional.linear) -> LinearOp:
    """Returns a linear layer for weights in any format: `dense` for tensors, else the products above."""

    def product(x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None) -> torch.Tensor:
        if isinstance(weight, StackedWeight):
            sizes = [num_outputs(part) for part in weight.parts]
            biases = [None] * len(sizes) if bias is None else torch.split(bias, sizes)
            return torch.cat([product(x, part, each) for part, each in zip(weight.parts, biases, strict=True)], dim=1)
        if isinstance(weight, torch.Tensor):
            return dense(x, weight, bias)
        return coded_matmul(x, weight, bias) if isinstance(weight, CodedWeight) else int8_matmul(x, weight, bias)

    return product


def dequantize_rows(weight: SimpleWeight, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the output channels `rows` [n] of a weight [N, K], dequantized to `dtype`: [n, K].

    A weight that is a tensor keeps its dtype.
    """
    selected = select_outputs(weight, rows)
    return selected if isinstance(selected, torch.Tensor) else dequantize(selected).to(dtype)
