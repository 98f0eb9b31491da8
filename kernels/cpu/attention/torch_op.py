"""Paged attention for torch tensors on CPUs, compiled by numba: the fallback where the packed decoder does not run.

Keys and values are read in blocks of 64 positions, counted from the sequence's start, and each query token goes through
them separately, in order (online softmax, Milakov and Gimelshein 2018). So a token's result has the same bits whatever
shares its batch, however its prompt was cut into chunks, and whatever was cached.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch

from plait.kernels.cpu.attention.kv_layout import KV_BLOCK
from plait.kernels.cpu.compile_cache import cached_njit
from plait.kernels.layout import AttentionLayout

TILE_TOKENS = 8  # query tokens of one row that read a block together


@cached_njit(inline="always")
def _attend(
    query: Any,  # [D]
    keys: Any,  # [KV_BLOCK, D]
    values: Any,
    begin: int,
    end: int,
    scale: float,
    softcap: float,
    scores: Any,  # [KV_BLOCK], memory for them
    running_max: Any,  # [1]
    running_sum: Any,  # [1]
    accumulators: Any,  # [D]
) -> None:
    """Updates one query token of one head with the keys and values [begin, end) of a block."""
    best = running_max[0]
    for j in range(begin, end):
        dot = np.float32(0.0)
        for d in range(len(query)):
            dot += query[d] * keys[j, d]
        dot *= np.float32(scale)
        if softcap:
            dot = np.float32(softcap) * np.tanh(dot / np.float32(softcap))
        scores[j] = dot
        best = max(best, dot)
    rescale = np.exp(running_max[0] - best)
    running_max[0] = best
    running_sum[0] *= rescale
    for d in range(len(query)):
        accumulators[d] *= rescale
    for j in range(begin, end):
        prob = np.exp(scores[j] - best)
        running_sum[0] += prob
        for d in range(len(query)):
            accumulators[d] += prob * values[j, d]


@cached_njit(parallel=True, fastmath=True, boundscheck=False)
def _paged_attention(
    q: Any,  # [T, H, D] float32
    k_cache: Any,  # [slots, G, D], the bits of bfloat16 (uint16) or of float32 (uint32)
    v_cache: Any,
    shift: Any,  # uint32: 16 widens the bits of bfloat16 to float32, 0 keeps float32
    q_starts: Any,  # [R + 1]
    kv_starts: Any,  # [R + 1]
    first_pages: Any,  # [R]
    kv_pages: Any,
    page_size: int,
    tile_rows: Any,  # [tiles], the row of each tile
    tile_firsts: Any,  # [tiles], its first token within the row
    scale: float,
    window: int,
    softcap: float,  # 0: none
    out: Any,  # [T, H, D] float32
) -> None:
    num_heads, head_dim = q.shape[1], q.shape[2]
    num_kv_heads = k_cache.shape[1]
    q_per_kv = num_heads // num_kv_heads
    for item in numba.prange(len(tile_rows) * num_kv_heads):
        tile, kv_head = item // num_kv_heads, item % num_kv_heads
        row = tile_rows[tile]
        q_len = q_starts[row + 1] - q_starts[row]
        kv_len = kv_starts[row + 1] - kv_starts[row]
        first = tile_firsts[tile]
        count = min(TILE_TOKENS, q_len - first)
        start = kv_len - q_len + first  # position of the tile's first token
        lanes = count * q_per_kv
        key_bits = np.empty((KV_BLOCK, head_dim), np.uint32)
        value_bits = np.empty((KV_BLOCK, head_dim), np.uint32)
        keys, values = key_bits.view(np.float32), value_bits.view(np.float32)
        scores = np.empty(KV_BLOCK, np.float32)
        accumulators = np.zeros((lanes, head_dim), np.float32)
        running_max = np.full(lanes, np.float32(-1e30), np.float32)
        running_sum = np.zeros(lanes, np.float32)
        lowest = max(0, start - window + 1)
        for block in range(lowest // KV_BLOCK, (start + count - 1) // KV_BLOCK + 1):
            base = block * KV_BLOCK
            block_len = min(KV_BLOCK, kv_len - base)
            for j in range(block_len):
                key = base + j
                slot = kv_pages[first_pages[row] + key // page_size] * page_size + key % page_size
                for d in range(head_dim):
                    key_bits[j, d] = np.uint32(k_cache[slot, kv_head, d]) << shift
                    value_bits[j, d] = np.uint32(v_cache[slot, kv_head, d]) << shift
            for lane in range(lanes):
                token = lane // q_per_kv
                begin = max(0, start + token - window + 1 - base)
                end = min(KV_BLOCK, start + token + 1 - base)
                if end > begin:
                    query = q[q_starts[row] + first + token, kv_head * q_per_kv + lane % q_per_kv]
                    best, total, target = running_max[lane : lane + 1], running_sum[lane : lane + 1], accumulators[lane]
                    _attend(query, keys, values, begin, end, scale, softcap, scores, best, total, target)
        for lane in range(lanes):
            token, head = lane // q_per_kv, kv_head * q_per_kv + lane % q_per_kv
            inverse = np.float32(1.0) / running_sum[lane]
            for d in range(head_dim):
                out[q_starts[row] + first + token, head, d] = accumulators[lane, d] * inverse


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    layout: AttentionLayout,
    scale: float,
    window: int | None = None,
    *,
    softcap: float | None = None,
) -> torch.Tensor:
    """Computes `reference.paged_attention` for bfloat16 and float32 caches on a CPU."""
    q_starts = layout.q_starts.numpy()
    lengths = np.diff(q_starts)
    per_row = -(-lengths // TILE_TOKENS)
    tile_rows = np.repeat(np.arange(len(lengths), dtype=np.int32), per_row)
    tile_firsts = np.concatenate([np.arange(n, dtype=np.int32) * TILE_TOKENS for n in per_row])
    out = torch.empty(q.shape, dtype=torch.float32)
    _paged_attention(
        q.float().contiguous().numpy(),
        _bits(k_cache),
        _bits(v_cache),
        np.uint32(16 if k_cache.dtype == torch.bfloat16 else 0),
        q_starts,
        layout.kv_starts.numpy(),
        layout.first_pages.numpy(),
        layout.kv_pages.numpy(),
        layout.page_size,
        tile_rows,
        tile_firsts,
        scale,
        window if window is not None else 1 << 30,
        softcap or 0.0,
        out.numpy(),
    )
    return out.to(q.dtype)


def _bits(cache: torch.Tensor) -> Any:
    """Returns the bits of a cache as integers [slots, G, D]."""
    cache = cache.view(-1, *cache.shape[-2:])
    return cache.view(torch.uint16 if cache.dtype == torch.bfloat16 else torch.uint32).numpy()
