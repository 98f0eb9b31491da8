"""The inner kernel of products in 8 bits: a tile of 32 outputs for a few rows of int8 activations.

Sums within a block of 32 inputs are integers, hence exact; across blocks they are added in float32, in order. So a
row's bits depend neither on the other rows nor on the instructions that the CPU has:

    VPDPBUSD                  adds four products of an unsigned and a signed byte at once
    VPMADDUBSW, VPMADDWD      add two products to 16 bits. For 4-bit weights a block's sums stay below 2^15; 8-bit
                              weights are taken as two of 4 bits, because 2 * 255 * 127 does not fit

Weights are laid out as `packed_layout` describes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import types
from numba.extending import intrinsic

from plait.kernels.cpu import isa
from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.gemm.packed_layout import HALF_TILE, QUANT_BLOCK, TILE_OUTPUTS, block_bytes

PREFETCH_BYTES = 8192  # how far ahead weights are prefetched
PREFETCH_MIN_ROWS = 4  # rows from which on prefetching is worthwhile


class Int8Isa(NamedTuple):
    """An instruction set: `lanes` (16 or 8) outputs to a vector; `has_vnni`: VPDPBUSD exists."""

    name: str
    lanes: int
    has_vnni: bool


AVX512_VNNI, AVX_VNNI, AVX2 = Int8Isa("AVX-512 VNNI", 16, True), Int8Isa("AVX-VNNI", 8, True), Int8Isa("AVX2", 8, False)
# rows, at least -> vectors of outputs that are computed together, so that their sums stay in registers
VECTORS_PER_PASS = {AVX512_VNNI: {1: 2}, AVX_VNNI: {1: 4, 2: 2, 4: 1}, AVX2: {1: 4, 2: 2, 4: 1}}


def best_int8_isa() -> Int8Isa:
    """Returns the best instruction set that kernels are compiled for; AVX2 if none, which then must not run."""
    if isa.has_features("avx512f", "avx512bw", "avx512vl", "avx512vnni"):
        return AVX512_VNNI
    return AVX_VNNI if isa.has_features("avxvnni") else AVX2


INT8_ISA = best_int8_isa()
MAX_ROWS = 6 if INT8_ISA is AVX512_VNNI else 4  # rows whose sums fit into the registers


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def tile(
    context: Any, bits: Any, rows: Any, tile: Any, x: Any, strides: Any, x_scale: Any, x_sum: Any, blocks: Any, out: Any
) -> Any:
    """Multiplies a tile of a packed weight with `rows` rows: writes float32 [rows, 32].

    `bits` and `rows` are literals. `x` int8 [rows, 32 * blocks]; `x_scale` and `x_sum` float32 [rows, blocks]: each
    block's scale and the sum of its dequantized activations. `strides`: bytes of a row of x, of the scales and of out.
    """
    signature = types.void(bits, rows, types.int64, types.int64, strides, *([types.int64] * 4))

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        count = rows.literal_value
        vectors = max((rows_, n) for rows_, n in VECTORS_PER_PASS[INT8_ISA].items() if rows_ <= count)[1]
        for first in range(0, TILE_OUTPUTS // INT8_ISA.lanes, vectors):
            _generate(b, bits.literal_value, count, range(first, first + vectors), *values[2:])
        return context.get_dummy_value()

    return signature, generate


def _generate(
    b: Any, bits: int, rows: int, parts: range, tile: Any, x: Any, strides: Any, x_scale: Any, x_sum: Any,
    blocks: Any, out: Any,
) -> None:  # fmt: skip
    """Generates the code for the vectors `parts` of the tile's outputs."""
    lanes, count = INT8_ISA.lanes, len(parts)
    floats, qvalue_bytes = v.vector(v.F32, lanes), QUANT_BLOCK * TILE_OUTPUTS * bits // 8
    x_stride, scale_stride, out_stride = (b.extract_value(strides, i) for i in range(3))
    x_rows, scale_rows, sum_rows = (
        [b.add(base, b.mul(step, v.I64(r))) for r in range(rows)]
        for base, step in ((x, x_stride), (x_scale, scale_stride), (x_sum, scale_stride))
    )
    loop = v.Loop(b, blocks, [v.constant(floats, 0.0)] * (count * rows))
    block = b.add(tile, b.mul(loop.i, v.I64(block_bytes(bits))))
    for line in range(0, block_bytes(bits) if rows >= PREFETCH_MIN_ROWS and parts.start == 0 else 0, 64):
        v.prefetch(b, block, PREFETCH_BYTES + line)
    x_blocks = [b.add(row, b.mul(loop.i, v.I64(QUANT_BLOCK))) for row in x_rows]
    products = _block_products(b, bits, block, x_blocks, parts)
    scales = [v.load_f16_as_f32(b, block, qvalue_bytes + 2 * lanes * part, lanes) for part in parts]
    minima_offset = qvalue_bytes + 2 * TILE_OUTPUTS
    minima = [v.load_f16_as_f32(b, block, minima_offset + 2 * lanes * part, lanes) for part in parts]
    sums, offset = [], b.mul(loop.i, v.I64(4))
    for r in range(rows):
        x_scales, x_sums = (
            v.broadcast_load(b, b.add(addresses[r], offset), lanes=lanes) for addresses in (scale_rows, sum_rows)
        )
        for i in range(count):
            scaled = b.fmul(b.sitofp(products[r][i], floats), scales[i])
            sum_ = v.fma(b, scaled, x_scales, loop.carried[count * r + i])
            sums.append(v.fma(b, minima[i], x_sums, sum_))
    for i, sum_ in enumerate(loop.end(sums)):
        v.store(b, sum_, b.add(out, b.mul(out_stride, v.I64(i // count))), 4 * lanes * parts[i % count])


def _block_products(b: Any, bits: int, block: Any, x_rows: list[Any], parts: range) -> list[list[Any]]:
    """Returns the integer products of one block, [rows][parts] vectors of int32."""
    lanes, planes = INT8_ISA.lanes, 1 if INT8_ISA.has_vnni else bits // 4
    ints, shorts = v.vector(v.I32, lanes), v.vector(v.I16, 2 * lanes)
    zero = v.constant(ints if INT8_ISA.has_vnni else shorts, 0)
    sums = [[[zero] * planes for _ in parts] for _ in x_rows]
    for line in range(bits):  # 64 bytes of each half
        vectors = [_load_qvalues(b, bits, block, _line_offset(bits, part, line)) for part in parts]
        for step in range(8 // bits):
            for r, x in enumerate(x_rows):
                four = v.broadcast_load(b, x, v.I32, 4 * (line * (8 // bits) + step), lanes)
                for i in range(len(parts)):
                    for plane in range(planes):
                        qvalues = vectors[i][step * planes + plane]
                        sums[r][i][plane] = _add_products(b, sums[r][i][plane], qvalues, four)
    return [[_combine_planes(b, sum_) for sum_ in row] for row in sums]


def _line_offset(bits: int, part: int, line: int) -> int:
    """Returns the offset in a block of line `line` of the vector `part` of outputs."""
    half, within = divmod(part * INT8_ISA.lanes, HALF_TILE)
    return 64 * (half * bits + line) + 4 * within


def _load_qvalues(b: Any, bits: int, block: Any, offset: int) -> list[Any]:
    """Loads qvalues as vectors of bytes, 4 inputs to each output.

    4-bit qvalues yield a vector for each half of the bytes, as do 8-bit ones without VPDPBUSD, the lower half first.
    """
    packed = v.load(b, block, v.vector(v.I8, 4 * INT8_ISA.lanes), offset)
    if bits == 8 and INT8_ISA.has_vnni:
        return [packed]
    pairs, nibble = v.vector(v.I16, 2 * INT8_ISA.lanes), v.constant(packed.type, 15)
    upper = b.bitcast(b.lshr(b.bitcast(packed, pairs), v.constant(pairs, 4)), packed.type)
    return [b.and_(x, nibble) for x in (packed, upper)]


def _add_products(b: Any, sums: Any, qvalues: Any, four: Any) -> Any:
    """Adds the products with 4 activations: all four to int32, or two and two to int16."""
    if INT8_ISA.has_vnni:
        values = [sums, b.bitcast(qvalues, sums.type), four]
        return v.call_intrinsic(b, f"llvm.x86.avx512.vpdpbusd.{32 * INT8_ISA.lanes}", sums.type, values)
    pairs = v.call_intrinsic(b, "llvm.x86.avx2.pmadd.ub.sw", sums.type, [qvalues, b.bitcast(four, qvalues.type)])
    return b.add(sums, pairs)


def _combine_planes(b: Any, planes: list[Any]) -> Any:
    """Returns the int32 sum of each output; the second plane, the upper halves of 8 bits, counts 16 times."""
    if INT8_ISA.has_vnni:
        return planes[0]
    ints = v.vector(v.I32, INT8_ISA.lanes)
    weighted = [
        v.call_intrinsic(b, "llvm.x86.avx2.pmadd.wd", ints, [plane, v.constant(plane.type, 16**i)])
        for i, plane in enumerate(planes)
    ]
    return weighted[0] if len(planes) == 1 else b.add(*weighted)
