"""Conversions to and from float8 e4m3fn by integers, the same bits on every GPU and in the interpreter."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_e4m3(x):
    """Converts float32 to the bits of float8_e4m3fn: to nearest, ties to even, clamped to 448 (OCP OFP8, 2023).

    Uses integers, so that GPUs without the conversion, and the interpreter, give the same bits.
    """
    bits = x.to(tl.uint32, bitcast=True)
    size = tl.minimum(tl.abs(x), 448.0)
    size_bits = size.to(tl.uint32, bitcast=True)
    normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - 960  # 960: exponent bias 127 - 7, times 8
    small = (size + 16384.0).to(tl.uint32, bitcast=True) & 0xF  # subnormals, in steps of 2^-9
    code = tl.where(size < 0.015625, small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def float8_over_256(codes):
    """Converts bits of float8 e4m3fn to a 256th of their number in float16, without rounding, on any GPU.

    Sign, 4 bits of exponent and 3 of mantissa, moved up, are a float16 whose exponent is 8 too low.
    """
    wide = codes.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
