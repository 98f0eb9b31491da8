"""The fused operators composed of reference operators, for tests and dry runs of the GPU benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import reference_float32
import reference_low_rank
import reference_sampling as sampling
import torch
from reference_rope import apply_rope_and_write_kv

from plait.kernels.kv_cache import LayerCache
from plait.kernels.layout import AttentionLayout
from plait.kernels.operators import AttentionLayer, BoundAttention, CacheAttentionOp, FusedOperators, qk_norm_weights
from plait.kernels.reference import ops


def rotate_and_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: LayerCache,
    layout: AttentionLayout,
    head_norm: torch.Tensor | None,
    eps: float,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Implements `RotateAndWriteOp`."""
    q_norm, k_norm = qk_norm_weights(head_norm, qkv.shape[1] - 2 * cache.k.shape[1])
    q = apply_rope_and_write_kv(
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
    return q if out is None else out.copy_(q)


def attention(
    q: torch.Tensor, layer: AttentionLayer, layout: AttentionLayout, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Implements `CacheAttentionOp`."""
    attended = ops.paged_attention(q, layer, layout)
    return attended if out is None else out.copy_(attended)


def binding(attention: CacheAttentionOp) -> Callable[[Sequence[AttentionLayer]], BoundAttention]:
    """Returns the `bind_attention` of an attention of which nothing can be prepared."""

    def bind(layers: Sequence[AttentionLayer]) -> BoundAttention:
        def bound(q: torch.Tensor, layout: AttentionLayout, out: torch.Tensor) -> Sequence[Callable[[], None]]:
            def attend(layer: AttentionLayer) -> None:
                attention(q, layer, layout, out=out)

            return [partial(attend, layer) for layer in layers]

        return bound

    return bind


REFERENCE_FUSED_OPERATORS = FusedOperators(
    rotate_and_write=rotate_and_write,
    attention=attention,
    bind_attention=binding(attention),
    add_rms_norm=reference_float32.add_rms_norm,
    with_plans=lambda layout, shapes: layout,
    make_sampler=lambda rows, vocab, device: sampling.sample,
    count_tokens=sampling.count_tokens,
    gather_logprobs=sampling.gather_logprobs,
    top_logprobs=sampling.top_logprobs,
    group_rows=reference_low_rank.group_rows,
    add_low_rank=reference_low_rank.add_low_rank,
    kv_dtypes=frozenset({"fp8", "int8"}),
)
