"""How a step's arrays reach compiled code: one int64 matrix of their addresses and shapes.

Passing fifty arrays on every call would take longer than a layer of a small model. So the arguments are written once,
and a step rewrites only what changes.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import Any

import numpy as np

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.compiler.intrinsics import Int, carray, intrinsic

INTS_PER_ENTRY = 3  # int64 for an array: its address, its rows, the elements of a row
CACHE_LINE = 64  # bytes of a cache line, and of an AVX-512 vector
HUGE_PAGE = 2 << 20


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """Returns an uninitialized array that begins at a cache line, so that no vector of it straddles two lines."""
    return _aligned(np.empty(_padded_bytes(shape, dtype), np.uint8), shape, dtype)


def aligned_zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """Returns an array of zeros that begins at a cache line."""
    return _aligned(np.zeros(_padded_bytes(shape, dtype), np.uint8), shape, dtype)


def huge_zeros(num_bytes: int) -> np.ndarray[Any, Any]:
    """Returns zeros, uint8, in huge pages where the system has them and the bytes fill one."""
    if num_bytes < HUGE_PAGE:
        return aligned_zeros((num_bytes,), np.uint8)
    memory = mmap.mmap(-1, num_bytes + -num_bytes % HUGE_PAGE, flags=mmap.MAP_PRIVATE)
    with contextlib.suppress(OSError, AttributeError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _padded_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    return math.prod(shape) * int(np.dtype(dtype).itemsize) + CACHE_LINE


def _aligned(memory: np.ndarray[Any, Any], shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    start = -memory.ctypes.data % CACHE_LINE
    array: np.ndarray[Any, Any] = memory[start : start + len(memory) - CACHE_LINE].view(dtype).reshape(shape)
    return array


class KernelArgs:
    """The arguments of a kernel: compiled code reads `descriptors`, and the object keeps the arrays alive."""

    def __init__(self, entries: int) -> None:
        self.descriptors = np.zeros((entries, INTS_PER_ENTRY), np.int64)
        self._keep_alive: list[np.ndarray[Any, Any] | None] = [None] * entries

    def set(self, entry: int, array: np.ndarray[Any, Any], rows: int | None = None) -> None:
        """Sets an entry to a C-contiguous array, or to its first `rows` rows, as a matrix."""
        assert array.flags.c_contiguous
        length = len(array)
        if self._keep_alive[entry] is not array:  # asking for an array's address is slow
            self._keep_alive[entry] = array
            self.descriptors[entry, 0] = array.ctypes.data
        self.descriptors[entry, 1] = length if rows is None else rows
        self.descriptors[entry, 2] = array.size // length if length else 1


@intrinsic
def as_pointer(b: Any, address: Int) -> Any:
    """Converts an address to the pointer that `carray` takes."""
    return b.inttoptr(address, v.I8.as_pointer())


def args_at(address: int, entries: int) -> Any:
    """Returns the descriptors at an address, int64 [entries, 3]."""
    return carray(as_pointer(address), (entries, INTS_PER_ENTRY), np.int64)


def float32_matrix(args: Any, entry: int) -> Any:
    """Returns an entry as float32 [rows, width]."""
    return carray(as_pointer(args[entry, 0]), (args[entry, 1], args[entry, 2]), np.float32)


def float64_matrix(args: Any, entry: int) -> Any:
    """Returns an entry as float64 [rows, width]."""
    return carray(as_pointer(args[entry, 0]), (args[entry, 1], args[entry, 2]), np.float64)


def int8_matrix(args: Any, entry: int) -> Any:
    """Returns an entry as int8 [rows, width]."""
    return carray(as_pointer(args[entry, 0]), (args[entry, 1], args[entry, 2]), np.int8)


def uint16_matrix(args: Any, entry: int) -> Any:
    """Returns an entry as uint16 [rows, width]."""
    return carray(as_pointer(args[entry, 0]), (args[entry, 1], args[entry, 2]), np.uint16)


def int32_matrix(args: Any, entry: int) -> Any:
    """Returns an entry as int32 [rows, width]."""
    return carray(as_pointer(args[entry, 0]), (args[entry, 1], args[entry, 2]), np.int32)


def int32_vector(args: Any, entry: int) -> Any:
    """Returns an entry as int32 [rows]."""
    return carray(as_pointer(args[entry, 0]), (args[entry, 1],), np.int32)


def int64_matrix(args: Any, entry: int) -> Any:
    """Returns an entry as int64 [rows, width]."""
    return carray(as_pointer(args[entry, 0]), (args[entry, 1], args[entry, 2]), np.int64)


def scalar(args: Any, entry: int) -> Any:
    """Returns the float64 of an entry that holds one number."""
    return carray(as_pointer(args[entry, 0]), (1,), np.float64)[0]
