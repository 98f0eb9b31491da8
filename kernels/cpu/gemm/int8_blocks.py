"""Products of a block of 32 inputs of a packed weight with a few rows of int8 activations. Generates LLVM code.

Sums within a block are integers, hence exact, also where 16 inputs share an integer scale; across blocks they are added
in float32, in order:

    VPDPBUSD                  adds four products of an unsigned and a signed byte at once
    VPMADDUBSW, VPMADDWD      add two products to 16 bits, as often as the sums stay below 2^15; integers of 8 bits
                              are taken as two of 4 bits, because 2 * 255 * 127 does not fit

Weights that are floats are multiplied in float32 with the int8 activations, in the order of the inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from llvmlite import ir

from plait.kernels.cpu import isa
from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.gemm.block_values import (
    BlockPlace,
    BlockQuants,
    UnitScales,
    block_scales,
    load_pair,
    pair_scales,
    pair_words,
)
from plait.kernels.cpu.gemm.layouts import HALF_TILE, LINE, QUANT_BLOCK, PackedLayout

BLOCK_GROUPS = 8  # groups of 4 inputs in a block


class Int8Isa(NamedTuple):
    """An instruction set: `lanes` (16 or 8) outputs to a vector; `has_vnni`: VPDPBUSD exists."""

    name: str
    lanes: int
    has_vnni: bool


AVX512_VNNI, AVX_VNNI, AVX2 = Int8Isa("AVX-512 VNNI", 16, True), Int8Isa("AVX-VNNI", 8, True), Int8Isa("AVX2", 8, False)


def best_int8_isa() -> Int8Isa:
    """Returns the best instruction set that kernels are compiled for; AVX2 if none, which then must not run."""
    if isa.has_features("avx512f", "avx512bw", "avx512vl", "avx512vnni"):
        return AVX512_VNNI
    return AVX_VNNI if isa.has_features("avxvnni") else AVX2


INT8_ISA = best_int8_isa()


class ActivationRows(NamedTuple):
    """Addresses of each row's int8 activations, and of their scales and sums (`QuantizedActivations`)."""

    quants: list[Any]
    scales: list[Any]
    block_sums: list[Any]
    half_sums: list[Any]

    def at_block(self, b: Any, block: Any) -> ActivationRows:
        """The addresses of block `block`."""
        steps = [b.mul(block, v.I64(size)) for size in (QUANT_BLOCK, 4, 4, 4)]
        return ActivationRows(*([b.add(row, step) for row in rows] for rows, step in zip(self, steps, strict=True)))


def leaves_unit_scale(layout: PackedLayout) -> bool:
    """Whether `add_block` leaves the float scale of the unit to its caller: pairs of integer scales and an offset."""
    return layout.has_pairs and not layout.has_minima


def add_block(
    b: Any,
    layout: PackedLayout,
    place: BlockPlace,
    rows: ActivationRows,
    scales: list[UnitScales],
    parts: range,
    sums: list[Any],
) -> list[Any]:
    """Returns the sums, a vector for each of `parts` in each row, with the products of one block added.

    With `leaves_unit_scale` the half sums of several `rows` are `unit_corrections`.
    """
    if layout.is_float:
        return _add_floats(b, layout, place, rows, parts, sums)
    if leaves_unit_scale(layout):
        return _add_offset_pairs(b, layout, place, rows, parts, sums)
    add = _add_pairs if layout.has_pairs else _add_whole_block
    return add(b, layout, place, rows, scales, parts, sums)


