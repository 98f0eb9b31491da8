"""The KV cache tensors of a layer, in one of three formats (`kv_dtype`).

auto   the model's dtype
fp8    float8_e4m3fn, one float32 scale for a layer's keys and one for its values; both are 1, as e4m3 reaches 448
int8   127 steps of the largest magnitude of each token and head, with a float32 scale for each
"""

from __future__ import annotations

from typing import NamedTuple

import torch

QUANTIZED_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


class LayerCache(NamedTuple):
    """One layer's keys and values [P, G, D], and the scales that quantized ones are multiplied by."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None  # float32: [1] with fp8, [P, G] with int8
    v_scale: torch.Tensor | None = None


def cache_dtype(kind: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of a cache of `kind` (auto, fp8, int8) for a model in `dtype`."""
    return QUANTIZED_DTYPES.get(kind, dtype)


def kv_slot_bytes(kind: str, dtype: torch.dtype, num_kv_heads: int, head_dim: int) -> int:
    """Returns the bytes of one token's keys and values in one layer, scales included."""
    scale = torch.float32.itemsize if kind == "int8" else 0
    return 2 * num_kv_heads * (head_dim * cache_dtype(kind, dtype).itemsize + scale)


def allocate_caches(
    kind: str, dtype: torch.dtype, layers: int, pages: int, num_kv_heads: int, head_dim: int, device: torch.device
) -> list[LayerCache]:
    """Allocates the caches of all layers in one block. Memory is uninitialized, except fp8's scales."""
    stored_dtype = cache_dtype(kind, dtype)
    both = torch.empty((layers, 2, pages, num_kv_heads, head_dim), dtype=stored_dtype, device=device)
    if kind == "fp8":
        scales = torch.ones((layers, 2, 1), dtype=torch.float32, device=device)
    elif kind == "int8":
        scales = torch.empty((layers, 2, pages, num_kv_heads), dtype=torch.float32, device=device)
    else:
        return [LayerCache(layer[0], layer[1]) for layer in both]
    return [LayerCache(layer[0], layer[1], scale[0], scale[1]) for layer, scale in zip(both, scales, strict=True)]
