"""Reads a block of a packed weight: quants as bytes, scales and minima as float32, floats as they are. Generates LLVM.

A `BlockPlace` is a block of 32 inputs of a tile. A vector covers `lanes` outputs (8 or 16); `part` is its index in
the tile. All functions append to the builder `b`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir

from plait.kernels.cpu import isa
from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.gemm.layouts import (
    BYTE_SCALES,
    FLOAT_SCALES,
    GROUP_INPUTS,
    HALF_TILE,
    LINE,
    NIBBLE_PAIR_SCALES,
    QUANT_BLOCK,
    TILE_OUTPUTS,
    PackedLayout,
)

PIECE_BYTES = 1024  # a tile of `up` of rank 16


class BlockPlace(NamedTuple):
    """The address of a unit, those of a block and of its quants, and the block's index in the unit (None: it is 0)."""

    unit: Any
    start: Any
    quants: Any
    block: Any


def block_place(b: Any, layout: PackedLayout, unit: Any, block: Any) -> BlockPlace:
    """Returns the place of a unit's block `block` (int64)."""
    start = b.add(unit, v.I64(layout.blocks_offset))
    if layout.blocks == 1:
        return BlockPlace(unit, start, start, None)
    start = b.add(start, b.mul(block, v.I64(layout.block_bytes)))
    return BlockPlace(unit, start, start, block)


def tile_block_place(b: Any, layout: PackedLayout, tile: Any, block: Any) -> BlockPlace:
    """Returns the place of a tile's block `block` (int64), counted through all units."""
    if layout.blocks == 1:
        return block_place(b, layout, b.add(tile, b.mul(block, v.I64(layout.unit_bytes))), None)
    unit = b.add(tile, b.mul(b.lshr(block, v.I64(3)), v.I64(layout.unit_bytes)))
    return block_place(b, layout, unit, b.and_(block, v.I64(layout.blocks - 1)))


class Pieces(NamedTuple):
    """A list of addresses of memory, PIECE_BYTES each."""

    current: Any  # a pointer to where the address of the next one is
    end: Any  # the address behind the list


class Prefetch(NamedTuple):
    """How weights are prefetched: so many bytes ahead (0: not at all), to the cache of level 1 or 2; and beside each
    block one of `pieces`."""

    ahead: int
    level: int = 1
    pieces: Pieces | None = None


def prefetch_share(b: Any, layout: PackedLayout, place: BlockPlace, how: Prefetch, half: Any = None) -> None:
    """Prefetches a block's share of its unit, so far ahead; given a half (0 or 1), that half of it."""
    if how.pieces is not None:
        _prefetch_piece(b, how.pieces)
    if not how.ahead:
        return
    size, begin = layout.unit_bytes // layout.blocks, place.unit
    if place.block is not None:
        begin = b.add(begin, b.mul(place.block, v.I64(size)))
    if half is not None:
        size //= 2
        begin = b.add(begin, b.mul(half, v.I64(size)))
    for line in range(0, size, LINE):
        v.prefetch(b, begin, how.ahead + line, how.level)


def _prefetch_piece(b: Any, pieces: Pieces) -> None:
    """Prefetches the next piece to the second level: the first one would lose the weights."""
    current = b.load(pieces.current)
    with b.if_then(b.icmp_unsigned("<", current, pieces.end)):
        piece = v.load(b, current, v.I64)
        for line in range(0, PIECE_BYTES, LINE):
            v.prefetch(b, piece, line, level=2)
        b.store(b.add(current, v.I64(8)), pieces.current)


