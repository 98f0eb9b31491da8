"""Products in bfloat16 on AMX: 32 columns for 16 or 32 rows at once, summed over all inputs within matrix registers.

Packed weights (`cpu_tile`) are widened to a panel, block after block of 32 inputs, each

    2 halves x 16 pairs of inputs x 16 outputs x (even input, odd input) of bfloat16, 2,048 bytes

scale * number + minimum being rounded once, to nearest. TDPBF16PS adds up each number of the result by itself and in
one order, so a row has the same bits in any company; sums that wait in memory between two instructions keep theirs.

Knows: `cpu_tile`'s layout. Must not know: models, threads, how activations came about.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.amx import HAS_AMX, TILE_ROWS
from plait.kernels.cpu.gemm.int8_kernel import HALF_TILE, TILE_OUTPUTS, block_bytes

TILE_BYTES = TILE_ROWS * 64  # of a matrix register
PANEL_BYTES = 2 * TILE_BYTES  # of one block of 32 inputs and 32 outputs
RESULT_BYTES = 4 * TILE_BYTES  # of 32 rows and 32 columns in float32
PREFETCH_BLOCKS = {4: 8, 8: 5}  # blocks of weights that are asked for before they are read
VOID = ir.VoidType()
LEFT, RIGHT = (4, 5), (6, 7)  # matrix registers; 0 to 3 hold sums
# Bits of float32 above which a number of 4 or 8 bits can stand as it is: 2 ** (23 - place) + number.
PLACES = {4: (8, 12, 16), 8: (8,)}
# Where each input's number lies in 32 bits of 8 or 4 inputs: after which shift to the left, and above which bit.
SHIFTS = {
    4: ((12, 12), (0, 8), (0, 16), (-12, 12), (12, 16), (0, 12), (-12, 8), (-12, 16)),
    8: ((8, 8), (0, 8), (-8, 8), (-16, 8)),
}


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def zero_accumulators(context: Any, count: Any) -> Any:
    """The sums of `count` (1 or 2) times 16 rows become zero."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        if HAS_AMX:
            for i in range(2 * count.literal_value):
                v.call_intrinsic(b, "llvm.x86.tilezero", VOID, [v.I8(i)])
        return context.get_dummy_value()

    return types.void(count), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def load_accumulators(context: Any, count: Any, place: Any, stride: Any) -> Any:
    """The sums become what `store_accumulators` wrote."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        if HAS_AMX:
            for register, address in _accumulator_addresses(b, count.literal_value, *values[1:]):
                v.call_intrinsic(b, "llvm.x86.tileloadd64", VOID, [register, address, values[2]])
        return context.get_dummy_value()

    return types.void(count, types.int64, types.int64), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def store_accumulators(context: Any, count: Any, place: Any, stride: Any) -> Any:
    """Writes the sums, float32 [16 * count, 32], in rows of `stride` bytes."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        if HAS_AMX:
            for register, address in _accumulator_addresses(b, count.literal_value, *values[1:]):
                v.call_intrinsic(b, "llvm.x86.tilestored64", VOID, [register, address, values[2]])
        return context.get_dummy_value()

    return types.void(count, types.int64, types.int64), generate


def _accumulator_addresses(b: Any, count: int, place: Any, stride: Any) -> list[tuple[Any, Any]]:
    """Each register of sums, and where it goes."""
    rows = [b.add(place, b.mul(stride, v.I64(TILE_ROWS * i))) for i in range(count)]
    return [
        (v.I8(2 * i + half), v.pointer_at(b, rows[i], v.I8, 4 * HALF_TILE * half))
        for i in range(count)
        for half in range(2)
    ]


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def multiply_block(context: Any, count: Any, x: Any, x_stride: Any, numbers: Any) -> Any:
    """Adds the products of a panel's block with tiles [count, 16 rows, 32] of bfloat16, `x_stride` bytes apart."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        if HAS_AMX:
            _multiply_block(b, count.literal_value, *values[1:])
        return context.get_dummy_value()

    return types.void(count, *([types.int64] * 3)), generate


def _multiply_block(b: Any, count: int, x: Any, x_stride: Any, numbers: Any) -> None:
    for i in range(count):
        _load(b, LEFT[i], b.add(x, x_stride) if i else x, "t1")
        for half in range(2):
            if i == 0:
                _load(b, RIGHT[half], b.add(numbers, v.I64(TILE_BYTES * half)))
            registers = [v.I8(2 * i + half), v.I8(LEFT[i]), v.I8(RIGHT[half])]
            v.call_intrinsic(b, "llvm.x86.tdpbf16ps", VOID, registers)


def _load(b: Any, register: int, address: Any, hint: str = "") -> None:
    """With "t1" past the first cache, which then keeps the panel."""
    v.call_intrinsic(
        b, f"llvm.x86.tileloadd{hint}64", VOID, [v.I8(register), v.pointer_at(b, address, v.I8), v.I64(64)]
    )


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def dequantize_half(context: Any, bits: Any, numbers: Any, ends: Any, out: Any) -> Any:
    """32 inputs of 16 outputs: numbers, and at `ends` scales and 64 bytes on minima, to half a block of a panel."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        if HAS_AMX:
            _dequantize_half(b, bits.literal_value, *values[1:])
        return context.get_dummy_value()

    return types.void(bits, *([types.int64] * 3)), generate


def _dequantize_half(b: Any, bits: int, numbers: Any, ends: Any, out: Any) -> None:
    each, ahead = 32 // bits, PREFETCH_BLOCKS[bits] * block_bytes(bits)
    scale, minimum = (v.load_f16_as_f32(b, ends, 2 * TILE_OUTPUTS * i) for i in range(2))
    above = {at: v.fma(b, v.constant(v.F32X16, -(2.0 ** (23 - at))), scale, minimum) for at in PLACES[bits]}
    v.prefetch(b, ends, ahead)
    for place in range(bits):
        v.prefetch(b, numbers, ahead + 64 * place)
        packed = v.load(b, numbers, v.I32X16, 64 * place)
        floats = [v.fma(b, _number(b, bits, packed, i), scale, above[SHIFTS[bits][i][1]]) for i in range(each)]
        for i in range(0, each, 2):
            v.store(b, _bf16_pairs(b, floats[i], floats[i + 1]), out, 64 * ((place * each + i) // 2))


def _number(b: Any, bits: int, packed: Any, index: int) -> Any:
    """Number `index` of each 32 bits, plus a power of two."""
    shift, at = SHIFTS[bits][index]
    if shift:
        by = v.constant(v.I32X16, abs(shift))
        packed = b.shl(packed, by) if shift > 0 else b.lshr(packed, by)
    kept = b.and_(packed, v.constant(v.I32X16, (2**bits - 1) << at))
    return b.bitcast(b.or_(kept, v.constant(v.I32X16, (127 + 23 - at) << 23)), v.F32X16)


def _bf16_pairs(b: Any, even: Any, odd: Any) -> Any:
    """Two float32 vectors as one of pairs of bfloat16, to nearest."""
    half = v.constant(v.I32X16, 0x8000)
    low, high = (b.add(b.bitcast(each, v.I32X16), half) for each in (even, odd))
    upper = v.constant(v.I32X16, 0xFFFF0000)
    values = [b.lshr(low, v.constant(v.I32X16, 16)), high, upper, v.I32(0xF8)]  # x | y & z, told as it is meant
    return v.call_intrinsic(b, "llvm.x86.avx512.pternlog.d.512", v.I32X16, values)
