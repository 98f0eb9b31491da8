"""KV caches in int8, as the CPU kernels read them: of a slot the integers of all heads, then their scales."""

from __future__ import annotations

import numpy as np
import torch


def quantized_cache(cache: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
    """Rounds [slots, G, D]; returns the slots, int8 [slots, G (D + 4)], and the values that they stand for."""
    values = cache.float()
    scales = values.abs().amax(-1) * np.float32(1 / 127)
    rounded = torch.where(scales[..., None] > 0, values / scales[..., None], 0.0).round().clamp(-127, 127)
    integers = rounded.to(torch.int8).numpy().reshape(len(cache), -1)
    slots = np.concatenate([integers, scales.numpy().view(np.int8).reshape(len(cache), -1)], axis=1)
    return np.ascontiguousarray(slots), rounded * scales[..., None]


def dequantized_cache(slots: np.ndarray, num_kv_heads: int, head_dim: int) -> torch.Tensor:
    """The values [slots, G, D] of int8 [slots, G (D + 4)]."""
    size = num_kv_heads * head_dim
    integers = torch.from_numpy(slots[:, :size].copy()).view(len(slots), num_kv_heads, head_dim)
    scales = torch.from_numpy(slots[:, size:].copy().view(np.float32))
    return integers * scales[..., None]
