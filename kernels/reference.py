"""The operators in plain torch: what every fast kernel is held against, and what runs where there is none.

Shapes: T new tokens, H query heads, G key/value heads (H a multiple of G), D head size, P pages, C channels,
E experts of F channels, K of them for a token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from plait.kernels.layout import AttentionLayout

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, C] over its root mean square, times weight [C]; computed in float32, returned in x's dtype.

    A weight in float32 multiplies before the result is rounded to x's dtype (Gemma), one in x's dtype after (Llama).
    """
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (scaled.to(weight.dtype) * weight).to(x.dtype)


def head_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm` of each head by itself: x [T, H, D] (rows may be strided), weight [H, D]. Returns [T, H, D]."""
    return rms_norm(x, weight, eps)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding, half-split layout (Su et al. 2021). x [T, H, D]; cos and sin [T, D // 2] float32."""
    first, second = x.float().chunk(2, dim=-1)  # [T, H, D // 2]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, pages: torch.Tensor
) -> None:
    """Puts k and v [T, G, D] into pages [T] of the caches [P, G, D]."""
    k_cache.index_copy_(0, pages.long(), k.to(k_cache.dtype))
    v_cache.index_copy_(0, pages.long(), v.to(v_cache.dtype))


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [T, 2 C] (SwiGLU, Shazeer 2020). Returns [T, C]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gelu_tanh_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up for gate_up [T, 2 C], GELU by its tanh approximation (GEGLU, Shazeer 2020). Returns [T, C]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    linear: Linear = functional.linear,
) -> torch.Tensor:
    """A mixture of SwiGLU experts: the sum over k of weights[t, k] * expert[chosen[t, k]](x[t]); [T, C] in x's dtype.

    x [T, C]; weights [T, K] float32; chosen [T, K] int64, no expert twice in a row; gate_up [E, 2 F, C]; down
    [E, C, F]. Each token's answers are added in float32 in the order of the experts, so its bits do not depend on
    its neighbours if those of `linear` do not. Reads `chosen` on the host.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for i in sorted(set(chosen.flatten().tolist())):
        rows, place = torch.where(chosen == i)
        answer = linear(silu_and_multiply(linear(x[rows], gate_up[i], None)), down[i], None).float()
        out[rows] += answer * weights[rows, place, None].float()
    return out.to(x.dtype)


def experts_dense(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    linear: Linear = functional.linear,
) -> torch.Tensor:
    """As `experts`, for a device whose host must not wait: every expert computes all tokens, E / K times the work."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    shares = torch.zeros(len(x), len(down), device=x.device).scatter_(1, chosen, weights.float())  # [T, E]
    for i in range(len(down)):
        answer = linear(silu_and_multiply(linear(x, gate_up[i], None)), down[i], None).float()
        share = shares[:, i : i + 1]
        out += torch.where(share > 0, answer * share, 0.0)  # no other's infinity, which 0 does not cancel
    return out.to(x.dtype)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    layout: AttentionLayout,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of q [T, H, D] over each row's pages of the caches [P, G, D]; returns [T, H, D] in q's dtype.

    `window`: each token sees at most that many positions, its own included (sliding window).
    """
    out = torch.empty_like(q)
    q_starts, kv_starts = layout.q_starts.tolist(), layout.kv_starts.tolist()
    group = q.shape[1] // k_cache.shape[1]
    for row in range(layout.num_rows):
        new = slice(q_starts[row], q_starts[row + 1])
        pages = layout.kv_pages[kv_starts[row] : kv_starts[row + 1]].long()
        k = k_cache[pages].float().repeat_interleave(group, dim=1)  # [kv, H, D]
        v = v_cache[pages].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[new].float(), k) * scale  # [H, q, kv]
        at = layout.positions[new, None]  # [q, 1]
        seen = torch.arange(len(pages), device=q.device)[None]  # [1, kv]
        hidden = seen > at
        if window is not None:
            hidden |= seen <= at - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[new] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
    return out
