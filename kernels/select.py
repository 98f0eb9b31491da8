"""Which implementation of each operator a device gets.

Knows: devices and dtypes. Must not know: models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from plait.kernels import deterministic as fixed
from plait.kernels import reference
from plait.kernels.fused import FusedOperators
from plait.kernels.layout import AttentionLayout
from plait.kernels.quantized import Matrix
from plait.kernels.reference_matmul import Product, product_of, rows_of
from plait.kernels.select_cuda import Heads, why_not_triton

PagedAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionLayout, float, int | None], torch.Tensor]

Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Kernels:
    """The operators a model calls; signatures as in `reference`. `names` says what was chosen, for `plait check`.

    `linear` and `rows_of` take weights in any form, see `reference_matmul`; `has_narrow`: fast with 4 and 8 bits, too.
    """

    linear: Product
    rows_of: Callable[[Matrix, torch.Tensor, torch.dtype], torch.Tensor]
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    head_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    rotary: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    write_kv: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    silu_and_multiply: Callable[[torch.Tensor], torch.Tensor]
    gelu_tanh_and_multiply: Callable[[torch.Tensor], torch.Tensor]
    experts: Experts
    paged_attention: PagedAttention
    names: dict[str, str]
    fused: FusedOperators | None = None  # what a GPU does in one piece; None: composed of the above
    has_narrow: bool = False


def select_kernels(
    device: torch.device, dtype: torch.dtype, deterministic: bool = False, heads: Heads | None = None
) -> Kernels:
    """Triton's operators on CUDA, numba's attention on a CPU for bfloat16 and float32, else plain torch.

    `deterministic`: a row's bits depend on that row alone; ValueError where that cannot be had.
    """
    attention: PagedAttention = reference.paged_attention
    chosen = "torch reference"
    if device.type == "cuda" and not deterministic:
        reason = why_not_triton(dtype, heads)
        if reason is None:
            from plait.kernels.triton.operators import triton_kernels

            return triton_kernels(dtype)
        chosen = f"torch reference ({reason})"
    if device.type == "cpu" and dtype in (torch.bfloat16, torch.float32):
        try:
            from plait.kernels import cpu_attention

            attention, chosen = cpu_attention.paged_attention, "numba"
        except ImportError as error:
            chosen = f"torch reference (numba cannot be imported: {error})"
    if deterministic and attention is reference.paged_attention:
        raise ValueError(f"deterministic runs need a CPU, numba, float32 or bfloat16; not {device} with {dtype}")
    linear: reference.Linear = fixed.linear if deterministic else functional.linear
    return Kernels(
        linear=product_of(linear),
        rows_of=rows_of,
        rms_norm=reference.rms_norm,
        head_norm=reference.head_norm,
        rotary=reference.rotary,
        write_kv=reference.write_kv,
        silu_and_multiply=reference.silu_and_multiply,
        gelu_tanh_and_multiply=reference.gelu_tanh_and_multiply,
        experts=partial(reference.experts if device.type == "cpu" else reference.experts_dense, linear=linear),
        paged_attention=attention,
        names={
            "attention": chosen,
            "matrix products": "torch, blocks of fixed size" if deterministic else "torch",
            "norm, rotary, activation": "torch reference",
            "packed weights": _packed(device),
        },
    )


def _packed(device: torch.device) -> str:
    """Whether `cpu_decoder` can run: with it, a model of 4- or 8-bit weights needs none of the other operators."""
    if device.type != "cpu":
        return "none: they are for CPUs"
    try:
        from plait.kernels.cpu_decoder import instructions, missing_features
    except ImportError as error:
        return f"none: numba cannot be imported ({error})"
    if missing := missing_features():
        return f"none: this CPU has no {', '.join(missing)}"
    return f"numba, {instruction_set()}, a whole step in one call"
