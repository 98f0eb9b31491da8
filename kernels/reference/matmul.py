"""Matrix products that torch does not have: of weights that alone are quantized.

Products are summed in float32 and rounded once to the input's dtype. Quantized weights are rounded to x's dtype before
the product, so the result is that of the dequantized model in that dtype.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from plait.kernels.gguf_weights import GGUFWeight, dequantize_gguf
from plait.kernels.operators import DenseLinearOp, LinearOp
from plait.kernels.quantized_weights import (
    Int4Weight,
    Int8Weight,
    LinearWeight,
    SimpleWeight,
    StackedWeight,
    dequantize,
    dequantize_int4,
    dequantize_int8,
    num_outputs,
    select_outputs,
    unscaled_values,
)


def int4_matmul(
    x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N]; returns [M, N] in x's dtype."""
    return _finish(x.float() @ dequantize_int4(weight).to(x.dtype).float().T, bias, x.dtype, out)


def int8_matmul(
    x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `int4_matmul`, also for float8; with one scale per output channel, the scale multiplies the sum."""
    if weight.is_grouped:
        return _finish(x.float() @ dequantize_int8(weight).to(x.dtype).float().T, bias, x.dtype, out)
    return _finish((x.float() @ unscaled_values(weight).T) * weight.scales, bias, x.dtype, out)


def gguf_matmul(
    x: torch.Tensor, weight: GGUFWeight, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `int4_matmul`."""
    return _finish(x.float() @ dequantize_gguf(weight).to(x.dtype).float().T, bias, x.dtype, out)


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
        if isinstance(weight, GGUFWeight):
            return gguf_matmul(x, weight, bias)
        return int4_matmul(x, weight, bias) if isinstance(weight, Int4Weight) else int8_matmul(x, weight, bias)

    return product


def dequantize_rows(weight: SimpleWeight, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the output channels `rows` [n] of a weight [N, K], dequantized to `dtype`: [n, K].

    A weight that is a tensor keeps its dtype.
    """
    selected = select_outputs(weight, rows)
    return selected if isinstance(selected, torch.Tensor) else dequantize(selected).to(dtype)
