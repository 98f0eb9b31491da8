"""The operators in plain torch: the reference for all kernels, and the fallback where no kernel runs.

Activations round to the model's dtype after every operation; the Triton kernels round once.
Shapes: T new tokens, H query heads, G key/value heads (H a multiple of G), D head size, P pages, C channels,
E experts of F channels, K experts per token.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from plait.kernels.layout import AttentionLayout
from plait.kernels.operators import AttentionLayer, DenseLinearOp
from plait.kernels.quantized_weights import SimpleWeight


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divides x [..., C] by its root mean square and multiplies by weight [C] (RMSNorm, Zhang and Sennrich 2019).

    Each head of x [T, H, D] may have a weight of its own, [H, D].

    Computed in float32, returned in x's dtype. A float32 weight multiplies before the rounding to x's dtype (Gemma), a
    weight in x's dtype after it (Llama).
    """
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (scaled.to(weight.dtype) * weight).to(x.dtype)


def rms_norm_in_place(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Replaces x [T, C], whose rows may be strided, by its `rms_norm`."""
    x.copy_(rms_norm(x, weight, eps))


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding, half-split layout (Su et al. 2021). x [T, H, D]; cos and sin [T, D // 2] float32."""
    first, second = x.float().chunk(2, dim=-1)  # [T, H, D // 2]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, pages: torch.Tensor
) -> None:
    """Writes k and v [T, G, D] to pages [T] of the caches [P, G, D]."""
    k_cache.index_copy_(0, pages.long(), k.to(k_cache.dtype))
    v_cache.index_copy_(0, pages.long(), v.to(v_cache.dtype))


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) * up [T, C] of gate_up [T, 2 C] (SwiGLU, Shazeer 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gelu_tanh_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns gelu(gate) * up [T, C] of gate_up [T, 2 C], GELU in its tanh form (GEGLU, Shazeer 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def soft_cap_in_place(x: torch.Tensor, cap: float) -> None:
    """Replaces x [T, V] by cap * tanh(x / cap), computed in float32 (Gemma 2, arXiv 2408.00118)."""
    x.copy_(cap * torch.tanh(x.float() / cap))


def dequantize_rows(weight: SimpleWeight, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns rows [n] of a weight [N, K], which must be a tensor and keeps its dtype: [n, K]."""
    assert isinstance(weight, torch.Tensor)
    return weight[rows]


def experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    linear: DenseLinearOp = functional.linear,
) -> torch.Tensor:
    """A mixture of SwiGLU experts: the sum over k of weights[t, k] * expert[expert_ids[t, k]](x[t]).

    x [T, C]; weights [T, K] float32; expert_ids [T, K] int64, no expert twice in a row; gate_up [E, 2 F, C]; down
    [E, C, F]. Returns [T, C] in x's dtype. Each token's results are added in float32 in the order of the experts, so
    its bits do not depend on other tokens if those of `linear` do not. Reads `expert_ids` on the host.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for i in sorted(set(expert_ids.flatten().tolist())):
        rows, choices = torch.where(expert_ids == i)
        expert_out = linear(silu_and_multiply(linear(x[rows], gate_up[i], None)), down[i], None).float()
        out[rows] += expert_out * weights[rows, choices, None].float()
    return out.to(x.dtype)


def experts_dense(
    x: torch.Tensor,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    linear: DenseLinearOp = functional.linear,
) -> torch.Tensor:
    """As `experts`, without waiting for the device: every expert computes all tokens, E / K times the work."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    dense_weights = torch.zeros(len(x), len(down), device=x.device).scatter_(1, expert_ids, weights.float())  # [T, E]
    for i in range(len(down)):
        expert_out = linear(silu_and_multiply(linear(x, gate_up[i], None)), down[i], None).float()
        weight = dense_weights[:, i : i + 1]
        out += torch.where(weight > 0, expert_out * weight, 0.0)  # 0 * infinity of an expert not chosen would be NaN
    return out.to(x.dtype)


def paged_attention(
    q: torch.Tensor, layer: AttentionLayer, layout: AttentionLayout, *, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Causal attention of q [T, H, D] over each row's pages; returns [T, H, D] in q's dtype.

    Values may have another head size than keys; the result then has that of the values.

    Caches are [P * page_size, G, D] or [P, page_size, G, D]: floats, or float8_e4m3fn with one float32 scale for keys
    and one for values, or int8 with float32 scales [P * page_size, G] or [P, page_size, G]. With `window`, each token
    sees at most that many positions, its own included (sliding window). With `softcap`, scores become
    softcap * tanh(scores / softcap) (Gemma 2, arXiv 2408.00118). With `sinks` [H], the softmax has one more score per
    head, whose value is zero (gpt-oss).
    """
    (k_cache, v_cache, k_scale, v_scale), scale, window, softcap = layer
    out = q.new_empty((*q.shape[:2], v_cache.shape[-1]))
    q_starts = layout.q_starts.tolist()
    group = q.shape[1] // k_cache.shape[-2]
    for row in range(layout.num_rows):
        new, slots = slice(q_starts[row], q_starts[row + 1]), layout.slots(row)
        k = dequantize_kv(k_cache, slots, k_scale).repeat_interleave(group, dim=1)  # [kv, H, D]
        v = dequantize_kv(v_cache, slots, v_scale).repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[new].float(), k) * scale  # [H, q, kv]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        q_positions = layout.positions[new, None]  # [q, 1]
        kv_positions = torch.arange(len(slots), device=q.device)[None]  # [1, kv]
        masked = kv_positions > q_positions
        if window is not None:
            masked |= kv_positions <= q_positions - window
        scores = scores.masked_fill(masked, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)], dim=-1)
        weights = scores.softmax(-1)[..., : len(slots)]
        out[new] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
    return out


def dequantize_kv(cache: torch.Tensor, slots: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Returns [n, G, D] float32: the contents of slots [n] of the cache, times their scales."""
    flat = cache.view(-1, *cache.shape[-2:])
    is_8_bit = flat.dtype.itemsize == 1  # torch cannot index every 8-bit dtype, but uint8
    values = flat.view(torch.uint8)[slots].view(cache.dtype).float() if is_8_bit else flat[slots].float()
    if scale is None:
        return values
    return values * (scale if scale.numel() == 1 else scale.view(-1, cache.shape[-2])[slots, :, None])
