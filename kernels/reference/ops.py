"""The operators in plain torch: what every fast kernel is held against, and what runs where there is none.

Shapes: T new tokens, H query heads, G key/value heads (H a multiple of G), D head size, P pages, C channels,
E experts of F channels, K of them for a token.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from plait.kernels.layout import AttentionLayout
from plait.kernels.operators import DenseLinearOp


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
    expert_ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    linear: DenseLinearOp = functional.linear,
) -> torch.Tensor:
    """A mixture of SwiGLU experts: the sum over k of weights[t, k] * expert[chosen[t, k]](x[t]); [T, C] in x's dtype.

    x [T, C]; weights [T, K] float32; chosen [T, K] int64, no expert twice in a row; gate_up [E, 2 F, C]; down
    [E, C, F]. Each token's answers are added in float32 in the order of the experts, so its bits do not depend on
    its neighbours if those of `linear` do not. Reads `expert_ids` on the host.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for i in sorted(set(expert_ids.flatten().tolist())):
        rows, place = torch.where(expert_ids == i)
        expert_out = linear(silu_and_multiply(linear(x[rows], gate_up[i], None)), down[i], None).float()
        out[rows] += expert_out * weights[rows, place, None].float()
    return out.to(x.dtype)


def experts_dense(
    x: torch.Tensor,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    linear: DenseLinearOp = functional.linear,
) -> torch.Tensor:
    """As `experts`, for a device whose host must not wait: every expert computes all tokens, E / K times the work."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    dense_weights = torch.zeros(len(x), len(down), device=x.device).scatter_(1, expert_ids, weights.float())  # [T, E]
    for i in range(len(down)):
        expert_out = linear(silu_and_multiply(linear(x, gate_up[i], None)), down[i], None).float()
        share = dense_weights[:, i : i + 1]
        out += torch.where(share > 0, expert_out * share, 0.0)  # no other's infinity, which 0 does not cancel
    return out.to(x.dtype)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    layout: AttentionLayout,
    scale: float,
    window: int | None = None,
    *,
    softcap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of q [T, H, D] over each row's pages; returns [T, H, D] in q's dtype.

    Caches [P * page_size, G, D] or [P, page_size, G, D]: floats, or float8_e4m3fn with one float32 scale for keys and
    one for values, or int8 with float32 scales [P * page_size, G] or [P, page_size, G]. `window`: each token sees at
    most that many positions, its own included (sliding window). `softcap`: scores become softcap * tanh(scores /
    softcap) (Gemma 2, arXiv 2408.00118).
    """
    out = torch.empty_like(q)
    q_starts = layout.q_starts.tolist()
    group = q.shape[1] // k_cache.shape[-2]
    for row in range(layout.num_rows):
        new, slots = slice(q_starts[row], q_starts[row + 1]), layout.slots(row)
        k = dequantize_kv(k_cache, slots, k_scale).repeat_interleave(group, dim=1)  # [kv, H, D]
        v = dequantize_kv(v_cache, slots, v_scale).repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[new].float(), k) * scale  # [H, q, kv]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        at = layout.positions[new, None]  # [q, 1]
        seen = torch.arange(len(slots), device=q.device)[None]  # [1, kv]
        hidden = seen > at
        if window is not None:
            hidden |= seen <= at - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[new] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
    return out


def dequantize_kv(cache: torch.Tensor, slots: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """[n, G, D] float32: what the cache holds in slots [n], times its scale."""
    flat = cache.view(-1, *cache.shape[-2:])
    narrow = flat.dtype.itemsize == 1  # torch gathers bytes of any kind, but not every kind of byte
    flat = flat.view(torch.uint8)[slots].view(cache.dtype).float() if narrow else flat[slots].float()
    if scale is None:
        return flat
    return flat * (scale if scale.numel() == 1 else scale.view(-1, cache.shape[-2])[slots, :, None])


FP8_MAX = 448.0  # of float8_e4m3fn


def quantize_kv(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, G, D] as a cache of that dtype holds it, and its scales.

    float8_e4m3fn: x / scale (the one given), cut off at 448. int8: rounded to 127 steps of each token's and head's
    own largest magnitude, whose scales [T, G] float32 are found here.
    """
    wide = x.float()
    if dtype == torch.int8:
        largest = wide.abs().amax(-1).clamp_min(1e-20)
        return (wide * (127.0 / largest)[..., None]).round().to(dtype), largest / 127.0
    return (wide * (1.0 / scale)).clamp(-FP8_MAX, FP8_MAX).to(dtype), scale


def apply_rope_and_write_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    layout: AttentionLayout,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Turns queries and keys, and puts keys and values into the caches; returns the queries [T, H, D].

    qkv [T, H + 2 G, D]; cos and sin [context, R // 2] float32, looked up at layout.positions: the first R <= D
    channels turn, half-split (Su et al. 2021), the rest stays. q_norm and k_norm [D]: RMSNorm of each head before
    (Qwen 3, Gemma 3), everything in float32. Caches and scales as in `paged_attention`; an int8 cache's scales are
    written too. Tokens whose write page is below 0 are not written.
    """
    num_kv_heads = k_cache.shape[-2]
    queries, keys = qkv[:, : -2 * num_kv_heads].float(), qkv[:, -2 * num_kv_heads : -num_kv_heads].float()
    rotated = []
    for x, weight in ((queries, q_norm), (keys, k_norm)):
        if weight is not None:
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
        passthrough = x[..., 2 * cos.shape[1] :]
        turning = rotary(x[..., : 2 * cos.shape[1]], cos[layout.positions.long()], sin[layout.positions.long()])
        rotated.append(torch.cat([turning, passthrough], dim=2).to(qkv.dtype))
    kept = layout.write_slots >= 0
    slots = layout.write_slots[kept].long()
    for x, cache, scale in ((rotated[1], k_cache, k_scale), (qkv[:, -num_kv_heads:], v_cache, v_scale)):
        flat = cache.view(-1, *cache.shape[-2:])
        if scale is None:
            flat[slots] = x[kept].to(cache.dtype)
            continue
        numbers, scales = quantize_kv(x[kept], cache.dtype, scale)
        flat.view(torch.uint8)[slots] = numbers.view(torch.uint8)
        if cache.dtype == torch.int8:
            scale.view(-1, num_kv_heads)[slots] = scales
    return rotated[0]
