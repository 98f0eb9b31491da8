"""Vector operations on one token: RMS norm, quantization, gated activations, rotary embeddings, bfloat16 conversion.

Activations are quantized in blocks of 32 to scale * int8, the scale being the largest magnitude divided by 127. All
arguments are addresses of float32 unless said otherwise.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated, Any

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.compiler.intrinsics import ArrayPointer, Float32, Int, OneOf, intrinsic

SILU, GELU = 0, 1  # activations of SwiGLU and GEGLU (tanh approximation), Shazeer 2020
Activation = Annotated[int, OneOf((SILU, GELU))]


@intrinsic
def sum_of_squares(b: Any, x: Int, count: Int) -> Float32:
    """Returns the sum of squares of 16 * count float32."""
    loop = v.Loop(b, count, [v.constant(v.F32X16, 0.0)])
    part = v.load(b, b.add(x, b.mul(loop.i, v.I64(64))), v.F32X16)
    (sums,) = loop.end([v.fma(b, part, part, loop.carried[0])])
    return v.reduce(b, sums, b.fadd)


@intrinsic
def dot(b: Any, x: Int, y: Int, count: Int) -> Float32:
    """Returns the sum of products of 16 * count float32."""
    loop = v.Loop(b, count, [v.constant(v.F32X16, 0.0)])
    offset = b.mul(loop.i, v.I64(64))
    x_part, y_part = (v.load(b, b.add(address, offset), v.F32X16) for address in (x, y))
    (sums,) = loop.end([v.fma(b, x_part, y_part, loop.carried[0])])
    return v.reduce(b, sums, b.fadd)


@intrinsic
def add_products_at(b: Any, x: Int, factors: Int, tile: Int) -> None:
    """Adds sums of 32 products to x, 32 float32, as `kernel_types` describes a tile of an adapter.

    `tile`: the address of three int64: the first of the factors (float32), their number n > 0, and the address of the
    float16 [n, 32] that they multiply.
    """
    first, count, rows = (b.load(v.pointer_at(b, tile, v.I64, 8 * i)) for i in range(3))
    loop = v.Loop(b, count, [v.load(b, x, v.F32X16), v.load(b, x, v.F32X16, 64)])
    address = b.add(factors, b.mul(b.add(first, loop.i), v.I64(4)))
    factor = v.splat(b, b.load(v.pointer_at(b, address, v.F32)))
    row = b.add(rows, b.mul(loop.i, v.I64(64)))
    sums = loop.end([v.fma(b, factor, v.load_f16_as_f32(b, row, 32 * i), loop.carried[i]) for i in range(2)])
    for i in range(2):
        v.store(b, sums[i], x, 64 * i)


@intrinsic
def exp_into(b: Any, x: Int, highest: Float32, count: Int) -> Float32:
    """Replaces 16 * count float32 by exp(x - highest), and returns the sum of the results."""
    highest, factor = v.splat(b, highest), v.constant(v.F32X16, math.log2(math.e))
    loop = v.Loop(b, count, [v.constant(v.F32X16, 0.0)])
    address = b.add(x, b.mul(loop.i, v.I64(64)))
    powers = v.exp2(b, b.fmul(b.fsub(v.load(b, address, v.F32X16), highest), factor))
    v.store(b, powers, address)
    (sums,) = loop.end([b.fadd(loop.carried[0], powers)])
    return v.reduce(b, sums, b.fadd)


@intrinsic
def add_scaled_into(b: Any, x: Int, y: Int, factor: Float32, count: Int) -> None:
    """Adds factor * y to x, 16 * count float32."""
    factors = v.splat(b, factor)
    loop = v.Loop(b, count)
    offset = b.mul(loop.i, v.I64(64))
    address = b.add(x, offset)
    addend = v.load(b, b.add(y, offset), v.F32X16)
    v.store(b, v.fma(b, factors, addend, v.load(b, address, v.F32X16)), address)
    loop.end()


@intrinsic
def scale_into(b: Any, x: Int, weight: Int, factor: Float32, out: Int, count: Int) -> None:
    """Writes x * factor * weight to `out`, 16 * count float32."""
    factors = v.splat(b, factor)
    loop = v.Loop(b, count)
    offset = b.mul(loop.i, v.I64(64))
    scaled = b.fmul(v.load(b, b.add(x, offset), v.F32X16), factors)
    v.store(b, b.fmul(scaled, v.load(b, b.add(weight, offset), v.F32X16)), b.add(out, offset))
    loop.end()


@intrinsic
def add_into(b: Any, x: Int, y: Int, count: Int) -> None:
    """Adds y to x, 16 * count float32."""
    loop = v.Loop(b, count)
    offset = b.mul(loop.i, v.I64(64))
    sum_ = b.fadd(v.load(b, b.add(x, offset), v.F32X16), v.load(b, b.add(y, offset), v.F32X16))
    v.store(b, sum_, b.add(x, offset))
    loop.end()


@intrinsic
def quantize_block(b: Any, x: Int, quants: Int, scale: Int, sum: Int, half_sums: Int) -> None:
    """Quantizes 32 float32 to scale * int8, and writes the dequantized sum and the sums of both halves' quants.

    Inf and NaN stay non-finite.
    """
    places = quants, scale, sum, half_sums
    _quantize(b, [v.load(b, x, v.F32X16, 64 * i) for i in range(2)], *places)


@intrinsic
def glu_quantize_block(
    b: Any, kind: Activation, gate: Int, up: Int, quants: Int, scale: Int, sum: Int, half_sums: Int
) -> None:
    """Quantizes 32 values of activation(gate) * up, as `quantize_block` does."""
    places = quants, scale, sum, half_sums
    pairs = [[v.load(b, address, v.F32X16, 64 * i) for address in (gate, up)] for i in range(2)]
    _quantize(b, [_glu(b, kind, *pair) for pair in pairs], *places)


@intrinsic
def glu_x4_to_bf16(b: Any, kind: Activation, pairs: Int, out: Int) -> None:
    """Computes activation(gate) * up of 4 rows of 16 gates and 16 ups, to 4 rows of 16 bfloat16, 64 bytes apart."""
    for row in range(4):
        gate, up = (v.load(b, pairs, v.F32X16, 128 * row + 64 * i) for i in range(2))
        v.store(b, v.round_to_bf16_bits(b, _glu(b, kind, gate, up)), out, 64 * row)


def _glu(b: Any, kind: int, gate: Any, up: Any) -> Any:
    """Returns activation(gate) * up of one vector each."""
    return b.fmul(b.fmul(gate, _sigmoid(b, _sigmoid_exponent(b, kind, gate))), up)


def _sigmoid_exponent(b: Any, kind: int, gate: Any) -> Any:
    """Returns e such that the activation is gate * 1 / (1 + 2^e), clamped so that 2^e neither overflows nor vanishes.

    GELU's tanh approximation is g * sigmoid(2 sqrt(2 / pi) (g + 0.044715 g^3)).
    """
    factor = -math.log2(math.e)
    if kind == GELU:
        inner = v.fma(b, b.fmul(gate, gate), v.constant(v.F32X16, 0.044715), v.constant(v.F32X16, 1.0))
        gate, factor = b.fmul(gate, inner), factor * 2 * (2 / math.pi) ** 0.5
    exponent = v.maximum(b, b.fmul(gate, v.constant(v.F32X16, factor)), v.constant(v.F32X16, -99.0))
    return v.minimum(b, exponent, v.constant(v.F32X16, 99.0))


def _sigmoid(b: Any, exponent: Any) -> Any:
    """Returns 1 / (1 + 2^exponent)."""
    return v.reciprocal(b, b.fadd(v.constant(v.F32X16, 1.0), v.exp2(b, exponent)))


def _quantize(b: Any, x: list[Any], quants: Any, scale: Any, sum_: Any, half_sums: Any) -> None:
    """Quantizes two vectors, a block of 32."""
    # The bits of float32 magnitudes, taken as integers, are ordered like the magnitudes, with NaN above infinity.
    bits = [b.and_(b.bitcast(part, v.I32X16), v.constant(v.I32X16, 0x7FFFFFFF)) for part in x]
    top = v.larger_bits(b, bits[0], bits[1])
    largest = b.bitcast(v.reduce(b, top, partial(v.larger_bits, b)), v.F32)
    zero = b.fcmp_ordered("==", largest, v.F32(0.0))
    inverse = b.select(zero, v.F32(0.0), b.fdiv(v.F32(127.0), largest))
    inverses = v.splat(b, inverse)
    rounded = [
        b.fptosi(v.call_intrinsic(b, "llvm.nearbyint.v16f32", v.F32X16, [b.fmul(part, inverses)]), v.I32X16)
        for part in x
    ]
    unit = b.fmul(largest, v.F32(1 / 127.0))
    for i, part in enumerate(rounded):
        v.store(b, b.trunc(part, v.vector(v.I8)), quants, 16 * i)
    # Both sums at once: the second in the upper 16 bits, less 1 where the first is negative.
    both = v.reduce(b, b.add(rounded[0], b.shl(rounded[1], v.constant(v.I32X16, 16))), b.add)
    first = b.sext(b.trunc(both, v.I16), v.I32)
    second = b.sub(both, first)
    v.store(b, unit, scale)
    v.store(b, b.fmul(unit, b.sitofp(b.add(first, b.ashr(second, v.I32(16))), v.F32)), sum_)
    v.store(b, b.or_(second, b.and_(first, v.I32(0xFFFF))), half_sums)


@intrinsic
def to_bfloat16(b: Any, x: Int, out: Int, count: Int) -> None:
    """Rounds 16 * count float32 to bfloat16, to nearest, ties to even; NaN stays NaN."""
    loop = v.Loop(b, count)
    wide = v.load(b, b.add(x, b.mul(loop.i, v.I64(64))), v.F32X16)
    v.store(b, v.round_to_bf16_bits(b, wide), b.add(out, b.mul(loop.i, v.I64(32))))
    loop.end()


@intrinsic
def largest_magnitude(b: Any, x: Int, count: Int) -> Float32:
    """Returns the largest magnitude of 16 * count float32, which is not finite if x is not."""
    loop = v.Loop(b, count, [v.constant(v.I32X16, 0)])  # of magnitudes' bits, as in `_quantize`
    bits = b.and_(v.load(b, b.add(x, b.mul(loop.i, v.I64(64))), v.I32X16), v.constant(v.I32X16, 0x7FFFFFFF))
    (top,) = loop.end([v.larger_bits(b, loop.carried[0], bits)])
    return b.bitcast(v.reduce(b, top, partial(v.larger_bits, b)), v.F32)


@intrinsic
def quantize_row(b: Any, x: Int, out: Int, scale: Int, count: Int) -> None:
    """Rounds 16 * count float32 to scale * int8; the scale, the largest magnitude / 127, is not finite if x is not."""
    largest = largest_magnitude.generate(b, x, count)
    zero = b.fcmp_ordered("==", largest, v.F32(0.0))
    inverses = v.splat(b, b.select(zero, v.F32(0.0), b.fdiv(v.F32(127.0), largest)))
    v.store(b, b.fmul(largest, v.F32(1 / 127.0)), scale)
    loop = v.Loop(b, count)
    scaled = b.fmul(v.load(b, b.add(x, b.mul(loop.i, v.I64(64))), v.F32X16), inverses)
    rounded = b.fptosi(v.call_intrinsic(b, "llvm.nearbyint.v16f32", v.F32X16, [scaled]), v.I32X16)
    v.store(b, b.trunc(rounded, v.vector(v.I8)), b.add(out, b.mul(loop.i, v.I64(16))))
    loop.end()


@intrinsic
def apply_rope(b: Any, x: Int, cos: Int, sin: Int, half: Int, count: Int) -> None:
    """Rotates 16 * count pairs (x[i], x[i + half]) in place (rotary embedding, Su et al. 2021); `half` is in bytes."""
    loop = v.Loop(b, count)
    offset = b.mul(loop.i, v.I64(64))
    first, second = b.add(x, offset), b.add(b.add(x, offset), half)
    p, q = v.load(b, first, v.F32X16), v.load(b, second, v.F32X16)
    c, s = (v.load(b, b.add(table, offset), v.F32X16) for table in (cos, sin))
    v.store(b, b.fsub(b.fmul(p, c), b.fmul(q, s)), first)
    v.store(b, b.fadd(b.fmul(q, c), b.fmul(p, s)), second)
    loop.end()


@intrinsic
def address_of(b: Any, array: ArrayPointer) -> Int:
    """Returns the address of an array's first element."""
    return b.ptrtoint(array, v.I64)
