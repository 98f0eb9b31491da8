"""A matrix product's innermost part: 32 outputs for a few rows, 8-bit activations against packed weights.

Within a block of 32 inputs the sums are whole numbers, exact; across blocks they are added in float32, in order. So a
row's bits do not depend on the other rows, nor on which instructions the CPU has for it:

    VPDPBUSD                  adds four products of an unsigned and a signed byte at once
    VPMADDUBSW, VPMADDWD      two products to 16 bits, of numbers of 4 bits: a whole block's sums stay below 2^15. What
                              has 8 bits is taken as two numbers of 4, since 2 * 255 * 127 is beyond that

A tile of 32 outputs lies block after block, each block of 32 inputs as

    numbers    2 x 16 outputs x 32 inputs of 4 bits (512 bytes) or 8 bits (1,024 bytes), unsigned
    scales     32 float16
    minima     32 float16        weight = scale * number + minimum

Within 64 bytes of numbers lie 4 inputs of each of 16 outputs; at 4 bits the upper half byte holds the 4 inputs after.

Knows: this layout. Must not know: models, threads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import types
from numba.extending import intrinsic

from plait.kernels.cpu import isa
from plait.kernels.cpu import llvm as v

QUANT_BLOCK = 32  # inputs that share a scale
TILE_OUTPUTS = 32  # outputs of a tile
HALF_TILE = TILE_OUTPUTS // 2  # outputs that lie side by side
PREFETCH_BYTES, PREFETCH_MIN_ROWS = (
    8192,
    4,
)  # bytes of weights that are asked for before they are needed; from so many rows on it pays


class Int8Isa(NamedTuple):
    """How a tile is computed: `lanes` (16 or 8) outputs to a vector, and whether by VPDPBUSD."""

    name: str
    lanes: int
    has_vnni: bool


AVX512_VNNI, AVX_VNNI, AVX2 = Int8Isa("AVX-512 VNNI", 16, True), Int8Isa("AVX-VNNI", 8, True), Int8Isa("AVX2", 8, False)
# From how many rows on how many vectors of outputs go through all blocks together, so that sums stay in registers.
VECTORS_PER_PASS = {AVX512_VNNI: {1: 2}, AVX_VNNI: {1: 4, 2: 2, 4: 1}, AVX2: {1: 4, 2: 2, 4: 1}}


def best_int8_isa() -> Int8Isa:
    """Of those that kernels may be compiled for; AVX2 where none is, which is compiled but must not run."""
    if isa.has_features("avx512f", "avx512bw", "avx512vl", "avx512vnni"):
        return AVX512_VNNI
    return AVX_VNNI if isa.has_features("avxvnni") else AVX2


INT8_ISA = best_int8_isa()
MAX_ROWS = 6 if INT8_ISA is AVX512_VNNI else 4  # that registers hold the sums of


def block_bytes(bits: int) -> int:
    """Bytes of one block of a tile."""
    return QUANT_BLOCK * TILE_OUTPUTS * bits // 8 + 4 * TILE_OUTPUTS


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def tile(
    context: Any, bits: Any, rows: Any, tile: Any, x: Any, strides: Any, x_scale: Any, x_sum: Any, blocks: Any, out: Any
) -> Any:
    """Writes `rows` x 32 float32.

    `x` int8 [rows, 32 * blocks]; `x_scale` and `x_sum` float32 [rows, blocks]: a block of activations is x_scale *
    its numbers, and adds up to x_sum. `strides`: (row of x, row of scales, row of out) in bytes.
    """
    signature = types.void(bits, rows, types.int64, types.int64, strides, *([types.int64] * 4))

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        count = rows.literal_value
        together = max((least, vectors) for least, vectors in VECTORS_PER_PASS[INT8_ISA].items() if least <= count)[1]
        for first in range(0, TILE_OUTPUTS // INT8_ISA.lanes, together):
            _generate(b, bits.literal_value, count, range(first, first + together), *values[2:])
        return context.get_dummy_value()

    return signature, generate


def _generate(
    b: Any, bits: int, rows: int, parts: range, tile: Any, x: Any, strides: Any, x_scale: Any, x_sum: Any,
    blocks: Any, out: Any,
) -> None:  # fmt: skip
    """The vectors `parts` of the tile's outputs."""
    lanes, count = INT8_ISA.lanes, len(parts)
    floats, numbers = v.vector(v.F32, lanes), QUANT_BLOCK * TILE_OUTPUTS * bits // 8
    x_stride, scale_stride, out_stride = (b.extract_value(strides, i) for i in range(3))
    x_rows, scale_rows, sum_rows = (
        [b.add(base, b.mul(step, v.I64(r))) for r in range(rows)]
        for base, step in ((x, x_stride), (x_scale, scale_stride), (x_sum, scale_stride))
    )
    loop = v.Loop(b, blocks, [v.constant(floats, 0.0)] * (count * rows))
    here = b.add(tile, b.mul(loop.i, v.I64(block_bytes(bits))))
    for line in range(0, block_bytes(bits) if rows >= PREFETCH_MIN_ROWS and parts.start == 0 else 0, 64):
        v.prefetch(b, here, PREFETCH_BYTES + line)
    x_here = [b.add(each, b.mul(loop.i, v.I64(QUANT_BLOCK))) for each in x_rows]
    products = _block_products(b, bits, here, x_here, parts)
    scales = [v.load_f16_as_f32(b, here, numbers + 2 * lanes * part, lanes) for part in parts]
    minima = [v.load_f16_as_f32(b, here, numbers + 2 * TILE_OUTPUTS + 2 * lanes * part, lanes) for part in parts]
    sums, offset = [], b.mul(loop.i, v.I64(4))
    for r in range(rows):
        x_scales, x_sums = (v.broadcast_load(b, b.add(each[r], offset), lanes=lanes) for each in (scale_rows, sum_rows))
        for i in range(count):
            scaled = b.fmul(b.sitofp(products[r][i], floats), scales[i])
            sum_ = v.fma(b, scaled, x_scales, loop.carried[count * r + i])
            sums.append(v.fma(b, minima[i], x_sums, sum_))
    for i, sum_ in enumerate(loop.end(sums)):
        v.store(b, sum_, b.add(out, b.mul(out_stride, v.I64(i // count))), 4 * lanes * parts[i % count])


def _block_products(b: Any, bits: int, here: Any, x_rows: list[Any], parts: range) -> list[list[Any]]:
    """The whole-number products of one block, [rows][parts] vectors of int32."""
    lanes, planes = INT8_ISA.lanes, 1 if INT8_ISA.has_vnni else bits // 4
    ints, shorts = v.vector(v.I32, lanes), v.vector(v.I16, 2 * lanes)
    zero = v.constant(ints if INT8_ISA.has_vnni else shorts, 0)
    sums = [[[zero] * planes for _ in parts] for _ in x_rows]
    for place in range(bits):  # 64 bytes of each half
        vectors = [_inputs(b, bits, here, _place(bits, part, place)) for part in parts]
        for step in range(8 // bits):
            for r, x in enumerate(x_rows):
                four = v.broadcast_load(b, x, v.I32, 4 * (place * (8 // bits) + step), lanes)
                for i in range(len(parts)):
                    for plane in range(planes):
                        number = vectors[i][step * planes + plane]
                        sums[r][i][plane] = _add_products(b, sums[r][i][plane], number, four)
    return [[_whole(b, each) for each in row] for row in sums]


def _place(bits: int, part: int, place: int) -> int:
    """Where in a block the inputs `place` of a vector of outputs lie."""
    half, within = divmod(part * INT8_ISA.lanes, HALF_TILE)
    return 64 * (half * bits + place) + 4 * within


def _inputs(b: Any, bits: int, here: Any, offset: int) -> list[Any]:
    """4 inputs to each output: of 4 bits both halves of the bytes, of 8 bits the bytes, as `_add_products` takes them.

    Without VPDPBUSD the halves of what has 8 bits, too, the lower ones first.
    """
    packed = v.load(b, here, v.vector(v.I8, 4 * INT8_ISA.lanes), offset)
    if bits == 8 and INT8_ISA.has_vnni:
        return [packed]
    pairs, nibble = v.vector(v.I16, 2 * INT8_ISA.lanes), v.constant(packed.type, 15)
    upper = b.bitcast(b.lshr(b.bitcast(packed, pairs), v.constant(pairs, 4)), packed.type)
    return [b.and_(each, nibble) for each in (packed, upper)]


def _add_products(b: Any, sums: Any, numbers: Any, four: Any) -> Any:
    """Adds the products with 4 activations: to int32, or two and two to int16."""
    if INT8_ISA.has_vnni:
        values = [sums, b.bitcast(numbers, sums.type), four]
        return v.call_intrinsic(b, f"llvm.x86.avx512.vpdpbusd.{32 * INT8_ISA.lanes}", sums.type, values)
    pairs = v.call_intrinsic(b, "llvm.x86.avx2.pmadd.ub.sw", sums.type, [numbers, b.bitcast(four, numbers.type)])
    return b.add(sums, pairs)


def _whole(b: Any, planes: list[Any]) -> Any:
    """Int32 of each output; a second plane counts 16 times."""
    if INT8_ISA.has_vnni:
        return planes[0]
    ints = v.vector(v.I32, INT8_ISA.lanes)
    weighted = [
        v.call_intrinsic(b, "llvm.x86.avx2.pmadd.wd", ints, [plane, v.constant(plane.type, 16**i)])
        for i, plane in enumerate(planes)
    ]
    return weighted[0] if len(planes) == 1 else b.add(*weighted)
