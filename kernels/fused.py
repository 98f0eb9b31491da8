"""The operators that a GPU has whole where the CPU composes them, as one record, and their plain torch form.

Nothing here reads from the device or waits for it (the plain form aside), so a step can stand in a CUDA graph.
Knows: signatures. Must not know: models, requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from plait.kernels import reference, reference_fused, reference_sampling
from plait.kernels.kv_cache import LayerCache
from plait.kernels.layout import AttentionLayout, AttentionShape, Sharing
from plait.kernels.sampling_inputs import LogitShaping, SamplingInputs


class Attend(Protocol):
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


class AddNorm(Protocol):
    """The residual and the norm behind it."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Adds x [T, C] to residual in place and gives the norm of that sum, see `reference_fused.add_rms_norm`."""


Sample = Callable[[torch.Tensor, SamplingInputs, LogitShaping, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class FusedOperators:
    """`with_plans` readies a layout for these kinds of layers; `make_sampler(rows, vocab, device)` gives a sampler
    with the memory it needs; `kv_dtypes`: which settings of `kv_dtype` there are beside "auto"; `sharing(shape, most)`:
    when to give `attend` shared prefixes, for rows of up to `most` new tokens (None: they would be read row by row)."""

    attend: Attend
    add_norm: AddNorm
    with_plans: Callable[[AttentionLayout, tuple[AttentionShape, ...]], AttentionLayout]
    make_sampler: Callable[[int, int, torch.device], Sample]
    kv_dtypes: frozenset[str]
    sharing: Callable[[AttentionShape, int], Sharing] | None = None


def head_weights(
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
    """See `Attend`, by the reference operators."""
    q_norm, k_norm = head_weights(head_norm, qkv.shape[1] - 2 * cache.k.shape[1])
    q = reference.rotary_write_kv(
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
    return reference.paged_attention(q, *cache[:2], layout, scale, window, k_scale=cache.k_scale, v_scale=cache.v_scale)


REFERENCE = FusedOperators(
    attend=attend,
    add_norm=reference_fused.add_rms_norm,
    with_plans=lambda layout, shapes: layout,
    make_sampler=lambda rows, vocab, device: reference_sampling.sample,
    kv_dtypes=frozenset({"fp8", "int8"}),
)
