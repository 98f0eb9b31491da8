"""The inner kernel of products in 8 bits: a tile of 32 outputs for a few rows of int8 activations.

Sums within a block of 32 inputs are integers, hence exact, also where 16 inputs share an integer scale; across blocks
they are added in float32, in order. So a row's bits depend neither on the other rows nor on the CPU's instructions:

    VPDPBUSD                  adds four products of an unsigned and a signed byte at once
    VPMADDUBSW, VPMADDWD      add two products to 16 bits, as often as the sums stay below 2^15; integers of 8 bits
                              are taken as two of 4 bits, because 2 * 255 * 127 does not fit

Weights that are floats are multiplied in float32 with the int8 activations, in the order of the inputs.

Weights are laid out as `forms` describes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir

from plait.kernels.cpu import isa
from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.gemm.block_values import (
    BlockPlace,
    BlockQvalues,
    UnitScales,
    block_place,
    block_scales,
    pair_scales,
    pair_words,
    unit_scales,
)
from plait.kernels.cpu.gemm.float_values import load_pair
from plait.kernels.cpu.gemm.forms import LINE, QUANT_BLOCK, TILE_OUTPUTS, Form

BLOCK_GROUPS = 8  # groups of 4 inputs in a block


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
PREFETCH_BYTES = 8192 if INT8_ISA is AVX2 else 4096  # how far ahead weights are prefetched
MAX_ROWS = 6 if INT8_ISA is AVX512_VNNI else 4  # rows whose sums fit into the registers


class ActivationRows(NamedTuple):
    """Addresses of each row's int8 activations, and of their scales and sums (`QuantizedActivations`)."""

    qvalues: list[Any]
    scales: list[Any]
    block_sums: list[Any]
    half_sums: list[Any]

    def at_block(self, b: Any, block: Any) -> ActivationRows:
        """The addresses of block `block`."""
        steps = [b.mul(block, v.I64(size)) for size in (QUANT_BLOCK, 4, 4, 4)]
        return ActivationRows(*([b.add(row, step) for row in rows] for rows, step in zip(self, steps, strict=True)))


class ProductArgs(NamedTuple):
    """The arguments of a product, int64 addresses and numbers: of builders' values here, of numbers in the callers.

    It multiplies `num_tiles` tiles of a packed weight with `rows` rows of int8 activations, and writes 32 float32 for
    each tile and row.
    """

    tiles: Any  # the first tile
    tile_stride: Any  # bytes from one tile to the next
    num_tiles: Any
    x: Any  # int8 [rows, 32 * blocks], in rows of `x_stride` bytes
    x_stride: Any
    scales: Any  # float32 [rows, blocks]
    block_sums: Any
    half_sums: Any
    blocks: Any
    out: Any  # in rows of `out_stride` bytes, the next tile's numbers `out_tile_stride` bytes further
    out_stride: Any
    out_tile_stride: Any
    rows: Any


def generate_product(b: Any, form: Form, args: ProductArgs) -> None:
    """Generates the product: a loop over the tiles, and in it as many rows at a time as registers hold."""
    loop = v.Loop(b, args.num_tiles)
    tile = b.add(args.tiles, b.mul(loop.i, args.tile_stride))
    out = b.add(args.out, b.mul(loop.i, args.out_tile_stride))
    _generate_rows(b, form, tile, out, args)
    loop.end()


