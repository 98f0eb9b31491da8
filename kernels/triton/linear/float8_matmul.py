"""Matrix products of float8 e4m3 activations and weights on the tensor cores, for many tokens.

Activations are quantized by the kernel before the product: one scale per token, or per token and step of input channels
if the weight has a scale for each block of them. The tensor cores of Hopper add products of float8 with fewer bits than
float32 has, so there they sum one step of input channels at a time, which is added in float32 registers (DeepSeek-V3
technical report, section 3.3.2; arXiv 2412.19437).

`torch._scaled_mm` is not used: it needs K and N to be multiples of 16, bfloat16 results for scales per row, and other
versions of torch and CUDA for each grain of scales and each GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from plait.kernels.quantized_weights import Float8Weight
from plait.kernels.triton.attention.kv_loop import INTERPRETED
from plait.kernels.triton.attention.tile_config import GpuSpec, gpu_spec
from plait.kernels.triton.float8 import to_e4m3
from plait.kernels.triton.linear.quantized_matmul import check_operands

MIN_CAPABILITY = 89  # of GPUs whose tensor cores multiply float8
HOPPER = 90
ROW_ALIGN = 16  # bytes of an asynchronous copy
MIN_OCCUPIED = 0.8  # of the multiprocessors have a program, or the next smaller tile is chosen


class Float8MatmulConfig(NamedTuple):
    """The tile of a program."""

    block_m: int  # tokens
    block_n: int  # output channels
    warps: int
    stages: int


def float8_matmul_config(rows: int, out_features: int, gpu: GpuSpec) -> Float8MatmulConfig:
    """Returns the largest tile with a program for MIN_OCCUPIED of the multiprocessors; for fewer, the smallest.

    A smaller tile reads its operands more often, which costs more than some idle multiprocessors.
    """
    for config in (Float8MatmulConfig(128, 128, 8, 3), Float8MatmulConfig(128, 64, 8, 4)):
        programs = triton.cdiv(rows, config.block_m) * triton.cdiv(out_features, config.block_n)
        if programs >= MIN_OCCUPIED * gpu.num_sms:
            return config
    return Float8MatmulConfig(64, 64, 4, 4)


@triton.jit(do_not_specialize=["rows"])
def _quantize_activations(
    x_ptr, codes_ptr, scales_ptr, rows, channels, x_stride, codes_stride, STEP: tl.constexpr, IS_GROUPED: tl.constexpr
):
    """A program quantizes a row: by its largest value, or by that of every STEP channels."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, 8)[:, None] * STEP + tl.arange(0, STEP)[None, :]
    if not IS_GROUPED:
        most = tl.zeros((8, STEP), tl.int32)
        for first in range(0, channels, 8 * STEP):
            x = tl.load(x_ptr + row * x_stride + first + k, mask=first + k < channels, other=0.0).to(tl.float32)
            most = tl.maximum(most, tl.abs(x).to(tl.int32, bitcast=True))
        scale, factor = _scale_of(tl.max(tl.max(most, 1), 0))
        tl.store(scales_ptr + row, scale)
    for first in range(0, channels, 8 * STEP):
        x = tl.load(x_ptr + row * x_stride + first + k, mask=first + k < channels, other=0.0).to(tl.float32)
        if IS_GROUPED:
            group = first // STEP + tl.arange(0, 8)
            scale, factors = _scale_of(tl.max(tl.abs(x).to(tl.int32, bitcast=True), 1))
            tl.store(scales_ptr + group * rows + row, scale, mask=group * STEP < channels)
            x *= factors[:, None]
        else:
            x *= factor
        codes = to_e4m3(x) if INTERPRETED else x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        tl.store(codes_ptr + row * codes_stride + first + k, codes, mask=first + k < channels)


@triton.jit
def _scale_of(bits):
    """(scale, its reciprocal) that map the largest value, given as the bits of a float32, to 448.

    A scale is not a number if some value is infinite or not a number: the bits of such are larger than of all others.
    """
    largest = tl.maximum(bits, 0x0DA24260).to(tl.float32, bitcast=True)  # 1e-30, so that zeros have a reciprocal
    scale = tl.where(bits < 0x7F800000, tl.math.div_rn(largest, 448.0), float("nan"))
    return scale, tl.math.div_rn(448.0, largest)


