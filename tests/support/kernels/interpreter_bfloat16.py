"""Corrects bfloat16 in Triton's interpreter, so that tests on the CPU compute what a GPU computes.

Triton's interpreter (3.6 to 3.9) treats the bits of bfloat16 numbers as integers in matrix products and casts, and
truncates float32 where the hardware rounds to nearest. `install()` corrects this; triton_device calls it.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def _round_to_bfloat16(values: Any) -> Any:
    """The bits (uint16) of float32 values, rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def _widen(bits: Any) -> Any:
    return (np.ascontiguousarray(bits, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)


def install() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    plain_convert, plain_dot, plain_cast = interpreter._convert_float, builder.create_dot, builder.cast_impl
    if getattr(plain_convert, "knows_bfloat16", False):
        return

    def convert(values: Any, source: Any, target: Any, mode: Any) -> Any:
        with np.errstate(over="ignore"):
            if source == tl.float32 and target == tl.bfloat16:
                return _round_to_bfloat16(values).reshape(values.shape)
            if source == tl.bfloat16 and target == tl.float32:
                return _widen(values).view(np.uint32).reshape(values.shape)
        return plain_convert(values, source, target, mode)

    def dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (interpreter.TensorHandle(_widen(x.data).reshape(x.data.shape), tl.float32) for x in (a, b))
        return plain_dot(self, a, b, d, *rest)

    def cast(self: Any, source: Any, target: Any) -> Any:
        kinds = (source.dtype.scalar, target.scalar)
        if tl.bfloat16 in kinds and tl.float32 not in kinds and kinds[0] != kinds[1]:
            source = plain_cast(self, source, tl.float32)
        return plain_cast(self, source, target)

    convert.knows_bfloat16 = True  # type: ignore[attr-defined]
    interpreter._convert_float, builder.create_dot, builder.cast_impl = convert, dot, cast