def _add_floats(
    b: Any, layout: PackedLayout, place: BlockPlace, rows: ActivationRows, parts: range, sums: list[Any]
) -> list[Any]:
    """`add_block` for weights that are floats: the block's activations are made floats, and multiplied in order."""
    lanes, count, num_rows = INT8_ISA.lanes, len(parts), len(rows.quants)
    memory = v.allocate_on_stack(b, ir.ArrayType(v.F32, QUANT_BLOCK * num_rows))
    memory.align = LINE
    values = b.ptrtoint(memory, v.I64)
    for r in range(num_rows):
        scale = v.broadcast_load(b, rows.scales[r], lanes=lanes)
        for i in range(0, QUANT_BLOCK, lanes):
            integers = b.sext(v.load(b, rows.quants[r], v.vector(v.I8, lanes), i), v.vector(v.I32, lanes))
            v.store(b, b.fmul(b.sitofp(integers, scale.type), scale), values, 4 * (QUANT_BLOCK * r + i))
    sums = [*sums]
    for some in _reading_order(b, parts, num_rows):
        for pair in range(QUANT_BLOCK // 2):
            weights = [load_pair(b, layout, place.quants, part, lanes, pair) for part in some]
            for r in range(num_rows):
                for odd in range(2):
                    x = v.broadcast_load(b, values, v.F32, 4 * (QUANT_BLOCK * r + 2 * pair + odd), lanes)
                    for i, pairs in enumerate(weights, count * r + some.start - parts.start):
                        sums[i] = v.fma(b, pairs[odd], x, sums[i])
    return sums


def _reading_order(b: Any, parts: range, num_rows: int) -> Iterator[range]:
    """Yields the parts whose products are computed together: those of one half of the tile at a time for one row.

    One row waits for memory. It loads lines in the order of memory, because the prefetchers of some processors (Zen 4)
    deliver half of what they can where two streams alternate.
    """
    step = HALF_TILE // INT8_ISA.lanes if num_rows == 1 else len(parts)
    for first in parts[::step]:
        if num_rows == 1:
            v.keep_memory_order(b)
        yield range(first, min(first + step, parts.stop))


def _add_whole_block(
    b: Any,
    layout: PackedLayout,
    place: BlockPlace,
    rows: ActivationRows,
    scales: list[UnitScales],
    parts: range,
    sums: list[Any],
) -> list[Any]:
    """`add_block` where 32 inputs share a scale."""
    lanes, count = INT8_ISA.lanes, len(parts)
    products: list[list[Any]] = [[] for _ in rows.quants]
    for some in _reading_order(b, parts, len(rows.quants)):
        quants = [BlockQuants(b, layout, place, part, lanes) for part in some]
        more = _integer_products(b, layout, quants, rows.quants, range(BLOCK_GROUPS))
        products = [x + y for x, y in zip(products, more, strict=True)]
    factors = [block_scales(b, layout, place, scales[i], part, lanes)[0] for i, part in enumerate(parts)]
    results = []
    for r in range(len(rows.quants)):
        x_scale, x_sum = (v.broadcast_load(b, at[r], lanes=lanes) for at in (rows.scales, rows.block_sums))
        for i, (scale, minimum) in enumerate(factors):
            scaled = b.fmul(b.sitofp(products[r][i], scale.type), scale)
            results.append(v.fma(b, minimum, x_sum, v.fma(b, scaled, x_scale, sums[count * r + i])))
    return results


def unit_corrections(b: Any, layout: PackedLayout, half_sums: list[Any]) -> list[Any]:
    """Returns the addresses, one for each row, of a unit's half sums times the negative offset.

    They are int32: those of the first halves of the unit's blocks, and behind them those of the second ones.
    """
    memory = v.allocate_on_stack(b, ir.ArrayType(v.I32, 2 * layout.blocks * len(half_sums)))
    memory.align = LINE
    ints = v.vector(v.I32, layout.blocks)
    by, factor = v.constant(ints, 16), v.constant(ints, -layout.offset)
    addresses = []
    for r, half_sum in enumerate(half_sums):
        both = v.load(b, half_sum, ints)
        address = b.add(b.ptrtoint(memory, v.I64), v.I64(8 * layout.blocks * r))
        for half, sums in enumerate((b.ashr(b.shl(both, by), by), b.ashr(both, by))):
            v.store(b, b.mul(sums, factor), address, 4 * layout.blocks * half)
        addresses.append(address)
    return addresses


def _corrections(b: Any, layout: PackedLayout, rows: ActivationRows, half: int) -> list[Any]:
    """Returns, for each row, a half sum of a block times the negative offset, broadcast to a vector."""
    lanes = INT8_ISA.lanes
    if len(rows.half_sums) > 1:
        return [v.broadcast_load(b, at, v.I32, 4 * layout.blocks * half, lanes) for at in rows.half_sums]
    halves = b.bitcast(v.broadcast_load(b, rows.half_sums[0], v.I32, lanes=lanes), v.vector(v.I16, 2 * lanes))
    factors = ir.Constant(halves.type, [-layout.offset if i % 2 == half else 0 for i in range(2 * lanes)])
    return [_multiply_pairs(b, halves, factors)]


def _add_offset_pairs(
    b: Any, layout: PackedLayout, place: BlockPlace, rows: ActivationRows, parts: range, sums: list[Any]
) -> list[Any]:
    """`add_block` where 16 inputs share an integer scale and there is an offset; the products begin at corrections."""
    lanes = INT8_ISA.lanes
    words = [pair_words(b, layout, place, part, lanes)[0] for part in parts]
    corrections = [_corrections(b, layout, rows, half) for half in range(2)]
    totals = _pair_totals(b, layout, place, rows, parts, words, corrections)
    x_scales = [v.broadcast_load(b, at, lanes=lanes) for at in rows.scales]
    return [
        v.fma(b, b.sitofp(total, sums[i].type), x_scales[i // len(parts)], sums[i]) for i, total in enumerate(totals)
    ]


def _add_pairs(
    b: Any,
    layout: PackedLayout,
    place: BlockPlace,
    rows: ActivationRows,
    scales: list[UnitScales],
    parts: range,
    sums: list[Any],
) -> list[Any]:
    """`add_block` where 16 inputs share an integer scale and an integer minimum."""
    lanes, count = INT8_ISA.lanes, len(parts)
    words, minima = zip(*(pair_words(b, layout, place, part, lanes) for part in parts), strict=True)
    totals = _pair_totals(b, layout, place, rows, parts, words, [None, None])
    results = []
    for r in range(len(rows.quants)):
        x_scale = v.broadcast_load(b, rows.scales[r], lanes=lanes)
        x_halves = v.broadcast_load(b, rows.half_sums[r], v.I32, lanes=lanes)
        for i in range(count):
            correction = _multiply_pairs(b, minima[i], b.bitcast(x_halves, minima[i].type))
            minimum = b.fmul(b.sitofp(correction, x_scale.type), b.fneg(scales[i].minimum))
            scaled = b.fmul(b.sitofp(totals[count * r + i], x_scale.type), scales[i].scale)
            results.append(v.fma(b, scaled, x_scale, v.fma(b, minimum, x_scale, sums[count * r + i])))
    return results


def _pair_totals(
    b: Any, layout: PackedLayout, place: BlockPlace, rows: ActivationRows, parts: range, words: Sequence[Any],
    initial: Sequence[list[Any] | None],
) -> list[Any]:  # fmt: skip
    """Returns the integer products of both halves of a block times their scales `words`, a vector for each sum.

    `initial`: what the products of each half begin at in each row; None: 0.
    """
    factors = [pair_scales(b, word, INT8_ISA.lanes) for word in words]
    results: list[Any] = []
    for some in _reading_order(b, parts, len(rows.quants)):
        quants = [BlockQuants(b, layout, place, part, INT8_ISA.lanes) for part in some]
        totals: list[Any] = []
        for half in range(2):
            groups = range(half * BLOCK_GROUPS // 2, (half + 1) * BLOCK_GROUPS // 2)
            products = _integer_products(b, layout, quants, rows.quants, groups, initial[half])
            scaled = [
                b.mul(product, factors[i][half])
                for row in products
                for i, product in enumerate(row, some.start - parts.start)
            ]
            totals = scaled if half == 0 else [b.add(x, y) for x, y in zip(totals, scaled, strict=True)]
        results += totals
    return results


def _integer_products(
    b: Any, layout: PackedLayout, quants: list[BlockQuants], x_rows: list[Any], groups: range,
    initial: list[Any] | None = None,
) -> list[list[Any]]:  # fmt: skip
    """Returns the integer products of some groups of 4 inputs, [rows][quants] vectors of int32, added to `initial`."""
    lanes = INT8_ISA.lanes
    sums = [[_IntegerSum(b, layout, lanes, initial and initial[r]) for _ in quants] for r in range(len(x_rows))]
    for group in groups:
        vectors = [_planes(b, layout, quant.group(group)) for quant in quants]
        for r, x in enumerate(x_rows):
            four = v.broadcast_load(b, x, v.I32, 4 * group, lanes)
            for i, planes in enumerate(vectors):
                sums[r][i].add(planes, four)
    return [[sum_.result() for sum_ in row] for row in sums]


def _needs_planes(layout: PackedLayout) -> bool:
    """Whether the sum of two products exceeds 16 bits, so that the integers are taken as two of 4 bits."""
    return not INT8_ISA.has_vnni and layout.max_integer > 127


def _planes(b: Any, layout: PackedLayout, integers: Any) -> list[Any]:
    """Returns the integers, or the lower and the upper halves of their bytes."""
    if not _needs_planes(layout):
        return [integers]
    pairs, nibble = v.vector(v.I16, integers.type.count // 2), v.constant(integers.type, 15)
    upper = b.bitcast(b.lshr(b.bitcast(integers, pairs), v.constant(pairs, 4)), integers.type)
    return [b.and_(x, nibble) for x in (integers, upper)]


class _IntegerSum:
    """A sum of products in int32, which without VPDPBUSD are first added up in 16 bits as long as they fit."""

    def __init__(self, b: Any, layout: PackedLayout, lanes: int, initial: Any) -> None:
        self._b, self._ints, self._shorts = b, v.vector(v.I32, lanes), v.vector(v.I16, 2 * lanes)
        self._total = v.constant(self._ints, 0) if INT8_ISA.has_vnni and initial is None else initial
        num_planes = 2 if _needs_planes(layout) else 1
        largest = 15 if num_planes == 2 else layout.max_integer
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
