"""AMX, Intel's matrix registers: the same products as `cpu_tile`, 16 outputs for 16 rows at once, and attention's.

Whole-number sums are exact and what follows is done in the same order, so a row has the same bits from either file.
Numbers of 4 bits are widened into the thread's scratch first, which pays from MANY rows on.

A thread's scratch, 64-byte aligned: the shapes of its matrix registers, SLOTS KiB of sums on their way from matrix to
vector registers, then the widened numbers of one tile, [half][block][512 bytes]. Attention's part is `cpu_flash`.

Knows: `cpu_tile`'s layout, Linux's way to ask for AMX. Must not know: models, threads.
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
from plait.kernels.cpu_tile import BLOCK, HALF, NIBBLE, WIDTH, block_bytes

ROWS, MANY = 16, 32  # of one product; from how many on it pays
ALIGN = 64
SLOTS = 4  # sums of so many blocks are on their way at once
SLOTS_AT, NUMBERS_AT = ALIGN, ALIGN + 1024 * SLOTS  # in a thread's scratch
SUMS, INPUTS, WEIGHTS, LEFT, RIGHT, *MORE_SUMS = (v.I8(i) for i in range(8))  # matrix registers
HALF_BYTES = BLOCK * HALF  # numbers of one block and one half of a tile, 8 bits each
HAVE = all(llvmlite.binding.get_host_cpu_features().get(name) for name in ("amx-tile", "amx-int8", "amx-bf16"))
_REQUEST, _TILE_DATA, _ARCH_PRCTL = 0x1023, 18, 158  # Linux on x86-64: Documentation/arch/x86/xstate.rst


@cache
def available() -> bool:
    """Whether this CPU has AMX and Linux lets this process, and threads it starts from now on, use it."""
    if not HAVE or platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0)


def scratch(threads: int, inputs: int) -> np.ndarray[Any, Any]:
    """Uint8 [threads, bytes] for weights of at most so many inputs."""
    width = NUMBERS_AT + 2 * HALF_BYTES * (inputs // BLOCK)
    width += -width % ALIGN
    memory = np.zeros(threads * width + ALIGN, np.uint8)
    start = -memory.ctypes.data % ALIGN
    rows = memory[start : start + threads * width].reshape(threads, width)
    rows[:, :ALIGN] = np.frombuffer(_shapes(), np.uint8)
    return rows


def _shapes() -> bytes:
    """What LDTILECFG reads: palette 1, then bytes of a row of each register, then rows."""
    widths, rows = [64, BLOCK, 64, *[64] * 5], [ROWS, ROWS, BLOCK // 4, *[ROWS] * 5]
    return struct.pack("<2B14x16H16B", 1, 0, *widths, *[0] * 8, *rows, *[0] * 8)


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
def widen(context: Any, tile: Any, blocks: Any, out: Any) -> Any:
    """The numbers of a tile of 4 bits, as 8 bits, to [half][block][512 bytes] at `out`."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        tile, blocks, out = values
        loop = v.Loop(b, blocks)
        here = b.add(tile, b.mul(loop.i, v.I64(block_bytes(4))))
        pairs = v.vector(v.I16, 32)
        for half in range(2):
            to = b.add(out, b.mul(b.add(b.mul(v.I64(half), blocks), loop.i), v.I64(HALF_BYTES)))
            for place in range(4):
                packed = v.load(b, here, v.vector(v.I8, 64), 64 * (4 * half + place))
                upper = b.bitcast(b.lshr(b.bitcast(packed, pairs), v.constant(pairs, 4)), packed.type)
                for part, numbers in enumerate((packed, upper)):
                    v.store(b, b.and_(numbers, NIBBLE), to, 64 * (2 * place + part))
        loop.end()
        return context.get_dummy_value()

    return types.void(*([types.int64] * 3)), generate


@intrinsic  # type: ignore[untyped-decorator]
def half_tile(
    context: Any,
    numbers: Any,
    ends: Any,
    block_steps: Any,
    x: Any,
    steps: Any,
    x_scale: Any,
    x_sum: Any,
    blocks: Any,
    out: Any,
    scratch: Any,
) -> Any:
    """Writes 16 x 16 float32. `numbers`: of the first block, 8 bits; `ends`: its 16 scales, the minima 64 bytes on;
    `block_steps`: from one block's to the next's, of both. The rest is as `cpu_tile.tile` has it."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        if HAVE:
            _half_tile(b, *values)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, block_steps, i64, steps, *([i64] * 5)), generate


def _half_tile(
    b: Any,
    numbers: Any,
    ends: Any,
    block_steps: Any,
    x: Any,
    steps: Any,
    x_scale: Any,
    x_sum: Any,
    blocks: Any,
    out: Any,
    scratch: Any,
) -> None:
    x_step, scale_step, out_step = (b.extract_value(steps, i) for i in range(3))
    number_step, end_step = (b.extract_value(block_steps, i) for i in range(2))
    scale_rows, sum_rows = (
        [b.add(base, b.mul(scale_step, v.I64(r))) for r in range(ROWS)] for base in (x_scale, x_sum)
    )
    loop = v.Loop(b, blocks, [v.constant(v.FLOATS, 0.0)] * ROWS)
    slot = b.add(b.add(scratch, v.I64(SLOTS_AT)), b.shl(b.and_(loop.i, v.I64(SLOTS - 1)), v.I64(10)))
    _multiply(b, b.add(x, b.mul(loop.i, v.I64(BLOCK))), x_step, b.add(numbers, b.mul(loop.i, number_step)), slot)
    here, offset = b.add(ends, b.mul(loop.i, end_step)), b.mul(loop.i, v.I64(4))
    scales, minima = v.halves_to_floats(b, here, 0), v.halves_to_floats(b, here, 2 * WIDTH)
    sums = []
    for r in range(ROWS):
        x_scales, x_sums = (v.spread(b, b.add(each[r], offset)) for each in (scale_rows, sum_rows))
        scaled = b.fmul(b.sitofp(v.load(b, slot, v.INTS, 64 * r), v.FLOATS), scales)
        sums.append(v.fma(b, minima, x_sums, v.fma(b, scaled, x_scales, loop.carried[r])))
    for r, sum_ in enumerate(loop.end(sums)):
        v.store(b, sum_, b.add(out, b.mul(out_step, v.I64(r))))


def _multiply(b: Any, x: Any, x_step: Any, numbers: Any, slot: Any) -> None:
    """16 x 16 whole numbers of one block to `slot`."""
    nothing = ir.VoidType()
    v.call(b, "llvm.x86.tilezero", nothing, [SUMS])
    v.call(b, "llvm.x86.tileloadd64", nothing, [INPUTS, v.at(b, x, v.I8), x_step])
    v.call(b, "llvm.x86.tileloadd64", nothing, [WEIGHTS, v.at(b, numbers, v.I8), v.I64(64)])
    v.call(b, "llvm.x86.tdpbsud", nothing, [SUMS, INPUTS, WEIGHTS])
    v.call(b, "llvm.x86.tilestored64", nothing, [SUMS, v.at(b, slot, v.I8), v.I64(64)])
