"""Reference of products of float8 e4m3 activations and weights: activations are quantized by their largest values."""

from __future__ import annotations

import torch
from reference_matmul import dequantize_int8, unscaled_values
from torch.nn.functional import pad

from plait.kernels.quantized_weights import Float8Weight

LARGEST = 448.0  # of e4m3fn
SMALLEST_MAXIMUM = 1e-30  # so that the reciprocal of a scale is finite


def quantize_activations(x: torch.Tensor, group: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds activations x [M, K] to float8: (the bits of e4m3fn [M, K] uint8, float32 scales).

    A scale maps the largest absolute value of a row, or of `group` channels of it, to 448: [M], or
    [ceil(K / group), M]. Where some value is infinite or not a number, the scale is not a number.
    """
    rows, channels = x.shape
    size = group or channels
    count = -(-channels // size)
    grouped = pad(x.float(), (0, -channels % size)).view(rows, count, size)
    largest = grouped.abs().amax(-1)
    scales = torch.where(largest.isfinite(), largest.clamp(min=SMALLEST_MAXIMUM) / LARGEST, torch.nan)
    factors = torch.full_like(largest, LARGEST) / largest.clamp(min=SMALLEST_MAXIMUM)  # not 448 times a reciprocal
    numbers = (grouped * factors[..., None]).nan_to_num(0.0).view(rows, count * size)[:, :channels]
    codes = numbers.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, scales[:, 0] if group is None else scales.T.contiguous()


def float8_matmul(
    x: torch.Tensor, weight: Float8Weight, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x [M, K], quantized by `weight.activation_group`, times weight [N, K] transposed, plus bias [N].

    Summed in float32 and rounded once: [M, N] in x's dtype, in `out` if given. A row with a value that is infinite or
    not a number gives results that are not numbers.
    """
    codes, scales = quantize_activations(x, weight.activation_group)
    numbers = codes.view(torch.float8_e4m3fn).float()
    if weight.activation_group is None:
        product = (numbers @ unscaled_values(weight).T) * (scales[:, None] * weight.scales)
    else:
        of_channels = scales.T.repeat_interleave(weight.activation_group, dim=1)[:, : x.shape[1]]
        product = (numbers * of_channels) @ dequantize_int8(weight).T
    result = (product if bias is None else product + bias.float()).to(x.dtype)
    return result if out is None else out.copy_(result)
