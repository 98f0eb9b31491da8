"""AMX, Intel's matrix registers: whether they are there, and a thread's scratch for them.

A thread's scratch, 64-byte aligned: the shapes of its matrix registers, each 16 x 64 bytes, then what `cpu_passes`
needs. Attention's part is `cpu_flash`.

Knows: Linux's way to ask for AMX. Must not know: models, threads, what is multiplied.
"""

from __future__ import annotations

import ctypes
import platform
import struct
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from plait.kernels.cpu import isa
from plait.kernels.cpu import llvm as v

TILE_ROWS = 16  # of a matrix register
ALIGN = 64
PANELS_OFFSET = ALIGN  # in a thread's scratch
HAS_AMX = isa.has_features("amx-tile", "amx-bf16", "avx512f")
_REQUEST, _TILE_DATA, _ARCH_PRCTL = 0x1023, 18, 158  # Linux on x86-64: Documentation/arch/x86/xstate.rst


@cache
def available() -> bool:
    """Whether this CPU has AMX and Linux lets this process, and threads it starts from now on, use it."""
    if not HAS_AMX or platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0)


def allocate_scratch(threads: int, panels: int) -> np.ndarray[Any, Any]:
    """Uint8 [threads, bytes] for so many bytes of panels."""
    width = PANELS_OFFSET + panels + -panels % ALIGN
    memory = np.zeros(threads * width + ALIGN, np.uint8)
    start = -memory.ctypes.data % ALIGN
    rows = memory[start : start + threads * width].reshape(threads, width)
    rows[:, :ALIGN] = np.frombuffer(_tile_config(), np.uint8)
    return rows


def _tile_config() -> bytes:
    """What LDTILECFG reads: palette 1, then bytes of a row of each register, then rows."""
    return struct.pack("<2B14x16H16B", 1, 0, *[64] * 8, *[0] * 8, *[TILE_ROWS] * 8, *[0] * 8)


@intrinsic  # type: ignore[untyped-decorator]
def load_tile_config(context: Any, scratch: Any) -> Any:
    """Gives this thread's matrix registers the shapes at the beginning of its scratch."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        if HAS_AMX:
            v.call_intrinsic(b, "llvm.x86.ldtilecfg", ir.VoidType(), [v.pointer_at(b, values[0], v.I8)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def release_tiles(context: Any) -> Any:
    """Empties them, so that a change of threads need not save them."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        if HAS_AMX:
            v.call_intrinsic(b, "llvm.x86.tilerelease", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), generate
