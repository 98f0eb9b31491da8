"""What one thread's attention works on: one piece of memory, 64-byte aligned, and where in it everything lies.

Knows: sizes. Must not know: what is computed there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from plait.kernels.cpu.attention import amx_kernel, f32_kernel
from plait.kernels.cpu.kernel_args import as_pointer

ALIGN = 64
KV_BLOCK = f32_kernel.KV_BLOCK
PADDING_LANES = amx_kernel.LANES
L1_BUDGET_BYTES = (
    32 << 10
)  # of queries and totals, which are gone through for each block: as much as a first cache holds
MAX_LANES = 384  # lanes


class AttentionWorkspace(NamedTuple):
    """Addresses. What is in pairs, for CPUs that multiply bfloat16, lies where others have it in float32."""

    tile_config: int  # AMX: of its registers
    head_dim: int  # channels of a head
    capacity: int  # lanes, of all key heads that are computed together
    keys: int  # float32 [D, 64]; in pairs: bfloat16 [64, D] where they are scattered
    values: int  # float32 [64, D]; in pairs: bfloat16 [32, D, 2]
    value_copies: int  # in pairs: bfloat16 [64, D], values where they are scattered
    query_stride: int  # in pairs: bytes from one pair of channels to the next
    queries: int  # float32 [lanes, D]; in pairs: bfloat16 [D / 2, lanes, 2]
    rows: int  # in pairs: bfloat16 [16, D], queries before they are turned; then a few of them, see `cpu_dots`
    accumulators: int  # float32 [lanes, D]
    scores: int  # float32 [3, 64]; in pairs: [2, 64, 16], one being computed while the other is used
    probs: int  # in pairs: bfloat16 [16, 64]
    running_max: int  # float32 [lanes]
    running_sum: int  # float32 [lanes]
    kv_begins: int  # int32 [lanes], the first position that a lane sees
    kv_ends: int  # int32 [lanes], and the one behind its last
    kv_addresses: int  # int64 [2, 64] addresses of a block's keys and values
    lane_starts: int  # int32 [lanes + 1], the first lane of each segment, and behind the last one's
    stack: int  # int64 [lanes, 3]: first segment, the one behind the last, the block they are at
    merged: int  # a slot for each key head: what the splits before this one came to


@numba.njit  # type: ignore[untyped-decorator]
def padded_lanes(lanes: int) -> Any:
    """So many as are touched where a key head has so many: some behind the last are computed and never read."""
    return (lanes + 15) // 16 * 16 + PADDING_LANES


@numba.njit  # type: ignore[untyped-decorator]
def partial_bytes(lanes: int, head_dim: int) -> Any:
    """Of a slot: totals float32 [lanes, D], references [lanes], sums [lanes]."""
    return 4 * lanes * (head_dim + 2)


@numba.njit  # type: ignore[untyped-decorator]
def workspace_at(address: int, capacity: int, head_dim: int) -> Any:
    """The room that begins at an address."""
    keys = address + ALIGN
    values = keys + 4 * KV_BLOCK * head_dim
    value_copies = values + 4 * KV_BLOCK * head_dim
    queries = value_copies + 2 * KV_BLOCK * head_dim
    rows = queries + 4 * capacity * head_dim
    accumulators = rows + 2 * amx_kernel.LANES * head_dim
    scores = accumulators + 4 * capacity * head_dim
    probs = scores + 2 * 4 * KV_BLOCK * amx_kernel.LANES
    running_max = probs + 2 * KV_BLOCK * amx_kernel.LANES
    running_sum = running_max + 4 * capacity
    kv_begins = running_sum + 4 * capacity
    kv_ends = kv_begins + 4 * capacity
    kv_addresses = kv_ends + 4 * capacity
    lane_starts = kv_addresses + 2 * 8 * KV_BLOCK
    stack = lane_starts + 4 * (capacity + 2)  # whole int64, the capacity being even
    merged = stack + 3 * 8 * capacity
    return AttentionWorkspace(
        address, head_dim, capacity, keys, values, value_copies, 4 * capacity, queries, rows, accumulators, scores, probs, running_max,
        running_sum, kv_begins, kv_ends, kv_addresses, lane_starts, stack, merged,
    )  # fmt: skip


def capacity(lanes: int, num_kv_heads: int) -> int:
    """Lanes to have room for where a tile has at most so many of each key head: of one, or of many that are small."""
    return max(int(padded_lanes.py_func(lanes)), min(num_kv_heads * int(padded_lanes.py_func(1)), MAX_LANES))


@numba.njit  # type: ignore[untyped-decorator]
def kv_heads_per_pass(lanes: int, ws: AttentionWorkspace) -> Any:
    """Key heads, with so many lanes each, that go through a block before the next one is read."""
    return max(np.int64(1), min(ws.capacity // padded_lanes(lanes), L1_BUDGET_BYTES // (8 * ws.head_dim * lanes)))


@numba.njit  # type: ignore[untyped-decorator]
def int32_array(address: int, count: int) -> Any:
    """[count] int32"""
    return numba.carray(as_pointer(address), (count,), np.int32)


@numba.njit  # type: ignore[untyped-decorator]
def int64_array(address: int, count: int) -> Any:
    """[count] int64"""
    return numba.carray(as_pointer(address), (count,), np.int64)


@numba.njit  # type: ignore[untyped-decorator]
def float32_array(address: int, count: int) -> Any:
    """[count] float32"""
    return numba.carray(as_pointer(address), (count,), np.float32)


def allocate(threads: int, lanes: int, head_dim: int) -> np.ndarray[Any, Any]:
    """Uint8 [threads, bytes] for a `capacity` of so many lanes."""
    width = workspace_at.py_func(0, lanes, head_dim).merged + partial_bytes.py_func(lanes, head_dim)
    width += -width % ALIGN
    memory = np.zeros(threads * width + ALIGN, np.uint8)
    start = -memory.ctypes.data % ALIGN
    rooms = memory[start : start + threads * width].reshape(threads, width)
    rooms[:, :ALIGN] = np.frombuffer(amx_kernel.tile_config(), np.uint8)
    return rooms
