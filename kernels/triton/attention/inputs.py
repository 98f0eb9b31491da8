"""Checks the tensors that attention kernels take, and converts them to the form that the kernels read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from plait.kernels.kv_cache import LayerCache
from plait.kernels.layout import AttentionLayout, AttentionShape
from plait.kernels.operators import AttentionLayer
from plait.kernels.triton.attention.tile_config import GpuSpec, TileConfig, gpu_spec, group_size, padded_dim
from plait.kernels.triton.support import MAX_HEAD_DIM

FP8 = torch.float8_e4m3fn
HEAD_DIMS = range(1, MAX_HEAD_DIM + 1)
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class AttentionInputs:
    """Checked arguments of an attention kernel."""

    q: torch.Tensor
    caches: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # keys, values and their scales
    cache_strides: tuple[int, int, int]  # of slots, of heads, of the scales' slots
    kind: str  # CACHE in kv_loop
    score_scales: tuple[float, float]  # inner and outer scale, see kv_loop.attend_kv_range
    softcap: bool

    def constants(self, layout: AttentionLayout, shape: AttentionShape, tile: TileConfig) -> dict[str, Any]:
        """Returns the constants that all attention kernels have, and Triton's options."""
        return dict(
            GROUP=group_size(shape),
            D=shape.head_dim,
            BLOCK_D=padded_dim(shape.head_dim),
            BLOCK_M=tile.rows,
            BLOCK_N=tile.keys,
            PAGE_SIZE=layout.page_size,
            CACHE=self.kind,
            WINDOW=shape.window is not None,
            SOFTCAP=self.softcap,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


def cache_kind(dtype: torch.dtype, gpu: GpuSpec) -> str:
    """Returns the kind of cache for kv_loop's CACHE. TypeError for an unsupported dtype."""
    if dtype == FP8:
        return "fp8" if gpu.capability >= 89 else "fp8bits"
    if dtype == torch.int8:
        return "int8"
    if dtype in FLOAT_DTYPES:
        return "plain"
    raise TypeError(f"a KV cache of {dtype}: it is float32, float16, bfloat16, float8_e4m3fn or int8")


def flatten_pages(cache: torch.Tensor) -> torch.Tensor:
    """Views a cache or its scales [P, page_size, G, ...] as [P * page_size, G, ...]."""
    return cache.view(-1, *cache.shape[2:])


def slots_view(cache: torch.Tensor) -> torch.Tensor:
    """Views a cache as [P * page_size, G, D], fp8 as bytes. ValueError if D is not contiguous."""
    flat = flatten_pages(cache) if cache.dim() == 4 else cache
    if flat.dim() != 3 or flat.stride(-1) != 1:
        raise ValueError(f"a KV cache is [slots, G, D] or [P, page_size, G, D] with D contiguous, not {cache.shape}")
    return flat.view(torch.uint8) if flat.dtype == FP8 else flat


def scales_view(scales: torch.Tensor | None, cache: torch.Tensor) -> torch.Tensor:
    """Returns the scales of a cache [slots, G, D]: [slots, G] float32 for int8, [1] float32 for fp8.

    For a cache without scales returns the cache, which no kernel then reads. ValueError for scales that do not fit.
    """
    if cache.dtype not in (torch.int8, torch.uint8):
        if scales is not None:
            raise ValueError("k_scale and v_scale are for int8 and fp8 caches")
        return cache
    if scales is None or scales.dtype != torch.float32:
        raise ValueError("int8 and fp8 caches need float32 k_scale and v_scale")
    if cache.dtype == torch.uint8:
        if scales.numel() != 1:
            raise ValueError(f"an fp8 cache has one scale, not {scales.numel()}")
        return scales
    flat = flatten_pages(scales) if scales.dim() == 3 else scales
    if flat.shape != cache.shape[:2] or flat.stride(1) != 1:
        raise ValueError(f"an int8 cache {tuple(cache.shape)} has scales for each slot and head, not {scales.shape}")
    return flat


def cache_tensors(cache: LayerCache) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns keys [slots, G, D], values, and their scales, as the kernels take them. ValueError if they do not fit."""
    k, v = slots_view(cache.k), slots_view(cache.v)
    return k, v, scales_view(cache.k_scale, k), scales_view(cache.v_scale, v)


def attention_inputs(q: torch.Tensor, layer: AttentionLayer) -> AttentionInputs:
    """Checks shapes and dtypes (ValueError, TypeError), and folds log2(e) and the soft cap into the scales."""
    scale, softcap = layer.scale, layer.softcap
    kind = cache_kind(layer.cache.k.dtype, gpu_spec(q.device))
    caches = k, v, k_scales, v_scales = cache_tensors(layer.cache)
    if q.dtype not in FLOAT_DTYPES or q.dim() != 3 or q.stride(2) != 1:
        raise ValueError(f"queries are [T, H, D] floats with D contiguous, not {tuple(q.shape)} {q.dtype}")
    if v.dtype != k.dtype or k.shape != v.shape or k.shape[2] != q.shape[2] or k.shape[2] not in HEAD_DIMS:
        raise ValueError(f"queries {tuple(q.shape)}, keys {tuple(k.shape)} and values {tuple(v.shape)} do not fit")
    if k.stride() != v.stride():
        raise ValueError("keys and values have one layout")
    if not scale > 0 or (softcap is not None and not softcap > 0):
        raise ValueError("scale and softcap are positive")
    scale_stride = k_scales.stride(0) if kind == "int8" else 0
    if kind == "int8" and v_scales.stride(0) != scale_stride:
        raise ValueError("k_scale and v_scale have one layout")
    log2e = math.log2(math.e)
    return AttentionInputs(
        q=q,
        caches=caches,
        cache_strides=(k.stride(0), k.stride(1), scale_stride),
        kind=kind,
        score_scales=(1.0, scale * log2e) if softcap is None else (scale / softcap, softcap * log2e),
        softcap=softcap is not None,
    )


def attention_shape_of(q: torch.Tensor, k_cache: torch.Tensor, window: int | None) -> AttentionShape:
    """Returns the layer's shape. ValueError if the heads do not divide into groups, or the window is empty."""
    if window is not None and window < 1:
        raise ValueError(f"a window holds at least the token itself, not {window}")
    shape = AttentionShape(q.shape[1], k_cache.shape[-2], q.shape[2], k_cache.dtype, window)
    group_size(shape)
    return shape
