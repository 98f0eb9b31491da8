"""The largest number of a row of logits and its first index, computed by the output head's own threads.

A row is read once, 64 numbers at a time; only the chunk of 1,024 in which the maximum was found is searched for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.compiler.intrinsics import Float32, Int, intrinsic
from plait.kernels.cpu.vector_ops import address_of

STEP, CHUNK = 64, 1024  # numbers of an iteration, and of a chunk


@intrinsic
def _maximum(b: Any, x: Int, steps: Int) -> Float32:
    """Returns the largest of 64 * steps float32, or NaN if one of them is NaN."""
    lanes = STEP // v.LANES
    none = v.constant(v.vector(ir.IntType(1)), 0)
    loop = v.Loop(b, steps, [v.constant(v.F32X16, -np.inf)] * lanes + [none])
    *tops, has_nan = loop.carried
    address = b.add(x, b.mul(loop.i, v.I64(4 * STEP)))
    parts = [v.load(b, address, v.F32X16, 64 * i) for i in range(lanes)]
    for part in parts:
        has_nan = b.or_(has_nan, b.fcmp_unordered("uno", part, part))
    *tops, has_nan = loop.end([*(v.maximum(b, p, top) for p, top in zip(parts, tops, strict=True)), has_nan])
    top = v.maximum(b, v.maximum(b, tops[0], tops[1]), v.maximum(b, tops[2], tops[3]))
    largest = v.reduce(b, top, lambda first, second: v.maximum(b, first, second))
    return b.select(v.reduce(b, has_nan, b.or_), v.F32(np.nan), largest)


def row_argmax(row: Any) -> Any:
    """Returns the largest number of a row [V] float32 and its first index; if one is NaN: NaN and any index."""
    count, best, start = len(row), np.float32(-np.inf), 0
    vectorized = count - count % STEP
    for first in range(0, vectorized, CHUNK):
        largest = _maximum(address_of(row) + 4 * first, min(CHUNK, vectorized - first) // STEP)
        if not largest <= best:
            best, start = largest, first
            if best != best:  # NaN
                return best, start
    for i in range(vectorized, count):
        if not row[i] <= best:
            best, start = row[i], i
            if best != best:  # NaN
                return best, start
    while row[start] != best:
        start += 1
    return best, start
