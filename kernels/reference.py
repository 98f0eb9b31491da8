"""The operators in plain torch: what every fast kernel is held against, and what runs where there is none.

Shapes: T new tokens, H query heads, G key/value heads (H a multiple of G), D head size, P pages, C channels.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from plait.kernels.layout import AttentionLayout


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, C] over its root mean square, times weight [C]; computed in float32, returned in x's dtype."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return scaled.to(x.dtype) * weight


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
