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
SPARE = cpu_flash.LANES  # lanes behind the last one that are computed and never read


class Room(NamedTuple):
    """Addresses. AMX and AVX-512 keep keys, values, queries and scores in forms of their own, in the same place."""

    shapes: int  # AMX: of its registers
    size: int  # channels of a head
    lanes: int  # the most of a tile
    keys: int  # float32 [D, 64]; AMX: bfloat16 [64, D] where they are scattered
    values: int  # float32 [64, D]; AMX: bfloat16 [32, D, 2]
    copies: int  # AMX: bfloat16 [64, D], values where they are scattered
    query_step: int  # AMX: bytes from one pair of channels to the next
    queries: int  # float32 [lanes, D]; AMX: bfloat16 [D / 2, lanes, 2]
    rows: int  # AMX: bfloat16 [16, D], queries before they are turned
    totals: int  # float32 [lanes, D]
    scores: int  # float32 [3, 64]; AMX: [2, 64, 16], one being computed while the other is used
    weights: int  # AMX: bfloat16 [16, 64]
    references: int  # float32 [lanes]
    sums: int  # float32 [lanes]
    floors: int  # int32 [lanes], the first position that a lane sees
    limits: int  # int32 [lanes], and the one behind its last
    places: int  # int64 [2, 64] addresses of a block's keys and values
    marks: int  # int32 [lanes + 1], the first lane of each segment, and behind the last one's
    ranges: int  # int64 [lanes, 3]: first segment, the one behind the last, the block they are at


@numba.njit  # type: ignore[untyped-decorator]
def room(address: int, lanes: int, size: int) -> Any:
    """The room that begins at an address, for tiles of at most so many lanes."""
    padded = (lanes + 15) // 16 * 16 + SPARE
    keys = address + ALIGN
    values = keys + 4 * KEYS * size
    copies = values + 4 * KEYS * size
    queries = copies + 2 * KEYS * size
    rows = queries + 4 * padded * size
    totals = rows + 2 * cpu_flash.LANES * size
    scores = totals + 4 * padded * size
    weights = scores + 2 * 4 * KEYS * cpu_flash.LANES
    references = weights + 2 * KEYS * cpu_flash.LANES
    sums = references + 4 * padded
    floors = sums + 4 * padded
    limits = floors + 4 * padded
    places = limits + 4 * padded
    marks = places + 2 * 8 * KEYS
    ranges = marks + 4 * (padded + 2)  # whole int64, padded being even
    return Room(
        address, size, lanes, keys, values, copies, 4 * padded, queries, rows, totals, scores, weights, references,
        sums, floors, limits, places, marks, ranges,
    )  # fmt: skip


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
    """Uint8 [threads, bytes]."""
    width = room.py_func(0, lanes, size).ranges + 24 * lanes
    width += -width % ALIGN
    memory = np.zeros(threads * width + ALIGN, np.uint8)
    start = -memory.ctypes.data % ALIGN
    rooms = memory[start : start + threads * width].reshape(threads, width)
    rooms[:, :ALIGN] = np.frombuffer(cpu_flash.shapes(), np.uint8)
    return rooms
