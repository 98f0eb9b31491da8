"""Matrix products with 4-bit and 8-bit weights, which are dequantized in registers on their way to the tensor cores.

The tile is transposed: output channels are the tensor core's rows (at least 64 on Hopper) and tokens its columns, so
that one token wastes little and dequantized weights do not pass through shared memory. For few tokens, the input
channels are split over programs, and a second kernel adds their sums in a fixed order. Split and order depend only on
the configuration that `quantized_matmul_config` chooses for the number of rows, not on the tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from plait.kernels.quantized_weights import Float8Weight, Int8Weight
from plait.kernels.triton.attention.tile_config import gpu_spec
from plait.kernels.triton.float8 import float8_over_256

TARGET_PROGRAMS = 528  # four per multiprocessor of an H100 or H200: enough reads in flight for its bandwidth


class QuantizedMatmulConfig(NamedTuple):
    """The tile of a program, and how many programs share one sum."""

    block_m: int  # tokens
    block_n: int  # output channels
    splits: int
    warps: int
    stages: int


def quantized_matmul_config(rows: int, out_features: int, pairs: int, capability: int = 90) -> QuantizedMatmulConfig:
    """Returns the tile for `pairs` steps of 128 input channels. Up to 16 rows the product is bound by memory.

    `capability`: of the GPU, times 10. From 100 on, 64 output channels at most: Triton 3.7.1 compiles products of 128 x
    128 whose weights have a scale every 32 to 128 inputs to an empty kernel there.
    """
    if rows <= 16:
        tiles = triton.cdiv(out_features, 64)
        splits = max(1, min(TARGET_PROGRAMS // tiles, pairs // 2, 16))
        return QuantizedMatmulConfig(16, 64, splits, 4, 4)
    if rows <= 64:
        tiles = triton.cdiv(out_features, 64)
        splits = max(1, min(TARGET_PROGRAMS // 2 // tiles, pairs // 4, 8))
        return QuantizedMatmulConfig(32 if rows <= 32 else 64, 64, splits, 4, 3)
    return QuantizedMatmulConfig(128, 64 if capability >= 100 else 128, 1, 8, 3)


@triton.jit
def pairs_of_split(split, pairs_per_split, pairs):
    """The number of a split's pairs, at least one.

    If the compiler does not see that, it branches around the loop, the accumulators have two definitions, and ptxas
    waits for each product before the next one (C7515).
    """
    return tl.maximum(tl.minimum(pairs_per_split, pairs - split * pairs_per_split), 1)


@triton.jit
def finish(acc, out_ptr, bias_ptr, m, n, rows, outs, out_stride, split, HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr):
    """Stores the transposed tile acc [BN, BM]: the result, or one split's partial sums in float32."""
    inside = (n < outs)[:, None] & (m < rows)[None, :]
    to = out_ptr + m[None, :].to(tl.int64) * out_stride + n[:, None]
    if SPLITS > 1:
        to += split.to(tl.int64) * rows * out_stride
    elif HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < outs, other=0.0).to(tl.float32)[:, None]
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _int8_matmul(
    x_ptr,
    values_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    rows,
    outs,
    channels,
    pairs,
    pairs_per_split,
    x_stride,
    out_stride,
    STEP: tl.constexpr,  # input channels of a product: 64, or 32 if so many share a scale
    GROUP: tl.constexpr,  # input channels that share a scale; 0: all of an output channel's
    IS_FLOAT8: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    split = tl.program_id(2)
    x_row = x_ptr + m[None, :].to(tl.int64) * x_stride
    values_row = values_ptr + n[:, None].to(tl.int64) * channels  # [BN, 1]
    acc = tl.zeros((BN, BM), tl.float32)
    for number in range(0, pairs_of_split(split, pairs_per_split, pairs)):
        pair = split * pairs_per_split + number
        for step in tl.static_range(128 // STEP):
            first = pair * 128 + step * STEP
            k = first + tl.arange(0, STEP)
            there = k < channels
            values = tl.load(values_row + k[None, :], mask=(n < outs)[:, None] & there[None, :], other=0)
            x = tl.load(x_row + k[:, None], mask=there[:, None] & (m < rows)[None, :], other=0.0)
            floats = float8_over_256(values) if IS_FLOAT8 else values
            if GROUP:
                group = tl.minimum(first, channels - 1) // GROUP  # the last is padded with values that are 0
                scale = tl.load(scales_ptr + group * outs + n, mask=n < outs, other=0.0).to(tl.float32)
                scale *= 256.0 if IS_FLOAT8 else 1.0
                acc = tl.dot((floats.to(tl.float32) * scale[:, None]).to(x.dtype), x, acc)
            else:
                acc = tl.dot(floats.to(x.dtype), x, acc)
    if not GROUP:
        scale = tl.load(scales_ptr + n, mask=n < outs, other=0.0) * (256.0 if IS_FLOAT8 else 1.0)
        acc *= scale[:, None]
    finish(acc, out_ptr, bias_ptr, m, n, rows, outs, out_stride, split, HAS_BIAS, SPLITS)


@triton.jit
def _reduce_splits(parts_ptr, bias_ptr, out_ptr, rows, outs, out_stride, HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * 512 + tl.arange(0, 512)
    total = tl.zeros((512,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts_ptr + (split * rows + row) * outs + n, mask=n < outs, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < outs, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + n, total.to(out_ptr.dtype.element_ty), mask=n < outs)


def int8_matmul(
    x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `reference_matmul.int8_matmul`, for x in bfloat16 or float16 with K contiguous; else ValueError."""
    out_features, in_features = weight.values.shape
    out = check_operands(x, in_features, out_features, bias, out)
    launch(_int8_matmul, (weight.values, weight.scales), x, bias, out, triton.cdiv(in_features, 128),
            STEP=64 if not weight.is_grouped or weight.group % 64 == 0 else 32,
            GROUP=weight.group if weight.is_grouped else 0, IS_FLOAT8=isinstance(weight, Float8Weight))  # fmt: skip
    return out


def check_operands(
    x: torch.Tensor, in_features: int, out_features: int, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    """Returns `out`, or memory for it. Raises ValueError if shapes, strides or dtypes are not those of a product."""
    if x.dim() != 2 or x.shape[1] != in_features or x.stride(1) != 1:
        raise ValueError(f"expected x [M, {in_features}] with K contiguous, not {tuple(x.shape)}")
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"quantized products take bfloat16 or float16, not {x.dtype}")
    if bias is not None and bias.shape != (out_features,):
        raise ValueError(f"expected a bias ({out_features},), not {tuple(bias.shape)}")
    if out is None:
        return torch.empty((len(x), out_features), dtype=x.dtype, device=x.device)
    is_scattered = out.numel() > 0 and out.stride(1) != 1
    if out.shape != (len(x), out_features) or out.dtype != x.dtype or is_scattered:
        raise ValueError(f"expected out [{len(x)}, {out_features}] of {x.dtype}, not {out.dtype} {tuple(out.shape)}")
    return out


def launch(
    kernel: triton.JITFunction,
    weight: tuple[torch.Tensor | None, ...],
    x: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    pairs: int,
    **constants: int,
) -> None:
    """Runs a kernel with the parameters of `_int8_matmul`, the tensors of `weight` in place of its, on all tiles."""
    rows, outs = out.shape
    if not rows or not outs:
        return
    config = quantized_matmul_config(rows, outs, pairs, gpu_spec(x.device).capability)
    per_split = triton.cdiv(pairs, config.splits)
    splits = triton.cdiv(pairs, per_split)  # no split without work
    target = out if splits == 1 else torch.empty((splits, rows, outs), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(rows, config.block_m), triton.cdiv(outs, config.block_n), splits)
    kernel[grid](
        x, *weight, bias, target, rows, outs, x.shape[1], pairs, per_split, x.stride(0), target.stride(-2),
        HAS_BIAS=bias is not None, SPLITS=splits, BM=config.block_m, BN=config.block_n, **constants,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    if splits > 1:
        _reduce_splits[(rows, triton.cdiv(outs, 512))](
            target, bias, out, rows, outs, out.stride(0), HAS_BIAS=bias is not None, SPLITS=splits, num_warps=4
        )
