"""The Triton kernels in the form in which a model calls its operators.

They run on a GPU; with TRITON_INTERPRET=1 set before triton is imported also on CPU tensors, for tests.
Knows: the kernels' signatures. Must not know: models, which device was chosen.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional

from plait.kernels import reference
from plait.kernels.fused import FusedOperators, Sample, head_weights
from plait.kernels.kv_cache import LayerCache
from plait.kernels.layout import AttentionLayout, AttentionShape
from plait.kernels.select import Kernels
from plait.kernels.triton import grouped_matmul as grouped
from plait.kernels.triton import sampling
from plait.kernels.triton.activation import gelu_tanh_and_multiply, silu_and_multiply
from plait.kernels.triton.attention import paged_attention, with_plans
from plait.kernels.triton.attention_config import sharing
from plait.kernels.triton.kv_write import rotary_write_kv
from plait.kernels.triton.narrow_weights import linear, rows_of
from plait.kernels.triton.norm import add_rms_norm, rms_norm

WIDEST_NARROW = 64  # a batch whose rows all bring more new tokens needs no plan


def triton_kernels(dtype: torch.dtype) -> Kernels:
    """All operators for weights of that dtype: bfloat16 or float16 (float32 for tests: experts are plain torch)."""
    narrow = dtype in (torch.bfloat16, torch.float16)
    return Kernels(
        linear=linear,
        rows_of=rows_of,
        rms_norm=rms_norm,
        head_norm=reference.head_norm,
        rotary=reference.rotary,
        write_kv=reference.write_kv,
        silu_and_multiply=silu_and_multiply,
        gelu_tanh_and_multiply=gelu_tanh_and_multiply,
        experts=experts if narrow else partial(reference.experts_dense, linear=functional.linear),
        paged_attention=paged_attention,
        names={
            "attention": "triton",
            "matrix products": "torch; triton where weights have 4 or 8 bits",
            "experts": "triton" if narrow else "torch reference",
            "norm, rotary, activation": "triton",
            "sampling": "triton",
        },
        fused=FusedOperators(
            attend=attend,
            add_norm=add_rms_norm,
            with_plans=planned,
            make_sampler=make_sampler,
            kv_dtypes=frozenset({"fp8", "int8"}),
            sharing=sharing,
        ),
        has_narrow=narrow,
    )


def attend(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: LayerCache,
    layout: AttentionLayout,
    scale: float,
    window: int | None,
    head_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """See `fused.Attend`."""
    q_norm, k_norm = head_weights(head_norm, qkv.shape[1] - 2 * cache.k.shape[1])
    q = rotary_write_kv(
        qkv,
        cos,
        sin,
        *cache[:2],
        layout,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
        k_scale=cache.k_scale,
        v_scale=cache.v_scale,
    )
    return paged_attention(q, *cache[:2], layout, scale, window, k_scale=cache.k_scale, v_scale=cache.v_scale)


def planned(layout: AttentionLayout, shapes: tuple[AttentionShape, ...]) -> AttentionLayout:
    """The layout with a plan for each kind of layer, where some row is narrow enough for one."""
    return layout if layout.min_q_len > WIDEST_NARROW else with_plans(layout, *shapes)


def make_sampler(rows: int, vocab: int, device: torch.device) -> Sample:
    """`sampling.sample` with its own memory for up to that many rows."""
    workspace = sampling.SamplingWorkspace.allocate(rows, vocab, device)
    return partial(sampling.sample, workspace=workspace)


def experts(
    x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """As `reference.experts`, by two grouped products; no expert computes a token that did not choose it."""
    ids = chosen.to(torch.int32).contiguous()  # [T, K]
    routing = grouped.route(ids, len(down), grouped.routing_block(ids.numel(), len(down)))
    inner = silu_and_multiply(grouped.grouped_matmul(x, gate_up, routing, ids.shape[1]))  # [T K, F]
    answers = grouped.grouped_matmul(inner, down, routing, 1)  # [T K, C]
    return grouped.combine_experts(answers, weights.float().contiguous(), ids)
