"""RMSNorm of rows or heads, alone or fused with the residual addition before it.

A program keeps whole rows in registers, so memory is read and written once: with the residual 8 bytes per bfloat16
element, against 12 for a separate addition and norm. Short rows (heads) share a program.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

MAX_CHANNELS = 16384


class NormConfig(NamedTuple):
    """How rows are distributed over programs."""

    block: int  # channels a program holds per row, a power of two
    rows: int  # rows per program
    warps: int


def norm_config(channels: int) -> NormConfig:
    """Returns about 2,048 elements per program, at most 32 per thread. ValueError beyond MAX_CHANNELS."""
    if not 1 <= channels <= MAX_CHANNELS:
        raise ValueError(f"RMSNorm takes 1 to {MAX_CHANNELS} channels, not {channels}")
    block = max(16, 1 << (channels - 1).bit_length())
    rows = max(1, 2048 // block)
    return NormConfig(block, rows, min(16, max(4, block * rows // 512)))


@triton.jit
def _rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    heads,  # row = token * heads + head
    channels,
    x_token_stride,
    x_head_stride,
    residual_stride,
    out_token_stride,
    out_head_stride,
    eps,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)  # [ROWS, 1]
    channel = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    inside = (row < num_rows) & (channel < channels)
    token, head = row // heads, row % heads
    raw = tl.load(x_ptr + token * x_token_stride + head * x_head_stride + channel, mask=inside, other=0.0)
    dtype = raw.dtype
    if ADD:
        residual_at = residual_ptr + row * residual_stride + channel
        total = raw.to(tl.float32) + tl.load(residual_at, mask=inside, other=0.0).to(tl.float32)
        raw = total.to(dtype)
        tl.store(residual_at, raw, mask=inside)
    wide = raw.to(tl.float32)
    mean = tl.sum(wide * wide, axis=1, keep_dims=True) / channels
    scaled = wide * (1.0 / tl.sqrt_rn(mean + eps))
    weight = tl.load(weight_ptr + channel, mask=channel < channels, other=0.0).to(tl.float32)
    # A float32 weight multiplies before the only rounding (Gemma), others after a rounding to x's dtype (Llama).
    rounded = scaled if weight_ptr.dtype.element_ty == tl.float32 else scaled.to(dtype).to(tl.float32)
    result = rounded * weight
    out_at = out_ptr + token * out_token_stride + head * out_head_stride + channel
    tl.store(out_at, result.to(dtype), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """As `reference.ops.rms_norm`, for x [T, C], or [T, H, C] for every head, C contiguous; `out` may be x.

    Raises ValueError for shapes or strides that do not fit.
    """
    if x.dim() not in (2, 3):
        raise ValueError(f"RMSNorm takes [T, C] or [T, H, C], not {tuple(x.shape)}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _check(x, out, weight=weight)
    heads = x.shape[1] if x.dim() == 3 else 1
    _launch(x, None, weight, out, eps, heads)
    return out


def rms_norm_in_place(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """As `reference.ops.rms_norm_in_place`; the rows of x [T, C] may be strided, C is contiguous."""
    rms_norm(x, weight, eps, out=x)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `reference_float32.add_rms_norm`, for x and residual [T, C] with C contiguous; `out` may be x.

    Raises ValueError for shapes or strides that do not fit.
    """
    if x.dim() != 2:
        raise ValueError(f"the fused norm takes [T, C], not {tuple(x.shape)}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _check(x, out, residual, weight=weight)
    _launch(x, residual, weight, out, eps, 1)
    return out


def _check(x: torch.Tensor, *others: torch.Tensor, weight: torch.Tensor) -> None:
    for tensor in (x, *others):
        if tensor.shape != x.shape or tensor.dtype != x.dtype or tensor.stride(-1) != 1:
            raise ValueError(f"expected {tuple(x.shape)} of {x.dtype} with the last axis contiguous")
    if weight.shape != x.shape[-1:] or not weight.is_contiguous():
        raise ValueError(f"the norm's weight is {tuple(weight.shape)}, not ({x.shape[-1]},) and contiguous")


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    heads: int,
) -> None:
    channels = x.shape[-1]
    num_rows = x.shape[0] * heads
    config = norm_config(channels)
    if not num_rows:
        return
    _rms_norm[(triton.cdiv(num_rows, config.rows),)](
        x,
        residual,
        weight,
        out,
        num_rows,
        heads,
        channels,
        x.stride(0),
        x.stride(1) if heads > 1 else 0,
        residual.stride(0) if residual is not None else 0,
        out.stride(0),
        out.stride(1) if heads > 1 else 0,
        eps,
        ADD=residual is not None,
        ROWS=config.rows,
        BLOCK=config.block,
        num_warps=config.warps,
    )
