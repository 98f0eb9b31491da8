"""Assembles the Triton kernels into the operator table that a model calls.

They run on a GPU; for tests also on CPU tensors, if TRITON_INTERPRET=1 is set before triton is imported.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional

from plait.kernels.layout import AttentionLayout, AttentionShape
from plait.kernels.operators import FusedOperators, Kernels, SampleOp
from plait.kernels.reference import ops
from plait.kernels.triton.activation import gelu_tanh_and_multiply, silu_and_multiply, soft_cap_in_place
from plait.kernels.triton.attention.layer_launches import LayerLaunches
from plait.kernels.triton.attention.paged import attend, with_plans
from plait.kernels.triton.attention.tile_config import prefix_sharing_cost
from plait.kernels.triton.linear import grouped_matmul as grouped
from plait.kernels.triton.linear.low_rank import add_low_rank, group_rows
from plait.kernels.triton.linear.quantized_linear import dequantize_rows, linear
from plait.kernels.triton.norm import add_rms_norm, rms_norm, rms_norm_in_place
from plait.kernels.triton.rope_kv_write import rotate_and_write
from plait.kernels.triton.sampling import logprobs, sampler
from plait.kernels.triton.sampling.logit_adjustments import count_tokens

MAX_DECODE_Q_LEN = 64  # a batch whose rows all have more new tokens needs no plan


def triton_kernels(dtype: torch.dtype) -> Kernels:
    """Returns the operators for weights in bfloat16 or float16. For tests also float32, with experts in plain torch."""
    is_16_bit = dtype in (torch.bfloat16, torch.float16)
    return Kernels(
        linear=linear,
        dequantize_rows=dequantize_rows,
        rms_norm=rms_norm,
        rms_norm_in_place=rms_norm_in_place,
        silu_and_multiply=silu_and_multiply,
        gelu_tanh_and_multiply=gelu_tanh_and_multiply,
        soft_cap_in_place=soft_cap_in_place,
        experts=experts if is_16_bit else partial(ops.experts_dense, linear=functional.linear),
        paged_attention=attend,
        names={
            "attention": "triton",
            "matrix products": "torch; triton where weights have 4 or 8 bits",
            "experts": "triton" if is_16_bit else "torch reference",
            "norm, rotary, activation": "triton",
            "sampler": "triton",
        },
        fused=FusedOperators(
            rotate_and_write=rotate_and_write,
            attention=attend,
            add_rms_norm=add_rms_norm,
            with_plans=with_plans_for_decode,
            make_sampler=make_sampler,
            count_tokens=count_tokens,
            gather_logprobs=logprobs.gather_logprobs,
            top_logprobs=logprobs.top_logprobs,
            group_rows=group_rows,
            add_low_rank=add_low_rank,
            kv_dtypes=frozenset({"fp8", "int8"}),
            prefix_sharing_cost=prefix_sharing_cost,
            bind_attention=LayerLaunches,
        ),
        supports_quantized_weights=is_16_bit,
    )


def with_plans_for_decode(layout: AttentionLayout, shapes: tuple[AttentionShape, ...]) -> AttentionLayout:
    """Returns the layout with a plan for each kind of layer, if some row may be short enough for the decode kernel."""
    return layout if layout.min_q_len > MAX_DECODE_Q_LEN else with_plans(layout, *shapes)


def make_sampler(rows: int, vocab: int, device: torch.device) -> SampleOp:
    """Returns `sampler.sample` with a workspace for up to `rows` rows."""
    workspace = sampler.SamplingWorkspace.allocate(rows, vocab, device)
    return partial(sampler.sample, workspace=workspace)


def experts(
    x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """As `ops.experts`, by two grouped matrix products; no expert computes a token that did not choose it."""
    ids = expert_ids.to(torch.int32).contiguous()  # [T, K]
    routing = grouped.sort_by_expert(ids, len(down), grouped.routing_block_size(ids.numel(), len(down)))
    inner = silu_and_multiply(grouped.grouped_matmul(x, gate_up, routing, ids.shape[1]))  # [T K, F]
    expert_outs = grouped.grouped_matmul(inner, down, routing, 1)  # [T K, C]
    return grouped.combine_experts(expert_outs, weights.float().contiguous(), ids)
