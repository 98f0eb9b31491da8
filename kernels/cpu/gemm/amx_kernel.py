"""Products in bfloat16 on AMX: 32 columns for 16 or 32 rows, summed over all inputs within the matrix registers.

A packed weight (`layouts`) is dequantized to a panel (`panel_kernel`), block after block of 32 inputs, each

    2 halves x 16 pairs of inputs x 16 outputs x (even input, odd input) of bfloat16, 2,048 bytes

TDPBF16PS adds up each number of the result separately and in one
order, so a row has the same bits in any batch; storing sums in memory between two instructions changes no bit.
"""

from __future__ import annotations

from typing import Annotated, Any

from llvmlite import ir

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.amx import HAS_AMX, TILE_ROWS
from plait.kernels.cpu.compiler.intrinsics import Int, OneOf, intrinsic_if
from plait.kernels.cpu.gemm.layouts import HALF_TILE

TILE_BYTES = TILE_ROWS * 64  # bytes of a matrix register
PANEL_BYTES = 2 * TILE_BYTES  # bytes of one block of a panel: 32 inputs, 32 outputs
RESULT_BYTES = 4 * TILE_BYTES  # bytes of 32 rows and 32 columns of float32
Tiles = Annotated[int, OneOf((2, 1))]  # of 16 rows
VOID = ir.VoidType()
LEFT, RIGHT = (4, 5), (6, 7)  # matrix registers; 0 to 3 hold sums


@intrinsic_if(HAS_AMX)
def zero_accumulators(b: Any, count: Tiles) -> None:
    """Clears the accumulators of `count` (1 or 2) times 16 rows."""
    for i in range(2 * count):
        v.call_intrinsic(b, "llvm.x86.tilezero", VOID, [v.I8(i)])


@intrinsic_if(HAS_AMX)
def load_accumulators(b: Any, count: Tiles, address: Int, stride: Int) -> None:
    """Loads the accumulators that `store_accumulators` wrote."""
    _move_accumulators(b, "llvm.x86.tileloadd64", count, address, stride)


@intrinsic_if(HAS_AMX)
def store_accumulators(b: Any, count: Tiles, address: Int, stride: Int) -> None:
    """Writes the accumulators, float32 [16 * count, 32], in rows of `stride` bytes."""
    _move_accumulators(b, "llvm.x86.tilestored64", count, address, stride)


def _move_accumulators(b: Any, instruction: str, count: int, address: Any, stride: Any) -> None:
    rows = [b.add(address, b.mul(stride, v.I64(TILE_ROWS * i))) for i in range(count)]
    halves = [v.pointer_at(b, row, v.I8, 4 * HALF_TILE * half) for row in rows for half in range(2)]
    for register, half in enumerate(halves):
        v.call_intrinsic(b, instruction, VOID, [v.I8(register), half, stride])


@intrinsic_if(HAS_AMX)
def multiply_block(b: Any, count: Tiles, x: Int, x_stride: Int, panel: Int) -> None:
    """Adds the products of bfloat16 tiles [count, 16 rows, 32], `x_stride` bytes apart, with one block of a panel."""
    generate_multiply_block(b, count, x, x_stride, panel)


def generate_multiply_block(b: Any, count: int, x: Any, x_stride: Any, panel: Any) -> None:
    """Generates `multiply_block`."""
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
