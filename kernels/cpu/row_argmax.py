"""The largest of a row of logits and the first place that has it, for the output head's own threads.

A row is read once, 64 numbers at a time, and only the thousand among which the peak was seen are searched for it.

Knows: numbers in arrays. Must not know: what is done with them.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.vector_ops import address_of

STEP, CHUNK = 64, 1024  # numbers


@intrinsic  # type: ignore[untyped-decorator]
def _maximum(context: Any, x: Any, steps: Any) -> Any:
    """Of 64 * steps float32; not-a-number if one of them is that."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        x, steps = values
        lanes = STEP // v.LANES
        none = v.constant(v.vector(ir.IntType(1)), 0)
        loop = v.Loop(b, steps, [v.constant(v.F32X16, -np.inf)] * lanes + [none])
        *tops, strange = loop.carried
        here = b.add(x, b.mul(loop.i, v.I64(4 * STEP)))
        parts = [v.load(b, here, v.F32X16, 64 * i) for i in range(lanes)]
        for part in parts:
            strange = b.or_(strange, b.fcmp_unordered("uno", part, part))
        *tops, strange = loop.end([*(v.maximum(b, p, top) for p, top in zip(parts, tops, strict=True)), strange])
        top = v.maximum(b, v.maximum(b, tops[0], tops[1]), v.maximum(b, tops[2], tops[3]))
        found = v.reduce(b, top, lambda first, second: v.maximum(b, first, second))
        return b.select(v.reduce(b, strange, b.or_), v.F32(np.nan), found)

    return types.float32(types.int64, types.int64), generate


@numba.njit  # type: ignore[untyped-decorator]
def row_argmax(row: Any) -> Any:
    """(the largest of a row [V] float32, the first index that has it); not-a-number and any index if one is that."""
    count, best, start = len(row), np.float32(-np.inf), 0
    whole = count - count % STEP
    for first in range(0, whole, CHUNK):
        found = _maximum(address_of(row) + 4 * first, min(CHUNK, whole - first) // STEP)
        if not found <= best:
            best, start = found, first
            if best != best:
                return best, start
    for i in range(whole, count):
        if not row[i] <= best:
            best, start = row[i], i
            if best != best:
                return best, start
    while row[start] != best:
        start += 1
    return best, start
