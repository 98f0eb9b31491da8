"""Gated activations: SiLU or GELU of one half of each row, times the other half; and the soft cap of logits.

Bound by memory: one pass with loads of 16 bytes per thread; computed in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plait.kernels.triton.attention.kv_loop import tanh

BLOCK = 1024  # channels per program: with 4 warps, 8 elements (16 bytes) per thread


@triton.jit
def _gated(
    gate_up_ptr,
    out_ptr,
    channels,
    row_stride,
    out_stride,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    raw = tl.load(gate_up_ptr + row * row_stride + channel, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * row_stride + channels + channel, mask=inside, other=0.0).to(tl.float32)
    gate = raw.to(tl.float32)
    # GELU's tanh form is gate * sigmoid(2 u), u = sqrt(2 / pi) (gate + 0.044715 gate^3)
    inner = gate * 1.5957691216057308 * (1.0 + 0.044715 * gate * gate) if GELU else gate
    result = gate / (1.0 + tl.exp2(inner * -1.4426950408889634)) * up
    tl.store(out_ptr + row * out_stride + channel, result.to(raw.dtype), mask=inside)


@triton.jit
def _soft_cap(x_ptr, channels, row_stride, inner, cap, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    at = x_ptr + row * row_stride + channel
    raw = tl.load(at, mask=inside, other=0.0)
    result = cap * tanh(raw.to(tl.float32) * inner)
    tl.store(at, result.to(raw.dtype), mask=inside)


def soft_cap_in_place(x: torch.Tensor, cap: float) -> None:
    """As `ops.soft_cap_in_place`, for x [T, V] with the last axis contiguous; else ValueError."""
    if x.dim() != 2 or x.stride(1) != 1 or not cap > 0:
        raise ValueError(f"expected [T, V] with the last axis contiguous and a positive cap, not {tuple(x.shape)}")
    rows, channels = x.shape
    if rows and channels:
        grid = (rows, triton.cdiv(channels, BLOCK))
        _soft_cap[grid](x, channels, x.stride(0), 1.0 / cap, cap, BLOCK=BLOCK, num_warps=4)


def silu_and_multiply(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """As `reference_float32.silu_and_multiply`, for gate_up [T, 2 C] with the last axis contiguous; else ValueError."""
    return _launch(gate_up, out, False)


def gelu_tanh_and_multiply(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """As `reference_float32.gelu_tanh_and_multiply`, for gate_up as that of `silu_and_multiply`."""
    return _launch(gate_up, out, True)


def _launch(gate_up: torch.Tensor, out: torch.Tensor | None, gelu: bool) -> torch.Tensor:
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"expected [T, 2 C] with the last axis contiguous, not {tuple(gate_up.shape)}")
    rows, channels = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = torch.empty((rows, channels), dtype=gate_up.dtype, device=gate_up.device)
    elif out.shape != (rows, channels) or out.dtype != gate_up.dtype or out.stride(1) != 1:
        raise ValueError(f"out must be [{rows}, {channels}] of {gate_up.dtype} with the last axis contiguous")
    if rows and channels:
        grid = (rows, triton.cdiv(channels, BLOCK))
        _gated[grid](gate_up, out, channels, gate_up.stride(0), out.stride(0), GELU=gelu, BLOCK=BLOCK, num_warps=4)
    return out
