"""Products in bfloat16 on AMX: 32 columns for 16 or 32 rows, summed over all inputs within the matrix registers.

A packed weight (`packed_layout`) is dequantized to a panel, block after block of 32 inputs, each

    2 halves x 16 pairs of inputs x 16 outputs x (even input, odd input) of bfloat16, 2,048 bytes

scale * qvalue + minimum is rounded once, to nearest. TDPBF16PS adds up each number of the result separately and in one
order, so a row has the same bits in any batch; storing sums in memory between two instructions changes no bit.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.amx import HAS_AMX, TILE_ROWS
from plait.kernels.cpu.gemm.packed_layout import HALF_TILE, TILE_OUTPUTS, block_bytes

TILE_BYTES = TILE_ROWS * 64  # bytes of a matrix register
PANEL_BYTES = 2 * TILE_BYTES  # bytes of one block of a panel: 32 inputs, 32 outputs
RESULT_BYTES = 4 * TILE_BYTES  # bytes of 32 rows and 32 columns of float32
PREFETCH_BLOCKS = {4: 8, 8: 5}  # bits -> blocks of weights that are prefetched ahead
VOID = ir.VoidType()
LEFT, RIGHT = (4, 5), (6, 7)  # matrix registers; 0 to 3 hold sums
# A qvalue becomes a float32 by setting it at bit `position` of the mantissa of 2 ** (23 - position).
POSITIONS = {4: (8, 12, 16), 8: (8,)}
# For each of the 8 or 4 qvalues in 32 bits: the shift to the left (negative: right) and the position it then has.
SHIFTS = {
    4: ((12, 12), (0, 8), (0, 16), (-12, 12), (12, 16), (0, 12), (-12, 8), (-12, 16)),
    8: ((8, 8), (0, 8), (-8, 8), (-16, 8)),
}


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def zero_accumulators(context: Any, count: Any) -> Any:
    """Clears the accumulators of `count` (1 or 2) times 16 rows."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        if HAS_AMX:
            for i in range(2 * count.literal_value):
                v.call_intrinsic(b, "llvm.x86.tilezero", VOID, [v.I8(i)])
        return context.get_dummy_value()

    return types.void(count), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def load_accumulators(context: Any, count: Any, address: Any, stride: Any) -> Any:
    """Loads the accumulators that `store_accumulators` wrote."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        if HAS_AMX:
            for register, row in _accumulator_addresses(b, count.literal_value, *values[1:]):
                v.call_intrinsic(b, "llvm.x86.tileloadd64", VOID, [register, row, values[2]])
        return context.get_dummy_value()

    return types.void(count, types.int64, types.int64), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def store_accumulators(context: Any, count: Any, address: Any, stride: Any) -> Any:
    """Writes the accumulators, float32 [16 * count, 32], in rows of `stride` bytes."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        if HAS_AMX:
            for register, row in _accumulator_addresses(b, count.literal_value, *values[1:]):
                v.call_intrinsic(b, "llvm.x86.tilestored64", VOID, [register, row, values[2]])
        return context.get_dummy_value()

    return types.void(count, types.int64, types.int64), generate


def _accumulator_addresses(b: Any, count: int, address: Any, stride: Any) -> list[tuple[Any, Any]]:
    """Returns each accumulator register and its address."""
    rows = [b.add(address, b.mul(stride, v.I64(TILE_ROWS * i))) for i in range(count)]
    return [
        (v.I8(2 * i + half), v.pointer_at(b, rows[i], v.I8, 4 * HALF_TILE * half))
        for i in range(count)
        for half in range(2)
    ]


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def multiply_block(context: Any, count: Any, x: Any, x_stride: Any, panel: Any) -> Any:
    """Adds the products of bfloat16 tiles [count, 16 rows, 32], `x_stride` bytes apart, with one block of a panel."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        if HAS_AMX:
            _multiply_block(b, count.literal_value, *values[1:])
        return context.get_dummy_value()

    return types.void(count, *([types.int64] * 3)), generate


def _multiply_block(b: Any, count: int, x: Any, x_stride: Any, panel: Any) -> None:
    for i in range(count):
        _load(b, LEFT[i], b.add(x, x_stride) if i else x, "t1")
        for half in range(2):
            if i == 0:
                _load(b, RIGHT[half], b.add(panel, v.I64(TILE_BYTES * half)))
            registers = [v.I8(2 * i + half), v.I8(LEFT[i]), v.I8(RIGHT[half])]
            v.call_intrinsic(b, "llvm.x86.tdpbf16ps", VOID, registers)


def _load(b: Any, register: int, address: Any, hint: str = "") -> None:
    """Loads a register; with the hint "t1" past the first-level cache, which then keeps the panel."""
    v.call_intrinsic(
        b, f"llvm.x86.tileloadd{hint}64", VOID, [v.I8(register), v.pointer_at(b, address, v.I8), v.I64(64)]
    )


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def dequantize_half(context: Any, bits: Any, qvalues: Any, scales: Any, out: Any) -> Any:
    """Dequantizes 32 inputs of 16 outputs to half a block of a panel; the minima lie 64 bytes after the scales."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        if HAS_AMX:
            _dequantize_half(b, bits.literal_value, *values[1:])
        return context.get_dummy_value()

    return types.void(bits, *([types.int64] * 3)), generate


def _dequantize_half(b: Any, bits: int, qvalues: Any, scales: Any, out: Any) -> None:
    per_word, ahead = 32 // bits, PREFETCH_BLOCKS[bits] * block_bytes(bits)
    scale, minimum = (v.load_f16_as_f32(b, scales, 2 * TILE_OUTPUTS * i) for i in range(2))
    # The minimum, less the power of two that each qvalue is set into.
    offsets = {at: v.fma(b, v.constant(v.F32X16, -(2.0 ** (23 - at))), scale, minimum) for at in POSITIONS[bits]}
    v.prefetch(b, scales, ahead)
    for line in range(bits):
        v.prefetch(b, qvalues, ahead + 64 * line)
        packed = v.load(b, qvalues, v.I32X16, 64 * line)
        floats = [v.fma(b, _qvalue(b, bits, packed, i), scale, offsets[SHIFTS[bits][i][1]]) for i in range(per_word)]
        for i in range(0, per_word, 2):
            v.store(b, _bf16_pairs(b, floats[i], floats[i + 1]), out, 64 * ((line * per_word + i) // 2))


def _qvalue(b: Any, bits: int, packed: Any, index: int) -> Any:
    """Returns qvalue `index` of each 32 bits as float32, plus a power of two."""
    shift, position = SHIFTS[bits][index]
    if shift:
        by = v.constant(v.I32X16, abs(shift))
        packed = b.shl(packed, by) if shift > 0 else b.lshr(packed, by)
    masked = b.and_(packed, v.constant(v.I32X16, (2**bits - 1) << position))
    return b.bitcast(b.or_(masked, v.constant(v.I32X16, (127 + 23 - position) << 23)), v.F32X16)


def _bf16_pairs(b: Any, even: Any, odd: Any) -> Any:
    """Returns two float32 vectors as one of pairs of bfloat16, rounded to nearest."""
    half = v.constant(v.I32X16, 0x8000)
    low, high = (b.add(b.bitcast(x, v.I32X16), half) for x in (even, odd))
    upper = v.constant(v.I32X16, 0xFFFF0000)
    values = [b.lshr(low, v.constant(v.I32X16, 16)), high, upper, v.I32(0xF8)]  # x | y & z
    return v.call_intrinsic(b, "llvm.x86.avx512.pternlog.d.512", v.I32X16, values)
