"""The memory that one thread's attention works in: one 64-byte aligned piece, and the addresses of its parts."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from plait.kernels.cpu.attention.kv_layout import KV_BLOCK, LANES
from plait.kernels.cpu.attention.products import amx_kernel
from plait.kernels.cpu.compiler.intrinsics import carray
from plait.kernels.cpu.kernel_args import CACHE_LINE, aligned_zeros, as_pointer

PADDING_LANES = LANES
L1_BUDGET_BYTES = 32 << 10  # of queries and accumulators, which every block reads: what a first-level cache holds
MAX_LANES = 384  # upper bound of the capacity for many key heads of few lanes


class AttentionWorkspace(NamedTuple):
    """Addresses, and three sizes. The packed bfloat16 form (`kv_layout`) and the float32 form share the memory."""

    tile_config: int  # AMX: the 64 bytes that LDTILECFG reads
    head_dim: int
    capacity: int  # lanes, of all key heads that are computed together
    keys: int  # float32 [D, 64]; packed: bfloat16 [64, D], copies of keys that are not consecutive
    values: int  # float32 [64, D]; packed: bfloat16 [32, D, 2]
    value_copies: int  # packed: bfloat16 [64, D], values that are not consecutive, before they are packed
    query_stride: int  # packed: bytes from one pair of channels to the next
    queries: int  # float32 [lanes, D]; packed: bfloat16 [D / 2, lanes, 2], or int8 [D / 4, 2, lanes, 4]
    query_rows: int  # int8 [lanes, D / 4, 2, 4], the second half of that memory, see `int8_vnni_kernel`
    query_scales: int  # float32 [lanes], of int8 queries
    query_excess: int  # int32 [lanes], see `int8_vnni_kernel.quantize_query`
    rows: int  # packed: bfloat16 [16, D], queries before they are transposed; later `pack_queries_x4`'s result
    accumulators: int  # float32 [lanes, D]
    scores: int  # float32 [3, 64]; packed: float32 [2, 64, 16], one half being computed while the other is used
    probs: int  # packed: bfloat16 [16, 64], or uint8 [16, 2, lanes, 4]
    prob_factors: int  # float32 [16], what the integers of 16 lanes' probabilities stand for
    running_max: int  # float32 [lanes]
    running_sum: int  # float32 [lanes]
    kv_begins: int  # int32 [lanes], the first position that each lane sees
    kv_ends: int  # int32 [lanes], the position after the last one that each lane sees
    kv_addresses: int  # int64 [2, 64], addresses of a block's keys
    key_scales: int  # float32 [64], of a block's int8 keys
    value_scales: int  # float32 [64]
    largest_scales: int  # float32 [2, 16]: the block's largest value scale 16 times, the largest that each lane sees
    lane_starts: int  # int32 [lanes + 1], the first lane of each segment, then the number of lanes
    stack: int  # int64 [lanes, 3]: first segment, the one after the last, the block they have reached
    merged: int  # one slot for each key head: the merged results of the splits so far


def padded_lanes(lanes: int) -> Any:
    """Returns how many lanes are touched for a key head of `lanes`: those that fill the last vectors included."""
    return (lanes + 15) // 16 * 16 + PADDING_LANES


def partial_bytes(lanes: int, head_dim: int) -> Any:
    """Returns the size of a slot of partial results: float32 accumulators [lanes, D], maxima [lanes], sums [lanes]."""
    return 4 * lanes * (head_dim + 2)


def workspace_at(address: int, capacity: int, head_dim: int) -> Any:
    """Returns the workspace that begins at an address."""
    keys = address + CACHE_LINE
    values = keys + 4 * KV_BLOCK * head_dim
    value_copies = values + 4 * KV_BLOCK * head_dim
    queries = value_copies + 2 * KV_BLOCK * head_dim
    query_rows = queries + 2 * capacity * head_dim
    query_scales = queries + 4 * capacity * head_dim
    query_excess = query_scales + 4 * capacity
    rows = query_excess + 4 * capacity
    accumulators = rows + 2 * LANES * head_dim
    scores = accumulators + 4 * capacity * head_dim
    probs = scores + 2 * 4 * KV_BLOCK * LANES
    prob_factors = probs + 2 * KV_BLOCK * LANES
    running_max = prob_factors + 4 * LANES
    running_sum = running_max + 4 * capacity
    kv_begins = running_sum + 4 * capacity
    kv_ends = kv_begins + 4 * capacity
    kv_addresses = kv_ends + 4 * capacity
    key_scales = kv_addresses + 2 * 8 * KV_BLOCK
    value_scales = key_scales + 4 * KV_BLOCK
    largest_scales = value_scales + 4 * KV_BLOCK
    lane_starts = largest_scales + 2 * 4 * LANES
    stack = lane_starts + 4 * (capacity + 2)  # stays aligned to int64, the capacity being even
    merged = stack + 3 * 8 * capacity
    return AttentionWorkspace(
        address, head_dim, capacity, keys, values, value_copies, 4 * capacity, queries, query_rows, query_scales,
        query_excess, rows, accumulators, scores, probs, prob_factors, running_max, running_sum, kv_begins, kv_ends,
        kv_addresses, key_scales, value_scales, largest_scales, lane_starts, stack, merged,
    )  # fmt: skip


def capacity(lanes: int, num_kv_heads: int) -> int:
    """Returns the capacity for tiles of up to `lanes` lanes of a key head: one such head, or many of few lanes."""
    return max(int(padded_lanes(lanes)), min(num_kv_heads * int(padded_lanes(1)), MAX_LANES))


def kv_heads_per_pass(lanes: int, ws: AttentionWorkspace) -> Any:
    """Returns how many key heads, of `lanes` lanes each, are computed together on a block before the next is read."""
    return max(1, min(ws.capacity // padded_lanes(lanes), L1_BUDGET_BYTES // (8 * ws.head_dim * lanes)))


def int32_array(address: int, count: int) -> Any:
    """Returns the int32 array [count] at an address."""
    return carray(as_pointer(address), (count,), np.int32)


def int64_array(address: int, count: int) -> Any:
    """Returns the int64 array [count] at an address."""
    return carray(as_pointer(address), (count,), np.int64)


def float32_array(address: int, count: int) -> Any:
    """Returns the float32 array [count] at an address."""
    return carray(as_pointer(address), (count,), np.float32)


def allocate(threads: int, lanes: int, head_dim: int) -> np.ndarray[Any, Any]:
    """Returns uint8 [threads, bytes]: a workspace for each thread, of a capacity of `lanes` lanes."""
    width = workspace_at(0, lanes, head_dim).merged + partial_bytes(lanes, head_dim)
    workspaces = aligned_zeros((threads, width + -width % CACHE_LINE), np.uint8)
    workspaces[:, :CACHE_LINE] = np.frombuffer(amx_kernel.tile_config(), np.uint8)
    return workspaces
