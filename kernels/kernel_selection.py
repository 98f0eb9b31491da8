"""Chooses the implementation of each operator for a device and a dtype."""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch.nn import functional

from plait.kernels.operators import DenseLinearOp, Kernels, LinearOp, PagedAttentionOp
from plait.kernels.packed_support import describe_packed_weights
from plait.kernels.reference import batch_invariant_linear as batch_invariant
from plait.kernels.reference import ops
from plait.kernels.triton.support import HeadShape, triton_unsupported_reason


def select_kernels(
    device: torch.device, dtype: torch.dtype, deterministic: bool = False, heads: HeadShape | None = None
) -> Kernels:
    """Returns Triton's operators on CUDA, compiled attention on a CPU for bfloat16 and float32, else plain torch.

    With `deterministic`, the bits of a row depend on that row alone. Raises ValueError where no such operators exist.
    """
    attention: PagedAttentionOp = ops.paged_attention
    attention_name = "torch reference"
    if device.type == "cuda" and not deterministic:
        reason = triton_unsupported_reason(dtype, heads)
        if reason is None:
            from plait.kernels.triton.operators import triton_kernels

            return triton_kernels(dtype)
        attention_name = f"torch reference ({reason})"
    if device.type == "cpu" and dtype in (torch.bfloat16, torch.float32):
        try:
            from plait.kernels.cpu.attention import torch_op

            attention, attention_name = torch_op.paged_attention, "LLVM"
        except ImportError as error:
            attention_name = f"torch reference (llvmlite cannot be imported: {error})"
    if deterministic and attention is ops.paged_attention:
        raise ValueError(f"deterministic runs need a CPU, llvmlite, float32 or bfloat16; not {device} with {dtype}")
    linear: DenseLinearOp = batch_invariant.linear if deterministic else functional.linear
    return Kernels(
        linear=cast(LinearOp, linear),  # without `supports_quantized_weights` all weights are tensors
        dequantize_rows=ops.dequantize_rows,
        rms_norm=ops.rms_norm,
        rms_norm_in_place=ops.rms_norm_in_place,
        silu_and_multiply=ops.silu_and_multiply,
        gelu_tanh_and_multiply=ops.gelu_tanh_and_multiply,
        soft_cap_in_place=ops.soft_cap_in_place,
        experts=partial(ops.experts if device.type == "cpu" else ops.experts_dense, linear=linear),
        paged_attention=attention,
        names={
            "attention": attention_name,
            "matrix products": "torch, blocks of fixed size" if deterministic else "torch",
            "norm, rotary, activation": "torch reference",
            "packed weights": describe_packed_weights(device.type),
        },
    )
