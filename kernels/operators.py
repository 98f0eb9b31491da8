"""The operators that a GPU has whole where the CPU composes them, as one record, and their plain torch form.

Nothing here reads from the device or waits for it (the plain form aside), so a step can stand in a CUDA graph.
Knows: signatures. Must not know: models, requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from plait.kernels.kv_cache import LayerCache
from plait.kernels.layout import AttentionLayout, AttentionShape, PrefixSharingCost
from plait.kernels.reference import fused, ops, sampling
from plait.kernels.sampling_inputs import LogitAdjustments, SamplingInputs


class FusedAttentionOp(Protocol):
    """From the QKV projection to the heads' outputs."""

    def __call__(
        self,
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
        """qkv [T, H + 2 G, D] -> [T, H, D]: norm of heads, rotary, KV write, attention.

        cos and sin are whole tables [context, D // 2]; head_norm [H + G, D] has one weight for all queries and one
        for all keys. A token whose write page is below 0 is not written, and rows without tokens are passed over.
        """


class AddRMSNormOp(Protocol):
    """The residual and the norm behind it."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Adds x [T, C] to residual in place and gives the norm of that sum, see `fused.add_rms_norm`."""


SampleOp = Callable[[torch.Tensor, SamplingInputs, LogitAdjustments, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class FusedOperators:
    """`with_plans` readies a layout for these kinds of layers; `make_sampler(rows, vocab, device)` gives a sampler
    with the memory it needs; `kv_dtypes`: which settings of `kv_dtype` there are beside "auto"; `prefix_sharing_cost(shape, most)`:
    when to give `attend` shared prefixes, for rows of up to `most` new tokens (None: they would be read row by row)."""

    attend: FusedAttentionOp
    add_rms_norm: AddRMSNormOp
    with_plans: Callable[[AttentionLayout, tuple[AttentionShape, ...]], AttentionLayout]
    make_sampler: Callable[[int, int, torch.device], SampleOp]
    kv_dtypes: frozenset[str]
    prefix_sharing_cost: Callable[[AttentionShape, int], PrefixSharingCost] | None = None


def qk_norm_weights(
    head_norm: torch.Tensor | None, num_heads: int
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """The weights [D] of queries and of keys out of head_norm [H + G, D]."""
    return (None, None) if head_norm is None else (head_norm[0], head_norm[num_heads])


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
    """See `FusedAttentionOp`, by the reference operators."""
    q_norm, k_norm = qk_norm_weights(head_norm, qkv.shape[1] - 2 * cache.k.shape[1])
    q = ops.apply_rope_and_write_kv(
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
    return ops.paged_attention(q, *cache[:2], layout, scale, window, k_scale=cache.k_scale, v_scale=cache.v_scale)


REFERENCE_FUSED_OPERATORS = FusedOperators(
    attend=attend,
    add_rms_norm=fused.add_rms_norm,
    with_plans=lambda layout, shapes: layout,
    make_sampler=lambda rows, vocab, device: sampling.sample,
    kv_dtypes=frozenset({"fp8", "int8"}),
)