def _generate_rows(b: Any, form: Form, tile: Any, out: Any, args: ProductArgs) -> None:
    """Generates a loop for each number of rows that are multiplied at a time, the largest first."""
    row: Any = v.I64(0)
    for count in sorted({MAX_ROWS, 4, 2, 1}, reverse=True):
        head, body, after = (b.append_basic_block(f"rows{count}_{name}") for name in ("head", "body", "after"))
        before = b.block
        b.branch(head)
        b.position_at_end(head)
        current = b.phi(v.I64)
        current.add_incoming(row, before)
        b.cbranch(b.icmp_signed(">=", b.sub(args.rows, current), v.I64(count)), body, after)
        b.position_at_end(body)
        starts = [b.add(current, v.I64(i)) for i in range(count)]
        bases, stride = (args.x, args.scales, args.block_sums, args.half_sums), b.mul(args.blocks, v.I64(4))
        addresses = ActivationRows(
            *(
                [b.add(base, b.mul(start, step)) for start in starts]
                for base, step in zip(bases, (args.x_stride, stride, stride, stride), strict=True)
            )
        )
        targets = [b.add(out, b.mul(start, args.out_stride)) for start in starts]
        vectors = max((least, n) for least, n in VECTORS_PER_PASS[INT8_ISA].items() if least <= count)[1]
        for first in range(0, TILE_OUTPUTS // INT8_ISA.lanes, vectors):
            _generate_tile(b, form, tile, addresses, args.blocks, range(first, first + vectors), targets)
        current.add_incoming(b.add(current, v.I64(count)), b.block)
        b.branch(head)
        b.position_at_end(after)
        row = current


def _generate_tile(
    b: Any, form: Form, tile: Any, rows: ActivationRows, blocks: Any, parts: range, targets: list[Any]
) -> None:
    """Generates the code for the vectors `parts` of the tile's outputs, and as many rows as there are targets."""
    lanes, count = INT8_ISA.lanes, len(parts)
    zero = v.constant(v.vector(v.F32, lanes), 0.0)
    prefetches = parts.start == 0
    units = b.lshr(blocks, v.I64(3)) if form.blocks > 1 else blocks
    loop = v.Loop(b, units, [zero] * (count * len(targets)))
    unit = b.add(tile, b.mul(loop.i, v.I64(form.unit_bytes)))
    scales = [] if form.is_float else [unit_scales(b, form, unit, part, lanes) for part in parts]
    if form.blocks == 1:
        place = block_place(b, form, unit, None)
        sums = _add_block(b, form, place, rows.at_block(b, loop.i), scales, parts, loop.carried, prefetches)
    else:
        first = b.mul(loop.i, v.I64(form.blocks))
        inner = v.Loop(b, v.I64(form.blocks), loop.carried)
        place = block_place(b, form, unit, inner.i)
        at_block = rows.at_block(b, b.add(first, inner.i))
        sums = inner.end(_add_block(b, form, place, at_block, scales, parts, inner.carried, prefetches))
    for i, sum_ in enumerate(loop.end(sums)):
        v.store(b, sum_, targets[i // count], 4 * lanes * parts[i % count])


def _add_block(
    b: Any, form: Form, place: BlockPlace, rows: ActivationRows, scales: list[UnitScales], parts: range,
    sums: list[Any], prefetches: bool,
) -> list[Any]:  # fmt: skip
    """Returns the sums with the products of one block added."""
    if prefetches:
        size = form.unit_bytes // form.blocks
        begin = place.unit if place.block is None else b.add(place.unit, b.mul(place.block, v.I64(size)))
        for line in range(0, size, LINE):
            v.prefetch(b, begin, PREFETCH_BYTES + line)
    if form.is_float:
        return _add_floats(b, form, place, rows, parts, sums)
    add = _add_pairs if form.has_pairs else _add_whole_block
    return add(b, form, place, rows, scales, parts, sums)


def _add_floats(
    b: Any, form: Form, place: BlockPlace, rows: ActivationRows, parts: range, sums: list[Any]
) -> list[Any]:
    """`_add_block` for weights that are floats: the block's activations are made floats, and multiplied in order."""
    lanes, count, num_rows = INT8_ISA.lanes, len(parts), len(rows.qvalues)
    memory = v.allocate_on_stack(b, ir.ArrayType(v.F32, QUANT_BLOCK * num_rows))
    memory.align = LINE
    values = b.ptrtoint(memory, v.I64)
    for r in range(num_rows):
        scale = v.broadcast_load(b, rows.scales[r], lanes=lanes)
        for i in range(0, QUANT_BLOCK, lanes):
            integers = b.sext(v.load(b, rows.qvalues[r], v.vector(v.I8, lanes), i), v.vector(v.I32, lanes))
            v.store(b, b.fmul(b.sitofp(integers, scale.type), scale), values, 4 * (QUANT_BLOCK * r + i))
    sums = [*sums]
    for pair in range(QUANT_BLOCK // 2):
        weights = [load_pair(b, form, place.qvalues, part, lanes, pair) for part in parts]
        for r in range(num_rows):
            for odd in range(2):
                x = v.broadcast_load(b, values, v.F32, 4 * (QUANT_BLOCK * r + 2 * pair + odd), lanes)
                for i in range(count):
                    sums[count * r + i] = v.fma(b, weights[i][odd], x, sums[count * r + i])
    return sums


def _add_whole_block(
    b: Any, form: Form, place: BlockPlace, rows: ActivationRows, scales: list[UnitScales], parts: range, sums: list[Any]
) -> list[Any]:
    """`_add_block` where 32 inputs share a scale."""
    lanes, count = INT8_ISA.lanes, len(parts)
    products = _integer_products(b, form, place, rows.qvalues, parts, range(BLOCK_GROUPS))
    factors = [block_scales(b, form, place, scales[i], part, lanes)[0] for i, part in enumerate(parts)]
    results = []
    for r in range(len(rows.qvalues)):
        x_scale, x_sum = (v.broadcast_load(b, at[r], lanes=lanes) for at in (rows.scales, rows.block_sums))
        for i, (scale, minimum) in enumerate(factors):
            scaled = b.fmul(b.sitofp(products[r][i], scale.type), scale)
            results.append(v.fma(b, minimum, x_sum, v.fma(b, scaled, x_scale, sums[count * r + i])))
    return results


def _add_pairs(
    b: Any, form: Form, place: BlockPlace, rows: ActivationRows, scales: list[UnitScales], parts: range, sums: list[Any]
) -> list[Any]:
    """`_add_block` where 16 inputs share an integer scale: both products and their scales are summed as integers."""
    lanes, count = INT8_ISA.lanes, len(parts)
    words = [pair_words(b, form, place, part, lanes) for part in parts]
    factors = [pair_scales(b, word[0], lanes) for word in words]
    totals: list[list[Any]] = [[None] * count for _ in rows.qvalues]
    for half in range(2):
        groups = range(half * BLOCK_GROUPS // 2, (half + 1) * BLOCK_GROUPS // 2)
        for r, products in enumerate(_integer_products(b, form, place, rows.qvalues, parts, groups)):
            for i, product in enumerate(products):
                scaled = b.mul(product, factors[i][half])
                totals[r][i] = scaled if half == 0 else b.add(totals[r][i], scaled)
    results = []
    for r in range(len(rows.qvalues)):
        x_scale = v.broadcast_load(b, rows.scales[r], lanes=lanes)
        x_halves = v.broadcast_load(b, rows.half_sums[r], v.I32, lanes=lanes)
        for i in range(count):
            correction = _multiply_pairs(b, words[i][-1], b.bitcast(x_halves, words[i][0].type))
            total, sum_ = totals[r][i], sums[count * r + i]
            if form.has_minima:
                minimum = b.fmul(b.sitofp(correction, x_scale.type), b.fneg(scales[i].minimum))
                sum_ = v.fma(b, minimum, x_scale, sum_)
            else:
                total = b.sub(total, b.mul(correction, v.constant(total.type, form.offset)))
            scaled = b.fmul(b.sitofp(total, x_scale.type), scales[i].scale)
            results.append(v.fma(b, scaled, x_scale, sum_))
    return results


def _integer_products(
    b: Any, form: Form, place: BlockPlace, x_rows: list[Any], parts: range, groups: range
) -> list[list[Any]]:
    """Returns the integer products of some groups of 4 inputs, [rows][parts] vectors of int32."""
    lanes = INT8_ISA.lanes
    qvalues = [BlockQvalues(b, form, place, part, lanes) for part in parts]
    sums = [[_IntegerSum(b, form, lanes) for _ in parts] for _ in x_rows]
    for group in groups:
        vectors = [_planes(b, form, qvalue.group(group)) for qvalue in qvalues]
        for r, x in enumerate(x_rows):
            four = v.broadcast_load(b, x, v.I32, 4 * group, lanes)
            for i, planes in enumerate(vectors):
                sums[r][i].add(planes, four)
    return [[sum_.result() for sum_ in row] for row in sums]


def _needs_planes(form: Form) -> bool:
    """Whether the sum of two products exceeds 16 bits, so that the integers are taken as two of 4 bits."""
    return not INT8_ISA.has_vnni and form.max_integer > 127


def _planes(b: Any, form: Form, integers: Any) -> list[Any]:
    """Returns the integers, or the lower and the upper halves of their bytes."""
    if not _needs_planes(form):
        return [integers]
    pairs, nibble = v.vector(v.I16, integers.type.count // 2), v.constant(integers.type, 15)
    upper = b.bitcast(b.lshr(b.bitcast(integers, pairs), v.constant(pairs, 4)), integers.type)
    return [b.and_(x, nibble) for x in (integers, upper)]


class _IntegerSum:
    """A sum of products in int32, which without VPDPBUSD are first added up in 16 bits as long as they fit."""

    def __init__(self, b: Any, form: Form, lanes: int) -> None:
        self._b, self._ints, self._shorts = b, v.vector(v.I32, lanes), v.vector(v.I16, 2 * lanes)
        self._total = v.constant(self._ints, 0) if INT8_ISA.has_vnni else None
        num_planes = 2 if _needs_planes(form) else 1
        largest = 15 if num_planes == 2 else form.max_integer
        self._max_adds = (2**15 - 1) // (2 * 128 * largest)
        self._narrow: list[Any] = [None] * num_planes
        self._adds = 0

    def add(self, planes: list[Any], four: Any) -> None:
        """Adds the products with 4 activations."""
        b = self._b
        if INT8_ISA.has_vnni:
            values = [self._total, b.bitcast(planes[0], self._ints), four]
            name = f"llvm.x86.avx512.vpdpbusd.{32 * INT8_ISA.lanes}"
            self._total = v.call_intrinsic(b, name, self._ints, values)
            return
        if self._adds == self._max_adds:
            self._widen()
        for i, plane in enumerate(planes):
            values = [plane, b.bitcast(four, plane.type)]
            pairs = v.call_intrinsic(b, "llvm.x86.avx2.pmadd.ub.sw", self._shorts, values)
            self._narrow[i] = pairs if self._adds == 0 else b.add(self._narrow[i], pairs)
        self._adds += 1

    def _widen(self) -> None:
        """Adds the sums in 16 bits to the total; the second plane, the upper halves of 8 bits, counts 16 times."""
        for i, narrow in enumerate(self._narrow):
            wide = _multiply_pairs(self._b, narrow, v.constant(self._shorts, 16**i))
            self._total = wide if self._total is None else self._b.add(self._total, wide)
        self._adds = 0

    def result(self) -> Any:
        """The sum, a vector of int32."""
        if not INT8_ISA.has_vnni and self._adds:
            self._widen()
        return self._total


def _multiply_pairs(b: Any, x: Any, y: Any) -> Any:
    """Multiplies int16 and adds both products of a pair: VPMADDWD."""
    name = "llvm.x86.avx512.pmaddw.d.512" if x.type.count == 32 else "llvm.x86.avx2.pmadd.wd"
    return v.call_intrinsic(b, name, ir.VectorType(v.I32, x.type.count // 2), [x, y])
