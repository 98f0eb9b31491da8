"""AMX, Intel's matrix registers: whether they are available, their configuration, and a thread's scratch memory.

A thread's scratch is 64-byte aligned: the register shapes that LDTILECFG reads, each 16 x 64 bytes, then the panels of
`gemm.amx_blocking`. Attention has another configuration, in `attention.amx_kernel`.
"""

from __future__ import annotations

import ctypes
import platform
import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from plait.kernels.cpu import isa
from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.compiler.intrinsics import Int, intrinsic_if
from plait.kernels.cpu.kernel_args import CACHE_LINE, aligned_zeros

TILE_ROWS = 16  # rows of a matrix register
PASS_ROWS = 2 * TILE_ROWS  # rows that one pass over a weight panel multiplies
PANELS_OFFSET = CACHE_LINE  # bytes of a thread's scratch before the panels
HAS_AMX = isa.has_features("amx-tile", "amx-bf16", "avx512f")
_REQUEST, _TILE_DATA, _ARCH_PRCTL = 0x1023, 18, 158  # Linux on x86-64: Documentation/arch/x86/xstate.rst


@cache
def available() -> bool:
    """Returns whether this CPU has AMX, after asking Linux to let this process and its future threads use it."""
    if not HAS_AMX or platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0)


def allocate_scratch(threads: int, panel_bytes: int) -> np.ndarray[Any, Any]:
    """Returns uint8 [threads, bytes]: a scratch for each thread, with `panel_bytes` bytes for panels."""
    scratch = aligned_zeros((threads, PANELS_OFFSET + panel_bytes + -panel_bytes % CACHE_LINE), np.uint8)
    scratch[:, :PANELS_OFFSET] = np.frombuffer(pack_tile_config((64,) * 8, (TILE_ROWS,) * 8), np.uint8)
    return scratch


def pack_tile_config(row_bytes: Sequence[int], rows: Sequence[int]) -> bytes:
    """Returns the 64 bytes that LDTILECFG reads: palette 1, then the row bytes and the rows of the eight registers."""
    return struct.pack("<2B14x16H16B", 1, 0, *row_bytes, *[0] * 8, *rows, *[0] * 8)


@intrinsic_if(HAS_AMX)
def load_tile_config(b: Any, config: Int) -> None:
    """Sets the shapes of this thread's matrix registers from the 64 bytes at an address."""
    v.call_intrinsic(b, "llvm.x86.ldtilecfg", ir.VoidType(), [v.pointer_at(b, config, v.I8)])


@intrinsic_if(HAS_AMX)
def release_tiles(b: Any) -> None:
    """Releases this thread's matrix registers, so that context switches need not save them."""
    v.call_intrinsic(b, "llvm.x86.tilerelease", ir.VoidType(), [])
