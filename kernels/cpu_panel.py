"""Products in bfloat16 on AMX: 32 outputs for 16 or 32 rows at once, summed over all inputs within matrix registers.

The weights of a tile of `cpu_tile` are widened on the way to a panel, block after block of 32 inputs, each

    2 halves x 16 pairs of inputs x 16 outputs x (even input, odd input) of bfloat16, 2,048 bytes

scale * number + minimum being rounded once, to nearest. The first rows are multiplied while the panel is made, so that
vector and matrix instructions overlap; further rows read the panel. TDPBF16PS adds up each number of the result by
itself and in one order, so a row has the same bits in any company.

Knows: `cpu_tile`'s layout. Must not know: models, threads, how activations came about.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from plait.kernels import cpu_ir as v
from plait.kernels.cpu_amx import HAVE, ROWS
from plait.kernels.cpu_tile import BLOCK, HALF, WIDTH, block_bytes

TILE_BYTES = ROWS * 64  # of a matrix register
PANEL_BYTES = 2 * TILE_BYTES  # of one block of 32 inputs and 32 outputs
AHEAD = {4: 8, 8: 5}  # blocks of weights that are asked for before they are read
RING, WHOLE = 1, -1  # how much of a panel is kept, see `widen_and_multiply`
NOTHING = ir.VoidType()
LEFT, RIGHT = (4, 5), (6, 7)  # matrix registers; 0 to 3 hold sums
# Bits of float32 above which a number of 4 or 8 bits can stand as it is: 2 ** (23 - place) + number.
PLACES = {4: (8, 12, 16), 8: (8,)}
# Where each input's number lies in 32 bits of 8 or 4 inputs: after which shift to the left, and above which bit.
SHIFTS = {
    4: ((12, 12), (0, 8), (0, 16), (-12, 12), (12, 16), (0, 12), (-12, 8), (-12, 16)),
    8: ((8, 8), (0, 8), (-8, 8), (-16, 8)),
}


def panel_bytes(inputs: int) -> int:
    """Of the panel of a weight with so many inputs."""
    return PANEL_BYTES * (inputs // BLOCK)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def widen_and_multiply(
    context: Any, bits: Any, count: Any, tile: Any, blocks: Any, panel: Any, mask: Any, x: Any, out: Any, step: Any
) -> Any:
    """A tile's panel, and `count` (1 or 2) times 16 rows through it.

    `mask`: -1, or 1 to keep only the last two blocks of the panel. `x`: tiles [count, blocks, 16 rows, 32] of bfloat16.
    `out`: float32 [16 * count, 32] in rows of `step` bytes.
    """

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        if HAVE:
            _widen_and_multiply(b, bits.literal_value, count.literal_value, *values[2:])
        return context.get_dummy_value()

    return types.void(bits, count, *([types.int64] * 7)), generate


def _widen_and_multiply(
    b: Any, bits: int, count: int, tile: Any, blocks: Any, panel: Any, mask: Any, x: Any, out: Any, step: Any
) -> None:
    _clear(b, count)
    loop = v.Loop(b, blocks)
    here = b.add(tile, b.mul(loop.i, v.I64(block_bytes(bits))))
    for line in range(0, block_bytes(bits), 64):
        v.prefetch(b, here, AHEAD[bits] * block_bytes(bits) + line)
    _widen(b, bits, here, _block_of(b, panel, b.and_(loop.i, mask)))
    with b.if_then(b.icmp_signed(">", loop.i, v.I64(0))):  # one block behind: what was just stored is on its way
        before = b.sub(loop.i, v.I64(1))
        _multiply(b, count, x, blocks, _block_of(b, panel, b.and_(before, mask)), before, out, step)
    loop.end()
    last = b.sub(blocks, v.I64(1))
    _multiply(b, count, x, blocks, _block_of(b, panel, b.and_(last, mask)), last, out, step)
    _hand_out(b, count, out, step)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def multiply(context: Any, count: Any, panel: Any, blocks: Any, x: Any, out: Any, step: Any) -> Any:
    """`widen_and_multiply` with a whole panel that is there."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        if not HAVE:
            return context.get_dummy_value()
        _, panel, blocks, x, out, step = values
        _clear(b, count.literal_value)
        loop = v.Loop(b, blocks)
        _multiply(b, count.literal_value, x, blocks, _block_of(b, panel, loop.i), loop.i, out, step)
        loop.end()
        _hand_out(b, count.literal_value, out, step)
        return context.get_dummy_value()

    return types.void(count, *([types.int64] * 5)), generate


