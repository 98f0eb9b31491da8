"""Which implementation of each operator a device gets.

Knows: devices and dtypes. Must not know: models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from plait.kernels.layout import AttentionLayout
from plait.kernels.operators import FusedOperators
from plait.kernels.quantized_weights import LinearWeight
from plait.kernels.reference import batch_invariant_linear as batch_invariant
from plait.kernels.reference import ops
from plait.kernels.reference.matmul import LinearOp, dequantize_rows, make_linear
from plait.kernels.triton.support import HeadShape, triton_unsupported_reason

PagedAttentionOp = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, AttentionLayout, float, int | None], torch.Tensor
]

ExpertsOp = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Kernels:
    """The operators a model calls; signatures as in `ops`. `names` says what was chosen, for `plait check`.

    `linear` and `dequantize_rows` take weights in any form, see `reference_matmul`; `supports_quantized_weights`: fast with 4 and 8 bits, too.
    """

    linear: LinearOp
    dequantize_rows: Callable[[LinearWeight, torch.Tensor, torch.dtype], torch.Tensor]
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    head_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    rotary: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    write_kv: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    silu_and_multiply: Callable[[torch.Tensor], torch.Tensor]
    gelu_tanh_and_multiply: Callable[[torch.Tensor], torch.Tensor]
    experts: ExpertsOp
    paged_attention: PagedAttentionOp
    names: dict[str, str]
    fused: FusedOperators | None = None  # what a GPU does in one piece; None: composed of the above
    supports_quantized_weights: bool = False


def select_kernels(
    device: torch.device, dtype: torch.dtype, deterministic: bool = False, heads: HeadShape | None = None
) -> Kernels:
    """Triton's operators on CUDA, numba's attention on a CPU for bfloat16 and float32, else plain torch.

    `deterministic`: a row's bits depend on that row alone; ValueError where that cannot be had.
    """
    attention: PagedAttentionOp = ops.paged_attention
    chosen = "torch reference"
    if device.type == "cuda" and not deterministic:
        reason = triton_unsupported_reason(dtype, heads)
        if reason is None:
            from plait.kernels.triton.operators import triton_kernels

            return triton_kernels(dtype)
        chosen = f"torch reference ({reason})"
    if device.type == "cpu" and dtype in (torch.bfloat16, torch.float32):
        try:
            from plait.kernels.cpu.attention import torch_op

            attention, chosen = torch_op.paged_attention, "numba"
        except ImportError as error:
            chosen = f"torch reference (numba cannot be imported: {error})"
    if deterministic and attention is ops.paged_attention:
        raise ValueError(f"deterministic runs need a CPU, numba, float32 or bfloat16; not {device} with {dtype}")
    linear: ops.DenseLinearOp = batch_invariant.linear if deterministic else functional.linear
    return Kernels(
        linear=make_linear(linear),
        dequantize_rows=dequantize_rows,
        rms_norm=ops.rms_norm,
        head_norm=ops.head_norm,
        rotary=ops.rotary,
        write_kv=ops.write_kv,
        silu_and_multiply=ops.silu_and_multiply,
        gelu_tanh_and_multiply=ops.gelu_tanh_and_multiply,
        experts=partial(ops.experts if device.type == "cpu" else ops.experts_dense, linear=linear),
        paged_attention=attention,
        names={
            "attention": chosen,
            "matrix products": "torch, blocks of fixed size" if deterministic else "torch",
            "norm, rotary, activation": "torch reference",
            "packed weights": _describe_packed_weights(device),
        },
    )


def _describe_packed_weights(device: torch.device) -> str:
    """Whether `cpu_decoder` can run: with it, a model of 4- or 8-bit weights needs none of the other operators."""
    if device.type != "cpu":
        return "none: they are for CPUs"
    try:
        from plait.kernels.cpu.decoder import instruction_set, missing_features
    except ImportError as error:
        return f"none: numba cannot be imported ({error})"
    if missing := missing_features():
        return f"none: this CPU has no {', '.join(missing)}"
    return f"numba, {instruction_set()}, a whole step in one call"
