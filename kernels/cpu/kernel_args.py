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

from plait.kernels.cpu import llvm as v

INTS_PER_ENTRY = 3  # int64 of an array: its address, its rows, what a row holds
CACHE_LINE = 64  # bytes of a cache line, and of a vector


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """An array that begins at a cache line, so that no vector of it lies in two; what is in it is not set."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    found: np.ndarray[Any, Any] = memory[start : start + size].view(dtype).reshape(shape)
    return found


class KernelArgs:
    """`descriptors` is what compiled code reads; it keeps the arrays alive that it points to."""

    def __init__(self, entries: int) -> None:
        self.descriptors = np.zeros((entries, INTS_PER_ENTRY), np.int64)
        self._keep_alive: list[np.ndarray[Any, Any] | None] = [None] * entries

    def set(self, entry: int, array: np.ndarray[Any, Any], rows: int | None = None) -> None:
        """The array, C-contiguous, or its first `rows` rows, as a matrix."""
        assert array.flags.c_contiguous
        length = len(array)
        if self._keep_alive[entry] is not array:  # an array's address takes a while to ask for
            self._keep_alive[entry] = array
            self.descriptors[entry, 0] = array.ctypes.data
        self.descriptors[entry, 1] = length if rows is None else rows
        self.descriptors[entry, 2] = array.size // length if length else 1


@intrinsic  # type: ignore[untyped-decorator]
def as_pointer(context: Any, address: Any) -> Any:
    """An address as numba.carray takes it."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        return b.inttoptr(values[0], v.I8.as_pointer())

    return types.voidptr(types.int64), generate


@numba.njit  # type: ignore[untyped-decorator]
def float32_matrix(args: Any, entry: int) -> Any:
    """[rows, width] float32"""
    return numba.carray(as_pointer(args[entry, 0]), (args[entry, 1], args[entry, 2]), np.float32)


@numba.njit  # type: ignore[untyped-decorator]
def float64_matrix(args: Any, entry: int) -> Any:
    """[rows, width] float64"""
    return numba.carray(as_pointer(args[entry, 0]), (args[entry, 1], args[entry, 2]), np.float64)


@numba.njit  # type: ignore[untyped-decorator]
def int8_matrix(args: Any, entry: int) -> Any:
    """[rows, width] int8"""
    return numba.carray(as_pointer(args[entry, 0]), (args[entry, 1], args[entry, 2]), np.int8)


@numba.njit  # type: ignore[untyped-decorator]
def uint16_matrix(args: Any, entry: int) -> Any:
    """[rows, width] uint16"""
    return numba.carray(as_pointer(args[entry, 0]), (args[entry, 1], args[entry, 2]), np.uint16)


@numba.njit  # type: ignore[untyped-decorator]
def int32_vector(args: Any, entry: int) -> Any:
    """[rows] int32"""
    return numba.carray(as_pointer(args[entry, 0]), (args[entry, 1],), np.int32)


@numba.njit  # type: ignore[untyped-decorator]
def int64_matrix(args: Any, entry: int) -> Any:
    """[rows, width] int64"""
    return numba.carray(as_pointer(args[entry, 0]), (args[entry, 1], args[entry, 2]), np.int64)


@numba.njit  # type: ignore[untyped-decorator]
def scalar(args: Any, entry: int) -> Any:
    """A float64 that was put as an array of one."""
    return numba.carray(as_pointer(args[entry, 0]), (1,), np.float64)[0]