def _block_of(b: Any, panel: Any, index: Any) -> Any:
    return b.add(panel, b.mul(index, v.I64(PANEL_BYTES)))


def _clear(b: Any, count: int) -> None:
    for i in range(2 * count):
        v.call(b, "llvm.x86.tilezero", NOTHING, [v.I8(i)])


def _multiply(b: Any, count: int, x: Any, blocks: Any, numbers: Any, index: Any, out: Any, step: Any) -> None:
    """Adds the products of block `index`; asks for what is written in the end, so that it is there by then."""
    row = b.add(out, b.mul(step, b.mul(index, v.I64(count))))
    for i in range(count):
        for half in range(2):
            v.prefetch(b, b.add(row, b.mul(step, v.I64(i))), 4 * HALF * half, write=True)
    for i in range(count):
        _load(b, LEFT[i], b.add(x, b.mul(b.add(b.mul(blocks, v.I64(i)), index), v.I64(TILE_BYTES))))
        for half in range(2):
            if i == 0:
                _load(b, RIGHT[half], b.add(numbers, v.I64(TILE_BYTES * half)))
            registers = [v.I8(2 * i + half), v.I8(LEFT[i]), v.I8(RIGHT[half])]
            v.call(b, "llvm.x86.tdpbf16ps", NOTHING, registers)


def _load(b: Any, register: int, address: Any) -> None:
    v.call(b, "llvm.x86.tileloadd64", NOTHING, [v.I8(register), v.at(b, address, v.I8), v.I64(64)])


def _hand_out(b: Any, count: int, out: Any, step: Any) -> None:
    for i in range(count):
        row = b.add(out, b.mul(step, v.I64(ROWS * i)))
        for half in range(2):
            place = v.at(b, row, v.I8, 4 * HALF * half)
            v.call(b, "llvm.x86.tilestored64", NOTHING, [v.I8(2 * i + half), place, step])


def _widen(b: Any, bits: int, here: Any, out: Any) -> None:
    """One block of a tile to one block of a panel."""
    numbers, each = BLOCK * WIDTH * bits // 8, 32 // bits
    for half in range(2):
        scale = v.halves_to_floats(b, here, numbers + 2 * HALF * half)
        minimum = v.halves_to_floats(b, here, numbers + 2 * WIDTH + 2 * HALF * half)
        ends = {at: v.fma(b, v.constant(v.FLOATS, -(2.0 ** (23 - at))), scale, minimum) for at in PLACES[bits]}
        for place in range(bits):
            packed = v.load(b, here, v.INTS, 64 * (bits * half + place))
            floats = [v.fma(b, _number(b, bits, packed, i), scale, ends[SHIFTS[bits][i][1]]) for i in range(each)]
            for i in range(0, each, 2):
                pair = _pair(b, floats[i], floats[i + 1])
                v.store(b, pair, out, TILE_BYTES * half + 64 * ((place * each + i) // 2))


def _number(b: Any, bits: int, packed: Any, index: int) -> Any:
    """Number `index` of each 32 bits, plus a power of two."""
    shift, at = SHIFTS[bits][index]
    if shift:
        by = v.constant(v.INTS, abs(shift))
        packed = b.shl(packed, by) if shift > 0 else b.lshr(packed, by)
    kept = b.and_(packed, v.constant(v.INTS, (2**bits - 1) << at))
    return b.bitcast(b.or_(kept, v.constant(v.INTS, (127 + 23 - at) << 23)), v.FLOATS)


def _pair(b: Any, even: Any, odd: Any) -> Any:
    """Two float32 vectors as one of pairs of bfloat16, to nearest."""
    half = v.constant(v.INTS, 0x8000)
    low, high = (b.add(b.bitcast(each, v.INTS), half) for each in (even, odd))
    return b.or_(b.lshr(low, v.constant(v.INTS, 16)), b.and_(high, v.constant(v.INTS, 0xFFFF0000)))
