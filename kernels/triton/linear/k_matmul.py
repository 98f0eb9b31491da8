"""Products with GGUF's K forms (`k_weights`), dequantized in registers; tiles and splits as in `quantized_matmul`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plait.kernels.k_weights import KWeight
from plait.kernels.triton.linear.quantized_matmul import check_operands, finish, launch_product


@triton.jit
def _k_codes(low_ptr, high_ptr, n, outs, pair, byte, BLOCK: tl.constexpr, HIGH_BITS: tl.constexpr):
    """The codes [BN, bytes] of inputs 32 * BLOCK + byte of the 128 inputs `pair`, as int32."""
    inside, wide_n = (n < outs)[:, None], n.to(tl.int64)
    span = pair * 2 + BLOCK // 2
    low = tl.load(low_ptr + (span * outs + wide_n)[:, None] * 32 + byte[None, :], mask=inside, other=0).to(tl.int32)
    codes = (low >> (4 * (BLOCK % 2))) & 15
    if HIGH_BITS == 1:
        at = ((pair // 2) * outs + wide_n)[:, None] * 32 + byte[None, :]
        high = tl.load(high_ptr + at, mask=inside, other=0).to(tl.int32)
        codes |= ((high >> ((pair % 2) * 4 + BLOCK)) & 1) << 4
    if HIGH_BITS == 2:
        at = (pair * outs + wide_n)[:, None] * 32 + byte[None, :]
        high = tl.load(high_ptr + at, mask=inside, other=0).to(tl.int32)
        codes |= ((high >> (2 * BLOCK)) & 3) << 4
    return codes


@triton.jit
def _k_numbers(
    codes,
    scales_ptr,
    minima_ptr,
    superscales_ptr,
    superminima_ptr,
    n,
    outs,
    first,
    STEP: tl.constexpr,
    HIGH_BITS: tl.constexpr,
):
    """The float32 weights of codes [BN, STEP], whose first input is `first`."""
    group, superblock = (first // STEP) * outs + n, (first // 256) * outs + n
    scale = tl.load(scales_ptr + group, mask=n < outs, other=0).to(tl.float32)
    scale *= tl.load(superscales_ptr + superblock, mask=n < outs, other=0.0).to(tl.float32)
    if HIGH_BITS == 2:
        wide = (codes - 32).to(tl.float32) * scale[:, None]
    else:
        lowest = tl.load(minima_ptr + group, mask=n < outs, other=0).to(tl.float32)
        lowest *= tl.load(superminima_ptr + superblock, mask=n < outs, other=0.0).to(tl.float32)
        wide = codes.to(tl.float32) * scale[:, None] - lowest[:, None]
    return wide


@triton.jit
def _k_matmul(
    x_ptr,
    low_ptr,
    high_ptr,
    scales_ptr,
    minima_ptr,
    superscales_ptr,
    superminima_ptr,
    bias_ptr,
    out_ptr,
    rows,
    outs,
    channels,
    pairs,
    pairs_per_split,
    x_stride,
    out_stride,
    STEP: tl.constexpr,  # input channels that share a scale: 32, or 16 with 6 bits
    HIGH_BITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    split = tl.program_id(2)
    x_row = x_ptr + m[None, :].to(tl.int64) * x_stride  # [1, BM]
    acc = tl.zeros((BN, BM), tl.float32)
    for pair in range(split * pairs_per_split, tl.minimum((split + 1) * pairs_per_split, pairs)):
        for block in tl.static_range(4):
            for part in tl.static_range(32 // STEP):
                byte = part * STEP + tl.arange(0, STEP)
                first = pair * 128 + block * 32 + part * STEP
                codes = _k_codes(low_ptr, high_ptr, n, outs, pair, byte, block, HIGH_BITS)
                wide = _k_numbers(
                    codes, scales_ptr, minima_ptr, superscales_ptr, superminima_ptr, n, outs, first, STEP, HIGH_BITS
                )
                k = first + tl.arange(0, STEP)
                x = tl.load(x_row + k[:, None], mask=(m < rows)[None, :], other=0.0)
                acc = tl.dot(wide.to(x.dtype), x, acc)
    finish(acc, out_ptr, bias_ptr, m, n, rows, outs, out_stride, split, HAS_BIAS, SPLITS)


@triton.jit
def _dequantize_k(
    low_ptr,
    high_ptr,
    scales_ptr,
    minima_ptr,
    superscales_ptr,
    superminima_ptr,
    rows_ptr,
    out_ptr,
    first_output,
    count,
    outs,
    channels,
    STEP: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
):
    """One program for 64 outputs and 128 inputs."""
    i = tl.program_id(0) * 64 + tl.arange(0, 64)
    n = tl.where(i < count, first_output + i, outs)
    if HAS_ROWS:
        n = tl.load(rows_ptr + i, mask=i < count, other=outs)
    pair = tl.program_id(1)
    for block in tl.static_range(4):
        for part in tl.static_range(32 // STEP):
            byte = part * STEP + tl.arange(0, STEP)
            first = pair * 128 + block * 32 + part * STEP
            codes = _k_codes(low_ptr, high_ptr, n, outs, pair, byte, block, HIGH_BITS)
            wide = _k_numbers(
                codes, scales_ptr, minima_ptr, superscales_ptr, superminima_ptr, n, outs, first, STEP, HIGH_BITS
            )
            to = out_ptr + i[:, None].to(tl.int64) * channels + (first + tl.arange(0, STEP))[None, :]
            tl.store(to, wide.to(out_ptr.dtype.element_ty), mask=(i < count)[:, None])


def k_matmul(
    x: torch.Tensor, weight: KWeight, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `reference.matmul.k_matmul`, for x in bfloat16 or float16 with K contiguous; else ValueError."""
    out = check_operands(x, weight.in_features, weight.out_features, bias, out)
    launch_product(_k_matmul, _tensors(weight), x, bias, out, weight.in_features // 128, **_constants(weight))
    return out


def dequantize_k_outputs(weight: KWeight, rows: torch.Tensor | None, first: int, count: int, out: torch.Tensor) -> None:
    """Writes the output channels `rows`, or `count` of them from `first` on, to out [count, K]."""
    grid = (triton.cdiv(count, 64), weight.in_features // 128)
    _dequantize_k[grid](
        *_tensors(weight), rows, out, first, count, weight.out_features, weight.in_features,
        HAS_ROWS=rows is not None, **_constants(weight), num_warps=4,
    )  # fmt: skip


def _tensors(weight: KWeight) -> tuple[torch.Tensor | None, ...]:
    return weight.low, weight.high, weight.scales, weight.minima, weight.superscales, weight.superminima


def _constants(weight: KWeight) -> dict[str, int]:
    return {"STEP": 16 if weight.high_bits == 2 else 32, "HIGH_BITS": weight.high_bits}
