"""The memory that keys and values lie in, one layer at a time: as the model computes them, in fp8, or in int8.

    auto   the model's dtype
    fp8    float8_e4m3fn with one float32 scale for a layer's keys and one for its values, both 1: e4m3 reaches 448
    int8   127 steps of each token's and head's own largest magnitude, whose float32 scales lie beside the numbers

Knows: shapes and dtypes. Must not know: what is in a slot, models.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

QUANTIZED_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


class LayerCache(NamedTuple):
    """One layer's keys and values [P, G, D], and what they are to be multiplied by where that is not 1."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None  # float32: [1] with fp8, [P, G] with int8
    v_scale: torch.Tensor | None = None


def cache_dtype(kind: str, dtype: torch.dtype) -> torch.dtype:
    """What `kind` (auto, fp8, int8) holds numbers of a model in `dtype` as."""
    return QUANTIZED_DTYPES.get(kind, dtype)


def kv_slot_bytes(kind: str, dtype: torch.dtype, num_kv_heads: int, head_dim: int) -> int:
    """Bytes of one token's keys and values in one layer."""
    scale = torch.float32.itemsize if kind == "int8" else 0
    return 2 * num_kv_heads * (head_dim * cache_dtype(kind, dtype).itemsize + scale)


def allocate_caches(
    kind: str, dtype: torch.dtype, layers: int, pages: int, num_kv_heads: int, head_dim: int, device: torch.device
) -> list[LayerCache]:
    """One LayerCache for each layer, untouched until used (fp8's scales are set)."""
    stored_dtype = cache_dtype(kind, dtype)
    both = torch.empty((layers, 2, pages, num_kv_heads, head_dim), dtype=stored_dtype, device=device)
    if kind == "fp8":
        scales = torch.ones((layers, 2, 1), dtype=torch.float32, device=device)
    elif kind == "int8":
        scales = torch.empty((layers, 2, pages, num_kv_heads), dtype=torch.float32, device=device)
    else:
        return [LayerCache(layer[0], layer[1]) for layer in both]
    return [LayerCache(layer[0], layer[1], scale[0], scale[1]) for layer, scale in zip(both, scales, strict=True)]
