"""What a decoder does to one token at a time: norm, 8-bit rounding, gates, rotary pairs.

Activations are rounded in blocks of 32 to scale * int8, the scale a 127th of the largest magnitude.

Knows: addresses of float32 rows. Must not know: layers, threads.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from plait.kernels.cpu import llvm as v

SILU, GELU = 0, 1  # the gates: SwiGLU and GEGLU's tanh approximation (Shazeer 2020)


@intrinsic  # type: ignore[untyped-decorator]
def sum_of_squares(context: Any, x: Any, count: Any) -> Any:
    """Of 16 * count float32."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        x, count = values
        loop = v.Loop(b, count, [v.constant(v.F32X16, 0.0)])
        part = v.load(b, b.add(x, b.mul(loop.i, v.I64(64))), v.F32X16)
        (sums,) = loop.end([v.fma(b, part, part, loop.carried[0])])
        return v.reduce(b, sums, b.fadd)

    return types.float32(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def scale_into(context: Any, x: Any, weight: Any, factor: Any, out: Any, count: Any) -> Any:
    """out = x * factor * weight, 16 * count float32."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        x, weight, factor, out, count = values
        factors = v.splat(b, factor)
        loop = v.Loop(b, count)
        place = b.mul(loop.i, v.I64(64))
        scaled = b.fmul(v.load(b, b.add(x, place), v.F32X16), factors)
        v.store(b, b.fmul(scaled, v.load(b, b.add(weight, place), v.F32X16)), b.add(out, place))
        loop.end()
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def add_into(context: Any, x: Any, y: Any, count: Any) -> Any:
    """x += y, 16 * count float32."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        x, y, count = values
        loop = v.Loop(b, count)
        place = b.mul(loop.i, v.I64(64))
        sum_ = b.fadd(v.load(b, b.add(x, place), v.F32X16), v.load(b, b.add(y, place), v.F32X16))
        v.store(b, sum_, b.add(x, place))
        loop.end()
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def quantize_block(context: Any, x: Any, qvalues: Any, scale: Any, sum: Any) -> Any:
    """32 float32 as scale * int8; `sum` is what the rounded ones add up to. What is not finite stays so."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        x, *places = values
        _quantize(b, [v.load(b, x, v.F32X16, 64 * i) for i in range(2)], *places)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 4)), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def glu_quantize_block(context: Any, kind: Any, gate: Any, up: Any, qvalues: Any, scale: Any, sum: Any) -> Any:
    """32 of gate(g) * u, rounded as by `quantize_block`."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        _, gate, up, *places = values
        pairs = [[v.load(b, each, v.F32X16, 64 * i) for each in (gate, up)] for i in range(2)]
        _quantize(b, [_glu(b, kind.literal_value, *pair) for pair in pairs], *places)
        return context.get_dummy_value()

    return types.void(kind, *([types.int64] * 5)), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def glu_x4_to_bf16(context: Any, kind: Any, pairs: Any, out: Any) -> Any:
    """gate(g) * u of 4 rows of 16 g and 16 u, to 4 rows of 16 bfloat16, 64 bytes apart, as by `to_bfloat16`."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        _, pairs, out = values
        for row in range(4):
            g, u = (v.load(b, pairs, v.F32X16, 128 * row + 64 * i) for i in range(2))
            v.store(b, v.round_to_bf16_bits(b, _glu(b, kind.literal_value, g, u)), out, 64 * row)
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.int64), generate


def _glu(b: Any, kind: int, g: Any, u: Any) -> Any:
    """gate(g) * u, one vector each."""
    return b.fmul(b.fmul(g, _sigmoid(b, _sigmoid_exponent(b, kind, g))), u)


def _sigmoid_exponent(b: Any, kind: int, g: Any) -> Any:
    """Of a power of two: 1 / (1 + 2^it) is the gate's sigmoid, held to where neither end is out of range.

    tanh's GELU is g * sigmoid(2 sqrt(2 / pi) (g + 0.044715 g^3)).
    """
    factor = -math.log2(math.e)
    if kind == GELU:
        inner = v.fma(b, b.fmul(g, g), v.constant(v.F32X16, 0.044715), v.constant(v.F32X16, 1.0))
        g, factor = b.fmul(g, inner), factor * 2 * (2 / math.pi) ** 0.5
    found = v.maximum(b, b.fmul(g, v.constant(v.F32X16, factor)), v.constant(v.F32X16, -99.0))
    return b.select(b.fcmp_ordered("<", found, v.constant(v.F32X16, 99.0)), found, v.constant(v.F32X16, 99.0))


def _sigmoid(b: Any, argument: Any) -> Any:
    return v.reciprocal(b, b.fadd(v.constant(v.F32X16, 1.0), v.exp2(b, argument)))


def _unsigned_maximum(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.icmp_unsigned(">", x, y), x, y)


def _quantize(b: Any, x: list[Any], qvalues: Any, scale: Any, sum_: Any) -> None:
    # As whole numbers, magnitudes of float32 are in order, and not-a-number is above infinity.
    bits = [b.and_(b.bitcast(each, v.I32X16), v.constant(v.I32X16, 0x7FFFFFFF)) for each in x]
    top = _unsigned_maximum(b, bits[0], bits[1])
    largest = b.bitcast(v.reduce(b, top, partial(_unsigned_maximum, b)), v.F32)
    zero = b.fcmp_ordered("==", largest, v.F32(0.0))
    inverse = b.select(zero, v.F32(0.0), b.fdiv(v.F32(127.0), largest))
    inverses = v.splat(b, inverse)
    rounded = [
        b.fptosi(v.call_intrinsic(b, "llvm.nearbyint.v16f32", v.F32X16, [b.fmul(each, inverses)]), v.I32X16)
        for each in x
    ]
    unit = b.fmul(largest, v.F32(1 / 127.0))
    for i, each in enumerate(rounded):
        v.store(b, b.trunc(each, v.vector(v.I8)), qvalues, 16 * i)
    total = v.reduce(b, b.add(rounded[0], rounded[1]), b.add)
    v.store(b, unit, scale)
    v.store(b, b.fmul(unit, b.sitofp(total, v.F32)), sum_)


@intrinsic  # type: ignore[untyped-decorator]
def to_bfloat16(context: Any, x: Any, out: Any, count: Any) -> Any:
    """16 * count float32 to bfloat16, to nearest, ties to even; not-a-number stays so."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        x, out, count = values
        loop = v.Loop(b, count)
        wide = v.load(b, b.add(x, b.mul(loop.i, v.I64(64))), v.F32X16)
        v.store(b, v.round_to_bf16_bits(b, wide), b.add(out, b.mul(loop.i, v.I64(32))))
        loop.end()
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def apply_rope(context: Any, x: Any, cos: Any, sin: Any, half: Any, count: Any) -> Any:
    """Turns 16 * count pairs (x[i], x[i + half]) in place (Su et al. 2021); `half` in bytes."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        x, cos, sin, half, count = values
        loop = v.Loop(b, count)
        place = b.mul(loop.i, v.I64(64))
        first, second = b.add(x, place), b.add(b.add(x, place), half)
        p, q = v.load(b, first, v.F32X16), v.load(b, second, v.F32X16)
        c, s = (v.load(b, b.add(each, place), v.F32X16) for each in (cos, sin))
        v.store(b, b.fsub(b.fmul(p, c), b.fmul(q, s)), first)
        v.store(b, b.fadd(b.fmul(q, c), b.fmul(p, s)), second)
        loop.end()
        return context.get_dummy_value()

    return types.void(*([types.int64] * 5)), generate


@intrinsic  # type: ignore[untyped-decorator]
def address_of(context: Any, array: Any) -> Any:
    """Where an array's first element lies."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        data = context.make_array(signature.args[0])(context, b, values[0]).data
        return b.ptrtoint(data, ir.IntType(64))

    return types.int64(array), generate


@intrinsic  # type: ignore[untyped-decorator]
def half_to_float(context: Any, bits: Any) -> Any:
    """The float16 of those 16 bits."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        return b.fpext(b.bitcast(values[0], v.F16), v.F32)

    return types.float32(types.uint16), generate
