"""Which way of prefetching weights is faster on this processor: measured once, and kept beside the kernels.

It depends on the processor's own prefetchers, of which no instruction set tells.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import cache, partial

import numpy as np
from llvmlite import ir

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.compiler import object_code
from plait.kernels.cpu.gemm.int8_kernel import FAR, NEAR, Prefetches, ProductArgs, generate_tiles
from plait.kernels.cpu.gemm.layouts import LAYOUTS, LINE, QUANT_BLOCK, TILE_OUTPUTS
from plait.kernels.cpu.kernel_args import aligned_empty

ROWS = (1, 4)  # of the measured products: one row waits for memory, several compute meanwhile
MAX_TIME = 0.95  # FAR is taken where it takes at most so much of NEAR's time
_LAYOUT, _BLOCKS, _BYTES, _ROUNDS = LAYOUTS["Q8_0"], 64, 4 << 20, 32


@cache
def prefetches() -> Prefetches:
    """Returns how products prefetch, measured (0.3 s) or as measured before."""
    path = object_code.cache_path("prefetches")
    kept = object_code.read(path)
    if kept is None:
        kept = bytes(far <= MAX_TIME * near for near, far in measure())
        object_code.write(path, kept)
    return choice(*map(bool, kept))


def choice(one_is_far: bool, several_are_far: bool) -> Prefetches:
    """Returns FAR or NEAR for one row, and for several rows."""
    several = FAR if several_are_far else NEAR
    return {**several, 1: (FAR if one_is_far else NEAR)[1]}


def measure() -> list[tuple[float, float]]:
    """Returns the seconds that NEAR and FAR take for weights in memory, with each of ROWS rows: the least of some."""
    near_one, far_one, near_several, far_several, flush = (ctypes.CFUNCTYPE(None, ctypes.c_int64)(x) for x in _load())
    tile_bytes = _BLOCKS // _LAYOUT.blocks * _LAYOUT.unit_bytes
    tiles = _BYTES // tile_bytes
    weights = aligned_empty((tiles * tile_bytes,), np.uint8)
    weights.fill(1)
    numbers = np.zeros(QUANT_BLOCK * _BLOCKS * max(ROWS), np.float32)  # activations, their scales and their sums
    out = np.empty((max(ROWS), tiles * TILE_OUTPUTS), np.float32)
    x, scales, stride = numbers.ctypes.data, numbers.ctypes.data, out.strides[0]
    args = np.array(
        ProductArgs(
            weights.ctypes.data, tile_bytes, tiles, x, QUANT_BLOCK * _BLOCKS, scales, scales, scales, _BLOCKS,
            out.ctypes.data, stride, 4 * TILE_OUTPUTS, 0,
        ),
        np.int64,
    )  # fmt: skip
    cold = partial(flush, np.array([weights.ctypes.data, len(weights) // LINE], np.int64).ctypes.data)
    pairs = [(near_one, far_one), (near_several, far_several)]
    seconds = [
        [[_seconds(cold, partial(function, args.ctypes.data)) for function in pair] for pair in pairs]
        for _ in range(_ROUNDS)
    ]
    return [(float(near), float(far)) for near, far in np.min(seconds, axis=0)]


def _seconds(before: Callable[[], None], function: Callable[[], None]) -> float:
    before()
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _load() -> list[int]:
    """Compiles the products and a function that writes memory back from all caches; returns their addresses."""
    module, names = ir.Module("prefetches"), ("near_one", "far_one", "near_several", "far_several", "flush")
    for name, (rows, how) in zip(names, ((rows, how) for rows in ROWS for how in (NEAR, FAR)), strict=False):
        b, address = _begin(module, name)
        generate_tiles(b, _LAYOUT, ProductArgs.at(b, address), rows, how)
        b.ret_void()
    b, address = _begin(module, "flush")
    begin, lines = (v.load(b, address, v.I64, 8 * i) for i in range(2))
    loop = v.Loop(b, lines)
    line = v.pointer_at(b, b.add(begin, b.mul(loop.i, v.I64(LINE))), v.I8)
    v.call_intrinsic(b, "llvm.x86.sse2.clflush", ir.VoidType(), [line])
    loop.end()
    v.call_intrinsic(b, "llvm.x86.sse2.mfence", ir.VoidType(), [])
    b.ret_void()
    machine = object_code.target_machine()
    return object_code.load(machine.emit_object(object_code.simplified(module, machine)), names)


def _begin(module: ir.Module, name: str) -> tuple[ir.IRBuilder, object]:
    """Begins a function of one int64."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [v.I64]), name)
    return ir.IRBuilder(function.append_basic_block("entry")), function.args[0]
