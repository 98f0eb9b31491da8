"""Reference of the kernels that rotate queries and keys and write the KV cache, perhaps quantized."""

from __future__ import annotations

import torch

from plait.kernels.layout import AttentionLayout
from plait.kernels.reference.ops import rotary

FP8_MAX = 448.0  # of float8_e4m3fn


def quantize_kv(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes x [T, G, D] for a cache of that dtype. Returns the values and their scales.

    float8_e4m3fn: x / scale with the given scale, clamped to 448. int8: rounded to 127 steps of the largest magnitude
    of each token and head; the scales [T, G] float32 are computed here.
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
    """Applies rotary embeddings to queries and keys, writes keys and values to the caches; returns queries [T, H, D].

    qkv [T, H + 2 G, D]. cos and sin [context, R // 2] float32 are indexed by layout.positions: the first R <= D
    channels are rotated, half-split (Su et al. 2021), the others unchanged. q_norm and k_norm [D] are weights of an
    RMSNorm of each head before that (Qwen 3, Gemma 3). Everything is computed in float32. Caches and scales are as in
    `paged_attention`; the scales of an int8 cache are written too. Tokens with a negative write slot are not written.
    """
    num_kv_heads = k_cache.shape[-2]
    queries, keys = qkv[:, : -2 * num_kv_heads].float(), qkv[:, -2 * num_kv_heads : -num_kv_heads].float()
    rotated = []
    for x, weight in ((queries, q_norm), (keys, k_norm)):
        if weight is not None:
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
        passthrough = x[..., 2 * cos.shape[1] :]
        rotary_part = rotary(x[..., : 2 * cos.shape[1]], cos[layout.positions.long()], sin[layout.positions.long()])
        rotated.append(torch.cat([rotary_part, passthrough], dim=2).to(qkv.dtype))
    is_written = layout.write_slots >= 0
    slots = layout.write_slots[is_written].long()
    for x, cache, scale in ((rotated[1], k_cache, k_scale), (qkv[:, -num_kv_heads:], v_cache, v_scale)):
        flat = cache.view(-1, *cache.shape[-2:])
        if scale is None:
            flat[slots] = x[is_written].to(cache.dtype)
            continue
        values, scales = quantize_kv(x[is_written], cache.dtype, scale)
        flat.view(torch.uint8)[slots] = values.view(torch.uint8)
        if cache.dtype == torch.int8:
            scale.view(-1, num_kv_heads)[slots] = scales
    return rotated[0]