class BlockQuants:
    """The integers of a block for a vector of outputs, 4 inputs at a time; each line is loaded once."""

    def __init__(self, b: Any, layout: PackedLayout, place: BlockPlace, part: int, lanes: int) -> None:
        self._b, self._layout, self._lanes = b, layout, lanes
        half, within = divmod(part * lanes, HALF_TILE)
        self._address, self._offset = place.quants, half * layout.half_bytes + GROUP_INPUTS * within
        self._lines: dict[int, Any] = {}
        self.kind = v.vector(v.I8, GROUP_INPUTS * lanes)

    def group(self, group: int) -> Any:
        """Inputs [4 * group, 4 * group + 4) of each output, as unsigned bytes."""
        b, layout = self._b, self._layout
        first_line, shift, result = 0, 0, None
        for width in layout.widths:
            line, field = divmod(group, 8 // width)
            part = self._field(first_line + line, width, field, shift)
            result = part if result is None else b.or_(result, part)
            first_line, shift = first_line + width, shift + width
        return result if not layout.table else self._look_up(result)

    def _field(self, line: int, width: int, field: int, shift: int) -> Any:
        """A field of a line's bytes, shifted to the left by `shift`."""
        b, packed = self._b, self._line(line)
        if width == 8:
            return packed
        right = width * field - shift
        pairs = v.vector(v.I16, 2 * self._lanes)
        if right:
            wide = b.bitcast(packed, pairs)
            by = v.constant(pairs, abs(right))
            packed = b.bitcast(b.lshr(wide, by) if right > 0 else b.shl(wide, by), self.kind)
        return b.and_(packed, v.constant(self.kind, (2**width - 1) << shift))

    def _line(self, line: int) -> Any:
        if line not in self._lines:
            self._lines[line] = v.load(self._b, self._address, self.kind, self._offset + LINE * line)
        return self._lines[line]

    def _look_up(self, indices: Any) -> Any:
        table = ir.Constant(self.kind, [*self._layout.table] * (GROUP_INPUTS * self._lanes // 16))
        # 64 bytes need AVX-512 BW; with AVX-512 only for numbers of 32 bits, two of 32 bytes
        if self.kind.count == 64 and isa.has_features("avx512bw"):
            return v.call_intrinsic(self._b, "llvm.x86.avx512.pshuf.b.512", self.kind, [table, indices])
        if self.kind.count == 64:
            return _in_halves(self._b, self._look_up_32, indices)
        return self._look_up_32(indices)

    def _look_up_32(self, indices: Any) -> Any:
        table = ir.Constant(indices.type, [*self._layout.table] * 2)
        return v.call_intrinsic(self._b, "llvm.x86.avx2.pshuf.b", indices.type, [table, indices])


def _in_halves(b: Any, function: Any, x: Any) -> Any:
    """Applies a function to both halves of a vector."""
    count, empty = x.type.count, ir.Constant(x.type, ir.Undefined)
    kind = ir.VectorType(v.I32, count // 2)
    halves = [
        function(b.shuffle_vector(x, empty, ir.Constant(kind, [*range(begin, begin + count // 2)])))
        for begin in (0, count // 2)
    ]
    return b.shuffle_vector(*halves, ir.Constant(ir.VectorType(v.I32, count), [*range(count)]))


class UnitScales(NamedTuple):
    """The float32 scale and minimum of a unit for a vector of outputs; None: no minimum is stored."""

    scale: Any
    minimum: Any


def unit_scales(b: Any, layout: PackedLayout, unit: Any, part: int, lanes: int) -> UnitScales:
    """Loads a unit's own scale and minimum."""
    offset = 2 * lanes * part
    if layout.is_bfloat16:
        bits = b.zext(v.load(b, unit, v.vector(v.I16, lanes), offset), v.vector(v.I32, lanes))
        shifted = b.shl(bits, v.constant(bits.type, 16))
        return UnitScales(b.bitcast(shifted, v.vector(v.F32, lanes)), None)
    scale = v.load_f16_as_f32(b, unit, offset, lanes)
    return UnitScales(
        scale, v.load_f16_as_f32(b, unit, offset + 2 * TILE_OUTPUTS, lanes) if layout.has_minima else None
    )


def block_scales(
    b: Any, layout: PackedLayout, place: BlockPlace, scales: UnitScales, part: int, lanes: int
) -> list[tuple[Any, Any]]:
    """Returns the float32 scale and minimum of each 32 inputs of a block, or of its first and last 16. They are exact.

    The minimum of a layout with an offset is that of the integer 0.
    """
    floats = v.vector(v.F32, lanes)
    if layout.scaling == FLOAT_SCALES:
        pairs = [(scales.scale, scales.minimum)]
    elif layout.scaling == BYTE_SCALES:
        numbers = [_bytes(b, layout, place, part, lanes, offset) for offset in _small_offsets(layout)]
        factors = [b.sitofp(number, floats) for number in numbers]
        pairs = [(b.fmul(factors[0], scales.scale), _negated(b, factors[1:], scales))]
    else:
        words = pair_words(b, layout, place, part, lanes)
        pairs = []
        for half in range(2):
            factors = [b.sitofp(_word(b, word, half, lanes), floats) for word in words]
            pairs.append((b.fmul(factors[0], scales.scale), _negated(b, factors[1:], scales)))
    offset = v.constant(floats, -layout.offset)
    return [(scale, b.fmul(scale, offset) if minimum is None else minimum) for scale, minimum in pairs]


def _small_offsets(layout: PackedLayout) -> list[int]:
    """Where the bytes of a block's scales begin, and of the minima that are stored apart."""
    return [layout.scales_offset, layout.minima_offset][: 2 if layout.minima_bytes else 1]


def _bytes(b: Any, layout: PackedLayout, place: BlockPlace, part: int, lanes: int, offset: int) -> Any:
    """A block's scales or minima, one byte for each output, as int32."""
    narrow = v.load(b, place.start, v.vector(v.I8, lanes), offset + lanes * part)
    return (b.sext if layout.signed_scales else b.zext)(narrow, v.vector(v.I32, lanes))


def pair_words(b: Any, layout: PackedLayout, place: BlockPlace, part: int, lanes: int) -> list[Any]:
    """A block's scales for its first and last 16 inputs, as pairs of int16; the minima follow where they are stored."""
    narrow = v.load(b, place.start, v.vector(v.I8, 2 * lanes), layout.scales_offset + 2 * lanes * part)
    wide = v.vector(v.I16, 2 * lanes)
    words = (b.sext if layout.signed_scales else b.zext)(narrow, wide)
    if layout.scaling != NIBBLE_PAIR_SCALES:
        return [words]
    return [b.and_(words, v.constant(wide, 15)), b.lshr(words, v.constant(wide, 4))]


def _word(b: Any, words: Any, half: int, lanes: int) -> Any:
    """The first or the second int16 of each pair, as int32."""
    ints = v.vector(v.I32, lanes)
    wide, by = b.bitcast(words, ints), v.constant(ints, 16)
    return b.ashr(wide if half else b.shl(wide, by), by)


def pair_scales(b: Any, words: Any, lanes: int) -> list[Any]:
    """The scales of the first and of the last 16 inputs, as int32."""
    return [_word(b, words, half, lanes) for half in range(2)]


def _negated(b: Any, factors: list[Any], scales: UnitScales) -> Any:
    """GGUF's K layouts subtract their minima; None without minima."""
    return b.fneg(b.fmul(factors[0], scales.minimum)) if factors else None


def load_pair(b: Any, layout: PackedLayout, block: Any, part: int, lanes: int, pair: int) -> list[Any]:
    """Returns inputs 2 * pair and 2 * pair + 1 of a block of floats for a vector of outputs, as float32."""
    half, within = divmod(part * lanes, HALF_TILE)
    offset = half * layout.half_bytes + 4 * within
    if layout.bits == 32:
        return [v.load(b, block, v.vector(v.F32, lanes), offset + LINE * (2 * pair + odd)) for odd in range(2)]
    return _widened(b, layout, v.load(b, block, v.vector(v.I32, lanes), offset + LINE * pair))


def _widened(b: Any, layout: PackedLayout, words: Any) -> list[Any]:
    """The two 16-bit floats of each of some words of 32 bits (a vector, or one), as float32."""
    lanes = getattr(words.type, "count", 0)
    floats, shorts, halves = (v.vector(kind, lanes) if lanes else kind for kind in (v.F32, v.I16, v.F16))

    def number(value: int) -> Any:
        return v.constant(words.type, value) if lanes else words.type(value)

    if layout.name == "BF16":
        parts = b.shl(words, number(16)), b.and_(words, number(0xFFFF0000))
        return [b.bitcast(part, floats) for part in parts]
    parts = words, b.lshr(words, number(16))
    return [b.fpext(b.bitcast(b.trunc(part, shorts), halves), floats) for part in parts]


def generate_float_dequantize(b: Any, layout: PackedLayout, block: Any, out: Any) -> None:
    """Writes 32 inputs of 16 outputs, whose lines are at `block`, to half a panel's block, rounded to bfloat16."""
    for pair in range(QUANT_BLOCK // 2):
        if layout.name == "BF16":
            words = v.load(b, block, v.I32X16, LINE * pair)
        else:
            even, odd = (
                b.zext(v.round_to_bf16_bits(b, x), v.I32X16) for x in load_pair(b, layout, block, 0, v.LANES, pair)
            )
            words = b.or_(even, b.shl(odd, v.constant(v.I32X16, 16)))
        v.store(b, words, out, LINE * pair)


def generate_float_output(b: Any, layout: PackedLayout, block: Any, lane: Any, out: Any) -> None:
    """Writes 32 inputs of one of the 16 outputs whose lines are at `block` to float32."""
    address = b.add(block, b.mul(lane, v.I64(4)))
    for line in range(layout.bits):
        words = [v.load(b, address, v.F32 if layout.bits == 32 else v.I32, LINE * line)]
        numbers = words if layout.bits == 32 else _widened(b, layout, words[0])
        for i, value in enumerate(numbers):
            v.store(b, value, out, 4 * (len(numbers) * line + i))
