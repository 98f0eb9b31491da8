"""How a step's arrays reach compiled code: their addresses and shapes in one vector of int64.

numba unpacks every array of every call by itself, which for fifty of them takes longer than a small model's layer;
and its parallel loops take no records. So a plan is written once and only what changes is written again.

Knows: addresses and shapes. Must not know: what the arrays mean.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from plait.kernels import cpu_ir as v

ENTRY = 3  # int64 of an array: its address, its rows, what a row holds
LINE = 64  # bytes of a cache line, and of a vector


def aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """An array that begins at a cache line, so that no vector of it lies in two; what is in it is not set."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    found: np.ndarray[Any, Any] = memory[start : start + size].view(dtype).reshape(shape)
    return found


class Plan:
    """`numbers` is what compiled code reads; it keeps the arrays alive that it points to."""

    def __init__(self, entries: int) -> None:
        self.numbers = np.zeros((entries, ENTRY), np.int64)
        self._held: list[np.ndarray[Any, Any] | None] = [None] * entries

    def put(self, entry: int, array: np.ndarray[Any, Any], rows: int | None = None) -> None:
        """The array, C-contiguous, or its first `rows` rows, as a matrix."""
        assert array.flags.c_contiguous
        length = len(array)
        if self._held[entry] is not array:  # an array's address takes a while to ask for
            self._held[entry] = array
            self.numbers[entry, 0] = array.ctypes.data
        self.numbers[entry, 1] = length if rows is None else rows
        self.numbers[entry, 2] = array.size // length if length else 1


@intrinsic  # type: ignore[untyped-decorator]
def pointer(context: Any, address: Any) -> Any:
    """An address as numba.carray takes it."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        return b.inttoptr(values[0], v.I8.as_pointer())

    return types.voidptr(types.int64), generate


@numba.njit  # type: ignore[untyped-decorator]
def floats(plan: Any, entry: int) -> Any:
    """[rows, width] float32"""
    return numba.carray(pointer(plan[entry, 0]), (plan[entry, 1], plan[entry, 2]), np.float32)


@numba.njit  # type: ignore[untyped-decorator]
def doubles(plan: Any, entry: int) -> Any:
    """[rows, width] float64"""
    return numba.carray(pointer(plan[entry, 0]), (plan[entry, 1], plan[entry, 2]), np.float64)


@numba.njit  # type: ignore[untyped-decorator]
def bytes_(plan: Any, entry: int) -> Any:
    """[rows, width] int8"""
    return numba.carray(pointer(plan[entry, 0]), (plan[entry, 1], plan[entry, 2]), np.int8)


@numba.njit  # type: ignore[untyped-decorator]
def halves(plan: Any, entry: int) -> Any:
    """[rows, width] uint16"""
    return numba.carray(pointer(plan[entry, 0]), (plan[entry, 1], plan[entry, 2]), np.uint16)


@numba.njit  # type: ignore[untyped-decorator]
def ints(plan: Any, entry: int) -> Any:
    """[rows] int32"""
    return numba.carray(pointer(plan[entry, 0]), (plan[entry, 1],), np.int32)


@numba.njit  # type: ignore[untyped-decorator]
def table(plan: Any, entry: int) -> Any:
    """[rows, width] int64"""
    return numba.carray(pointer(plan[entry, 0]), (plan[entry, 1], plan[entry, 2]), np.int64)


@numba.njit  # type: ignore[untyped-decorator]
def number(plan: Any, entry: int) -> Any:
    """A float64 that was put as an array of one."""
    return numba.carray(pointer(plan[entry, 0]), (1,), np.float64)[0]
