"""What one thread's attention works on: one piece of memory, 64-byte aligned, and where in it everything lies.

Knows: sizes. Must not know: what is computed there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from plait.kernels import cpu_flash, cpu_lanes
from plait.kernels.cpu_plan import pointer

ALIGN = 64
KEYS = cpu_lanes.BLOCK
SPARE = cpu_flash.LANES
HELD_BYTES = 32 << 10  # of queries and totals, which are gone through for each block: as much as a first cache holds
MOST_TOGETHER = 384  # lanes


class Room(NamedTuple):
    """Addresses. What is in pairs, for CPUs that multiply bfloat16, lies where others have it in float32."""

    shapes: int  # AMX: of its registers
    size: int  # channels of a head
    capacity: int  # lanes, of all key heads that are computed together
    keys: int  # float32 [D, 64]; in pairs: bfloat16 [64, D] where they are scattered
    values: int  # float32 [64, D]; in pairs: bfloat16 [32, D, 2]
    copies: int  # in pairs: bfloat16 [64, D], values where they are scattered
    query_step: int  # in pairs: bytes from one pair of channels to the next
    queries: int  # float32 [lanes, D]; in pairs: bfloat16 [D / 2, lanes, 2]
    rows: int  # in pairs: bfloat16 [16, D], queries before they are turned; then a few of them, see `cpu_dots`
    totals: int  # float32 [lanes, D]
    scores: int  # float32 [3, 64]; in pairs: [2, 64, 16], one being computed while the other is used
    weights: int  # in pairs: bfloat16 [16, 64]
    references: int  # float32 [lanes]
    sums: int  # float32 [lanes]
    floors: int  # int32 [lanes], the first position that a lane sees
    limits: int  # int32 [lanes], and the one behind its last
    places: int  # int64 [2, 64] addresses of a block's keys and values
    marks: int  # int32 [lanes + 1], the first lane of each segment, and behind the last one's
    ranges: int  # int64 [lanes, 3]: first segment, the one behind the last, the block they are at
    joined: int  # a slot for each key head: what the splits before this one came to


@numba.njit  # type: ignore[untyped-decorator]
def padded_lanes(lanes: int) -> Any:
    """So many as are touched where a key head has so many: some behind the last are computed and never read."""
    return (lanes + 15) // 16 * 16 + SPARE


@numba.njit  # type: ignore[untyped-decorator]
def slot_bytes(lanes: int, size: int) -> Any:
    """Of a slot: totals float32 [lanes, D], references [lanes], sums [lanes]."""
    return 4 * lanes * (size + 2)


@numba.njit  # type: ignore[untyped-decorator]
def room(address: int, capacity: int, size: int) -> Any:
    """The room that begins at an address."""
    keys = address + ALIGN
    values = keys + 4 * KEYS * size
    copies = values + 4 * KEYS * size
    queries = copies + 2 * KEYS * size
    rows = queries + 4 * capacity * size
    totals = rows + 2 * cpu_flash.LANES * size
    scores = totals + 4 * capacity * size
    weights = scores + 2 * 4 * KEYS * cpu_flash.LANES
    references = weights + 2 * KEYS * cpu_flash.LANES
    sums = references + 4 * capacity
    floors = sums + 4 * capacity
    limits = floors + 4 * capacity
    places = limits + 4 * capacity
    marks = places + 2 * 8 * KEYS
    ranges = marks + 4 * (capacity + 2)  # whole int64, the capacity being even
    joined = ranges + 3 * 8 * capacity
    return Room(
        address, size, capacity, keys, values, copies, 4 * capacity, queries, rows, totals, scores, weights, references,
        sums, floors, limits, places, marks, ranges, joined,
    )  # fmt: skip


def capacity(lanes: int, groups: int) -> int:
    """Lanes to have room for where a tile has at most so many of each key head: of one, or of many that are small."""
    return max(int(padded_lanes.py_func(lanes)), min(groups * int(padded_lanes.py_func(1)), MOST_TOGETHER))


@numba.njit  # type: ignore[untyped-decorator]
def groups_together(lanes: int, here: Room) -> Any:
    """Key heads, with so many lanes each, that go through a block before the next one is read."""
    return max(np.int64(1), min(here.capacity // padded_lanes(lanes), HELD_BYTES // (8 * here.size * lanes)))


@numba.njit  # type: ignore[untyped-decorator]
def integers(address: int, count: int) -> Any:
    """[count] int32"""
    return numba.carray(pointer(address), (count,), np.int32)


@numba.njit  # type: ignore[untyped-decorator]
def longs(address: int, count: int) -> Any:
    """[count] int64"""
    return numba.carray(pointer(address), (count,), np.int64)


@numba.njit  # type: ignore[untyped-decorator]
def floats(address: int, count: int) -> Any:
    """[count] float32"""
    return numba.carray(pointer(address), (count,), np.float32)


def allocate(threads: int, lanes: int, size: int) -> np.ndarray[Any, Any]:
    """Uint8 [threads, bytes] for a `capacity` of so many lanes."""
    width = room.py_func(0, lanes, size).joined + slot_bytes.py_func(lanes, size)
    width += -width % ALIGN
    memory = np.zeros(threads * width + ALIGN, np.uint8)
    start = -memory.ctypes.data % ALIGN
    rooms = memory[start : start + threads * width].reshape(threads, width)
    rooms[:, :ALIGN] = np.frombuffer(cpu_flash.shapes(), np.uint8)
    return rooms
