"""AMX, Intel's matrix registers: whether they are there, a thread's scratch for them, and attention's products.

A thread's scratch, 64-byte aligned: the shapes of its matrix registers, each 16 x 64 bytes, then the widened weights of
`cpu_panel` or what attention works on.

Attention in bfloat16: `score` and `gather` for 16 lanes at once, as `cpu_lanes` has them for a few. A lane's bits do
not depend on its neighbours: the instruction adds up each number of the result by itself, in one order.

Knows: Linux's way to ask for AMX. Must not know: models, threads.
"""

from __future__ import annotations

import ctypes
import platform
import struct
from functools import cache
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from plait.kernels import cpu_ir as v

ROWS = 16  # of a matrix register
KEYS, MAX_SIZE = 64, 256  # of a block, as in `cpu_lanes`; of a head
ALIGN = 64
PANELS_AT = SCORES_AT = ALIGN  # in a thread's scratch; scores are float32 [16, 64]
WEIGHTS_AT = SCORES_AT + ROWS * 4 * KEYS  # bfloat16 [16, 64]
ZEROS_AT = WEIGHTS_AT + ROWS * 2 * KEYS  # bfloat16 [MAX_SIZE]
QUERIES_AT = ZEROS_AT + 2 * MAX_SIZE  # bfloat16 [lanes, size]
SUMS, LEFT, RIGHT, *MORE_SUMS = (v.I8(i) for i in range(6))  # matrix registers
HAVE = all(llvmlite.binding.get_host_cpu_features().get(name) for name in ("amx-tile", "amx-bf16"))
_REQUEST, _TILE_DATA, _ARCH_PRCTL = 0x1023, 18, 158  # Linux on x86-64: Documentation/arch/x86/xstate.rst


@cache
def available() -> bool:
    """Whether this CPU has AMX and Linux lets this process, and threads it starts from now on, use it."""
    if not HAVE or platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0)


def scratch(threads: int, panels: int, lanes: int = 0, size: int = 0) -> np.ndarray[Any, Any]:
    """Uint8 [threads, bytes] for so many bytes of panels, and for lanes of heads of that size."""
    width = max(PANELS_AT + panels, QUERIES_AT + 2 * lanes * size)
    width += -width % ALIGN
    memory = np.zeros(threads * width + ALIGN, np.uint8)
    start = -memory.ctypes.data % ALIGN
    rows = memory[start : start + threads * width].reshape(threads, width)
    rows[:, :ALIGN] = np.frombuffer(_shapes(), np.uint8)
    return rows


def _shapes() -> bytes:
    """What LDTILECFG reads: palette 1, then bytes of a row of each register, then rows."""
    return struct.pack("<2B14x16H16B", 1, 0, *[64] * 8, *[0] * 8, *[ROWS] * 8, *[0] * 8)


@intrinsic  # type: ignore[untyped-decorator]
def begin(context: Any, scratch: Any) -> Any:
    """Gives this thread's matrix registers the shapes at the beginning of its scratch."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        if HAVE:
            v.call(b, "llvm.x86.ldtilecfg", ir.VoidType(), [v.at(b, values[0], v.I8)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def end(context: Any) -> Any:
    """Empties them, so that a change of threads need not save them."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        if HAVE:
            v.call(b, "llvm.x86.tilerelease", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def pair_values(context: Any, first: Any, second: Any, out: Any, count: Any) -> Any:
    """Two rows of 16 * count bfloat16 as one of pairs (first[i], second[i])."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        first, second, out, count = values
        loop = v.Loop(b, count)
        rows = [v.load(b, b.add(each, b.mul(loop.i, v.I64(32))), v.vector(v.I16)) for each in (first, second)]
        low, high = (b.zext(row, v.INTS) for row in rows)
        v.store(b, b.or_(low, b.shl(high, v.constant(v.INTS, 16))), b.add(out, b.mul(loop.i, v.I64(64))))
        loop.end()
        return context.get_dummy_value()

    return types.void(*([types.int64] * 4)), generate


@intrinsic  # type: ignore[untyped-decorator]
def score(context: Any, queries: Any, size: Any, keys: Any, out: Any) -> Any:
    """Products of bfloat16 queries [16, size] with 64 keys, pairs of channels [size / 2, 64], to float32 [16, 64]."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        if HAVE:
            _score(b, *values)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 4)), generate


def _score(b: Any, queries: Any, size: Any, keys: Any, out: Any) -> None:
    nothing, sums = ir.VoidType(), [SUMS, *MORE_SUMS]
    for each in sums:
        v.call(b, "llvm.x86.tilezero", nothing, [each])
    loop = v.Loop(b, b.lshr(size, v.I64(5)))
    left = v.at(b, b.add(queries, b.shl(loop.i, v.I64(6))), v.I8)
    v.call(b, "llvm.x86.tileloadd64", nothing, [LEFT, left, b.shl(size, v.I64(1))])
    chunk = b.add(keys, b.mul(loop.i, v.I64(ROWS * 4 * KEYS)))
    for i, each in enumerate(sums):
        v.call(b, "llvm.x86.tileloadd64", nothing, [RIGHT, v.at(b, chunk, v.I8, 64 * i), v.I64(4 * KEYS)])
        v.call(b, "llvm.x86.tdpbf16ps", nothing, [each, LEFT, RIGHT])
    loop.end()
    for i, each in enumerate(sums):
        v.call(b, "llvm.x86.tilestored64", nothing, [each, v.at(b, out, v.I8, 64 * i), v.I64(4 * KEYS)])


@intrinsic  # type: ignore[untyped-decorator]
def gather(context: Any, weights: Any, values_: Any, size: Any, chunks: Any, total: Any) -> Any:
    """Adds values, as pairs of positions [16 * chunks, size], by bfloat16 weights [16, 64] to float32 [16, size]."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        if HAVE:
            _gather(b, *arguments)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 5)), generate


def _gather(b: Any, weights: Any, values: Any, size: Any, chunks: Any, total: Any) -> None:
    nothing, step = ir.VoidType(), b.shl(size, v.I64(2))
    channels = v.Loop(b, b.lshr(size, v.I64(4)))
    offset = b.shl(channels.i, v.I64(6))
    here = v.at(b, b.add(total, offset), v.I8)
    v.call(b, "llvm.x86.tileloadd64", nothing, [SUMS, here, step])
    positions = v.Loop(b, chunks)
    left = v.at(b, b.add(weights, b.shl(positions.i, v.I64(6))), v.I8)
    right = v.at(b, b.add(b.add(values, offset), b.mul(positions.i, b.shl(step, v.I64(4)))), v.I8)
    v.call(b, "llvm.x86.tileloadd64", nothing, [LEFT, left, v.I64(2 * KEYS)])
    v.call(b, "llvm.x86.tileloadd64", nothing, [RIGHT, right, step])
    v.call(b, "llvm.x86.tdpbf16ps", nothing, [SUMS, LEFT, RIGHT])
    positions.end()
    v.call(b, "llvm.x86.tilestored64", nothing, [SUMS, here, step])
    channels.end()