@triton.jit(do_not_specialize=["rows"])  # steps of any length, most of which no graph has, run the same kernels
def _float8_matmul(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    weight_scales_ptr,
    bias_ptr,
    out_ptr,
    rows,
    outs,
    channels,
    x_stride,
    out_stride,
    STEP: tl.constexpr,  # input channels of a product
    GROUP: tl.constexpr,  # input channels that share a scale of the weight, a multiple of STEP; 0: all
    ONE_SCALE: tl.constexpr,  # whether the weight's scales are those of a tile's first output channel
    PROMOTE: tl.constexpr,  # whether each step is added in float32 registers
    HAS_BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, STEP)
    x_at = x_ptr + m[:, None].to(tl.int64) * x_stride + k[None, :]
    weight_at = weight_ptr + n[:, None].to(tl.int64) * channels + k[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(0, tl.cdiv(channels, STEP)):
        there = (step * STEP + k < channels)[None, :]
        x = tl.load(x_at + step * STEP, mask=(m < rows)[:, None] & there, other=0.0)
        weight = tl.load(weight_at + step * STEP, mask=(n < outs)[:, None] & there, other=0.0)
        if GROUP:
            x_scale = tl.load(x_scales_ptr + step * rows + m, mask=m < rows, other=0.0)
            at = (step * STEP // GROUP) * outs
            if ONE_SCALE:
                scale = (x_scale * tl.load(weight_scales_ptr + at + tl.program_id(1) * BN).to(tl.float32))[:, None]
            else:
                weight_scale = tl.load(weight_scales_ptr + at + n, mask=n < outs, other=0.0).to(tl.float32)
                scale = x_scale[:, None] * weight_scale[None, :]
            acc += tl.dot(x, tl.trans(weight)) * scale
        elif PROMOTE:
            acc = tl.dot(x, tl.trans(weight), acc, max_num_imprecise_acc=STEP)
        else:
            acc = tl.dot(x, tl.trans(weight), acc)
    if not GROUP:
        x_scale = tl.load(x_scales_ptr + m, mask=m < rows, other=0.0)
        acc *= x_scale[:, None] * tl.load(weight_scales_ptr + n, mask=n < outs, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < outs, other=0.0).to(tl.float32)[None, :]
    to = out_ptr + m[:, None].to(tl.int64) * out_stride + n[None, :]
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=(m < rows)[:, None] & (n < outs)[None, :])


def quantize_activations(x: torch.Tensor, group: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference_float8.quantize_activations`; the rows of the codes are 16 bytes apart or a multiple."""
    rows, channels = x.shape
    stride = triton.cdiv(channels, ROW_ALIGN) * ROW_ALIGN
    codes = torch.empty((rows, stride), dtype=torch.uint8, device=x.device)[:, :channels]
    shape = (rows,) if group is None else (triton.cdiv(channels, group), rows)
    scales = torch.empty(shape, dtype=torch.float32, device=x.device)
    if rows:
        _quantize_activations[(rows,)](
            x, codes, scales, rows, channels, x.stride(0), stride, STEP=group or 128, IS_GROUPED=group is not None
        )
    return codes, scales


def float8_matmul(
    x: torch.Tensor, weight: Float8Weight, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `reference_float8.float8_matmul`, for x in bfloat16 or float16 with K contiguous; else ValueError."""
    (outs, channels), rows = weight.values.shape, len(x)
    out = check_operands(x, channels, outs, bias, out)
    if not rows or not outs:
        return out
    gpu, group = gpu_spec(x.device), weight.activation_group
    codes, scales = quantize_activations(x, group)
    config = float8_matmul_config(rows, outs, gpu)
    grid = (triton.cdiv(rows, config.block_m), triton.cdiv(outs, config.block_n))
    _float8_matmul[grid](
        codes.view(torch.float8_e4m3fn), scales, weight.values.view(torch.float8_e4m3fn), weight.scales, bias, out,
        rows, outs, channels, codes.stride(0), out.stride(0), STEP=group or 128,
        GROUP=weight.group if weight.is_grouped else 0, ONE_SCALE=weight.output_block % config.block_n == 0,
        PROMOTE=gpu.capability == HOPPER, HAS_BIAS=bias is not None, BM=config.block_m, BN=config.block_n,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out
