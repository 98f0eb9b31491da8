"""A matrix product's innermost part: 32 outputs for 1 to 6 rows, 8-bit activations against packed weights.

Within a block of 32 inputs the sums are whole numbers, exact (VPDPBUSD: four products of an unsigned and a signed
byte at once); across blocks they are added in float32, in order. So a row's bits do not depend on the other rows.

A tile of 32 outputs lies block after block, each block of 32 inputs as

    numbers    2 x 16 outputs x 32 inputs of 4 bits (512 bytes) or 8 bits (1,024 bytes), unsigned
    scales     32 float16
    minima     32 float16        weight = scale * number + minimum

Within 64 bytes of numbers lie 4 inputs of each of 16 outputs; at 4 bits the upper half byte holds the 4 inputs after.

Knows: this layout. Must not know: models, threads.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from plait.kernels import cpu_ir as v

BLOCK = 32  # inputs that share a scale
WIDTH = 32  # outputs of a tile
HALF = WIDTH // 2  # outputs of one vector
AHEAD, AHEAD_ROWS = 8192, 4  # bytes of weights that are asked for before they are needed; from so many rows on it pays
NIBBLE = v.constant(v.vector(v.I8, 64), 15)


def block_bytes(bits: int) -> int:
    """Bytes of one block of a tile."""
    return BLOCK * WIDTH * bits // 8 + 4 * WIDTH


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def tile(
    context: Any, bits: Any, rows: Any, tile: Any, x: Any, steps: Any, x_scale: Any, x_sum: Any, blocks: Any, out: Any
) -> Any:
    """Writes `rows` x 32 float32.

    `x` int8 [rows, 32 * blocks]; `x_scale` and `x_sum` float32 [rows, blocks]: a block of activations is x_scale *
    its numbers, and adds up to x_sum. `steps`: (row of x, row of scales, row of out) in bytes.
    """
    signature = types.void(bits, rows, types.int64, types.int64, steps, *([types.int64] * 4))

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        _generate(b, bits.literal_value, rows.literal_value, *values[2:])
        return context.get_dummy_value()

    return signature, generate


def _generate(
    b: Any, bits: int, rows: int, tile: Any, x: Any, steps: Any, x_scale: Any, x_sum: Any, blocks: Any, out: Any
) -> None:
    x_step, scale_step, out_step = (b.extract_value(steps, i) for i in range(3))
    x_rows, scale_rows, sum_rows = (
        [b.add(base, b.mul(step, v.I64(r))) for r in range(rows)]
        for base, step in ((x, x_step), (x_scale, scale_step), (x_sum, scale_step))
    )
    loop = v.Loop(b, blocks, [v.constant(v.FLOATS, 0.0)] * (2 * rows))
    here = b.add(tile, b.mul(loop.i, v.I64(block_bytes(bits))))
    for line in range(0, block_bytes(bits) if rows >= AHEAD_ROWS else 0, 64):
        v.prefetch(b, here, AHEAD + line)
    x_here = [b.add(each, b.mul(loop.i, v.I64(BLOCK))) for each in x_rows]
    products = _block(b, bits, here, x_here)
    numbers = BLOCK * WIDTH * bits // 8
    scales = [v.halves_to_floats(b, here, numbers + 2 * HALF * h) for h in range(2)]
    minima = [v.halves_to_floats(b, here, numbers + 2 * WIDTH + 2 * HALF * h) for h in range(2)]
    sums, offset = [], b.mul(loop.i, v.I64(4))
    for r in range(rows):
        x_scales, x_sums = (v.spread(b, b.add(each[r], offset)) for each in (scale_rows, sum_rows))
        for h in range(2):
            scaled = b.fmul(b.sitofp(products[r][h], v.FLOATS), scales[h])
            sum_ = v.fma(b, scaled, x_scales, loop.carried[2 * r + h])
            sums.append(v.fma(b, minima[h], x_sums, sum_))
    for i, sum_ in enumerate(loop.end(sums)):
        v.store(b, sum_, b.add(out, b.mul(out_step, v.I64(i // 2))), 4 * HALF * (i % 2))


def _block(b: Any, bits: int, here: Any, x_rows: list[Any]) -> list[list[Any]]:
    """The whole-number products of one block, [rows][2] vectors."""
    sums = [[v.constant(v.INTS, 0)] * 2 for _ in x_rows]
    for place in range(bits):  # 64 bytes of each half
        halves = [_inputs(b, bits, here, 64 * (h * bits + place)) for h in range(2)]
        for part in range(8 // bits):
            for r, x in enumerate(x_rows):
                four = v.spread(b, x, v.I32, 4 * (place * (8 // bits) + part))
                for h in range(2):
                    sums[r][h] = v.call(b, "llvm.x86.avx512.vpdpbusd.512", v.INTS, [sums[r][h], halves[h][part], four])
    return sums


def _inputs(b: Any, bits: int, here: Any, offset: int) -> list[Any]:
    """The numbers in 64 bytes, 4 inputs of 16 outputs to a vector."""
    packed = v.load(b, here, v.vector(v.I8, 64), offset)
    if bits == 8:
        return [b.bitcast(packed, v.INTS)]
    pairs = v.vector(v.I16, 32)
    upper = b.bitcast(b.lshr(b.bitcast(packed, pairs), v.constant(pairs, 4)), packed.type)
    return [b.bitcast(b.and_(each, NIBBLE), v.INTS) for each in (packed, upper)]
