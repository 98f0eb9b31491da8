"""Paged attention for torch tensors on CPUs, where the packed decoder does not run.

Keys and values are read in blocks of 64 positions, counted from the sequence's start, and each query token goes through
them separately, in order (online softmax, Milakov and Gimelshein 2018). So a token's result has the same bits whatever
shares its batch, however its prompt was cut into chunks, and whatever was cached.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from plait.kernels.cpu import vector_ops
from plait.kernels.cpu.attention import online_softmax
from plait.kernels.cpu.attention.kv_layout import KV_BLOCK, LANES
from plait.kernels.cpu.attention.workspace import float32_array, int32_array
from plait.kernels.cpu.kernel_args import (
    KernelArgs,
    aligned_zeros,
    args_at,
    float32_matrix,
    float64_matrix,
    int32_matrix,
    int32_vector,
    int64_matrix,
    uint16_matrix,
)
from plait.kernels.cpu.parallel.thread_pool import SERIAL_PART, ThreadKernel
from plait.kernels.cpu.parallel.threads import COUNTER_STRIDE, claim_work
from plait.kernels.cpu.vector_ops import address_of
from plait.kernels.layout import AttentionLayout
from plait.kernels.operators import AttentionLayer

TILE_TOKENS = 8  # query tokens of one row that read a block together
NO_SCORE = -1e30  # of a position that is not seen, and the running maximum before any score

# The arguments: T tokens, H query heads, G key heads of D channels; W is D, padded to whole vectors.
QUERIES, OUT = 0, 1  # float32 [T, H W]
KEYS, VALUES = 2, 3  # [slots, G D]: float32, or the bits of bfloat16 (uint16)
Q_STARTS, KV_STARTS, FIRST_PAGES, KV_PAGES = 4, 5, 6, 7  # int32, of `AttentionLayout`
TILES = 8  # int32 [tiles, 2]: the row of each tile, and its first token within the row
SETTINGS = 9  # int64 [1, 6]: H / G, G, D, page size, window, 1 if the cache is bfloat16
FACTORS = 10  # float64 [1, 2]: the scale of a score, and the soft cap (0: none)
COUNTERS = 11  # int64, zeros: how many items threads have claimed
WORKSPACES = 12  # float32 [threads, floats of a workspace], zeros
ENTRIES = 13


def run_torch_attention(thread_id: int, threads: int, address: int) -> None:
    """Computes a thread's share of the items: a tile and a key head each."""
    if thread_id == SERIAL_PART:
        return
    args = args_at(address, ENTRIES)
    num_kv_heads = int64_matrix(args, SETTINGS)[0, 1]
    items = args[TILES, 1] * num_kv_heads
    workspace = args[WORKSPACES, 0] + 4 * thread_id * args[WORKSPACES, 2]
    while True:
        item = claim_work(args[COUNTERS, 0], 0, 1)
        if item >= items:
            break
        _attend_tile(args, item // num_kv_heads, item % num_kv_heads, workspace)


_run = ThreadKernel(run_torch_attention)


def _attend_tile(args: Any, tile: int, kv_head: int, workspace: int) -> None:
    """Computes a tile's tokens for the query heads of one key head.

    A lane is a token and a query head. The workspace holds keys and values [64, W], scores [64] and a vector, the
    lanes' maxima and sums, and their accumulators [lanes, W].
    """
    settings, tiles = int64_matrix(args, SETTINGS)[0], int32_matrix(args, TILES)
    queries, out = float32_matrix(args, QUERIES), float32_matrix(args, OUT)
    q_starts, kv_starts = int32_vector(args, Q_STARTS), int32_vector(args, KV_STARTS)
    q_per_kv, window = settings[0], settings[4]
    width = queries.shape[1] // (settings[1] * q_per_kv)
    row, first = tiles[tile, 0], tiles[tile, 1]
    q_len, kv_len = q_starts[row + 1] - q_starts[row], kv_starts[row + 1] - kv_starts[row]
    count = min(TILE_TOKENS, q_len - first)
    start = kv_len - q_len + first  # position of the tile's first token
    lanes, token = count * q_per_kv, q_starts[row] + first
    head = 4 * kv_head * q_per_kv * width  # bytes from a token's first query head to those of the key head
    scores = workspace + 8 * KV_BLOCK * width
    maxima = float32_array(scores + 4 * (KV_BLOCK + LANES), lanes)
    sums = float32_array(address_of(maxima) + 4 * lanes, lanes)
    accumulators = float32_array(_rounded_up(address_of(sums) + 4 * lanes), lanes * width)
    for lane in range(lanes):
        maxima[lane], sums[lane] = np.float32(NO_SCORE), np.float32(0.0)
    for i in range(lanes * width):
        accumulators[i] = np.float32(0.0)
    for block in range(max(0, start - window + 1) // KV_BLOCK, (start + count - 1) // KV_BLOCK + 1):
        base = block * KV_BLOCK
        _load_block(args, settings, row, base, min(KV_BLOCK, kv_len - base), kv_head, width, workspace)
        for lane in range(lanes):
            position = start + lane // q_per_kv - base
            begin, end = max(0, position - window + 1), min(KV_BLOCK, position + 1)
            if end > begin:
                query = address_of(queries) + 4 * (token + lane // q_per_kv) * queries.shape[1] + head
                query += 4 * (lane % q_per_kv) * width
                memory = address_of(accumulators) + 4 * lane * width
                _attend_block(args, query, begin, end, width, workspace, maxima, sums, lane, memory)
    for lane in range(lanes):
        result = address_of(out) + 4 * (token + lane // q_per_kv) * out.shape[1] + head + 4 * (lane % q_per_kv) * width
        _write_scaled(address_of(accumulators) + 4 * lane * width, np.float32(1.0) / sums[lane], result, width)


def _rounded_up(address: int) -> int:
    return (address + 63) // 64 * 64


def _load_block(
    args: Any, settings: Any, row: int, base: int, count: int, kv_head: int, width: int, workspace: int
) -> None:
    """Copies the keys and values of `count` positions from `base` on to the workspace, as float32."""
    first, pages = int32_vector(args, FIRST_PAGES)[row], int32_vector(args, KV_PAGES)
    head_dim, page_size = settings[2], settings[3]
    channel = kv_head * head_dim
    for part in range(2):
        for j in range(count):
            position = base + j
            slot = pages[first + position // page_size] * page_size + position % page_size
            target = float32_array(workspace + 4 * width * (part * KV_BLOCK + j), head_dim)
            if settings[5]:
                bits, source = int32_array(address_of(target), head_dim), uint16_matrix(args, KEYS + part)
                for d in range(head_dim):
                    bits[d] = source[slot, channel + d] << 16
            else:
                numbers = float32_matrix(args, KEYS + part)
                for d in range(head_dim):
                    target[d] = numbers[slot, channel + d]


def _attend_block(
    args: Any,
    query: int,
    begin: int,
    end: int,
    width: int,
    workspace: int,
    maxima: Any,
    sums: Any,
    lane: int,
    accumulators: int,
) -> None:
    """Updates a lane with the positions [begin, end) of the block in the workspace."""
    keys, values = workspace, workspace + 4 * KV_BLOCK * width
    factors, vectors = float64_matrix(args, FACTORS), width // LANES
    scores = float32_array(values + 4 * KV_BLOCK * width, KV_BLOCK + LANES)
    for j in range(KV_BLOCK + LANES):
        scores[j] = np.float32(NO_SCORE)
    for j in range(begin, end):
        scores[j] = vector_ops.dot(query, keys + 4 * j * width, vectors) * np.float32(factors[0, 0])
    if factors[0, 1]:
        cap = np.float32(factors[0, 1])
        online_softmax.soft_cap(address_of(scores), np.float32(1.0) / cap, cap, KV_BLOCK // LANES)
        for j in range(begin):
            scores[j] = np.float32(NO_SCORE)
        for j in range(end, KV_BLOCK):
            scores[j] = np.float32(NO_SCORE)
    best = maxima[lane]
    scores[KV_BLOCK] = best
    for j in range(begin, end):
        if scores[j] > best:
            best = scores[j]
    total = vector_ops.exp_into(address_of(scores), best, KV_BLOCK // LANES)
    vector_ops.exp_into(address_of(scores) + 4 * KV_BLOCK, best, 1)
    rescale = scores[KV_BLOCK]
    maxima[lane], sums[lane] = best, sums[lane] * rescale + total
    _write_scaled(accumulators, rescale, accumulators, width)
    for j in range(begin, end):
        vector_ops.add_scaled_into(accumulators, values + 4 * j * width, scores[j], vectors)


def _write_scaled(x: int, factor: Any, out: int, count: int) -> None:
    source, target = float32_array(x, count), float32_array(out, count)
    for i in range(count):
        target[i] = source[i] * factor


def paged_attention(q: torch.Tensor, layer: AttentionLayer, layout: AttentionLayout) -> torch.Tensor:
    """Computes `reference.paged_attention` for bfloat16 and float32 caches on a CPU."""
    (k_cache, v_cache, _, _), scale, window, softcap = layer
    tokens, num_heads, head_dim = q.shape
    num_kv_heads, padding = k_cache.shape[-2], -head_dim % LANES
    is_bfloat16, q_per_kv, threads = k_cache.dtype == torch.bfloat16, num_heads // num_kv_heads, torch.get_num_threads()
    lanes, width = TILE_TOKENS * q_per_kv, head_dim + padding
    queries = torch.nn.functional.pad(q.float(), (0, padding)).contiguous()
    out = torch.empty_like(queries)
    args = KernelArgs(ENTRIES)
    for entry, tensor in ((QUERIES, queries), (OUT, out)):
        args.set(entry, tensor.numpy().reshape(tokens, -1))
    for entry, cache in ((KEYS, k_cache), (VALUES, v_cache)):
        numbers = cache.view(torch.uint16) if is_bfloat16 else cache
        args.set(entry, numbers.numpy().reshape(-1, num_kv_heads * head_dim))
    starts = (layout.q_starts, layout.kv_starts, layout.first_pages, layout.kv_pages)
    for entry, tensor in zip((Q_STARTS, KV_STARTS, FIRST_PAGES, KV_PAGES), starts, strict=True):
        args.set(entry, tensor.numpy())
    args.set(TILES, _tiles(layout.q_starts.numpy()))
    settings = (q_per_kv, num_kv_heads, head_dim, layout.page_size, 1 << 30 if window is None else window, is_bfloat16)
    args.set(SETTINGS, np.array([settings], np.int64))
    args.set(FACTORS, np.array([[scale, softcap or 0.0]]))
    args.set(COUNTERS, np.zeros(COUNTER_STRIDE, np.int64))
    floats = (2 * KV_BLOCK + lanes) * width + KV_BLOCK + 2 * LANES + 2 * lanes
    args.set(WORKSPACES, aligned_zeros((threads, floats + -floats % LANES), np.float32))
    _run(args.descriptors, threads)
    return out[..., :head_dim].to(q.dtype)


def _tiles(q_starts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns int32 [tiles, 2]: the row of each tile, and its first token within the row."""
    per_row = -(-np.diff(q_starts) // TILE_TOKENS)
    rows = np.repeat(np.arange(len(per_row)), per_row)
    firsts = np.concatenate([TILE_TOKENS * np.arange(n) for n in per_row])
    return np.stack([rows, firsts], axis=1).astype(np.int32)
