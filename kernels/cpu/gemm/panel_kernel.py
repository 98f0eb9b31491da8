"""Dequantizes packed weights: blocks of 16 outputs to bfloat16 panels for AMX, and single outputs to float32.

A pass dequantizes the blocks of a chunk and multiplies rows with them.

scale * integer + minimum is rounded once, to the nearest bfloat16. Half a block of a panel is

    16 pairs of inputs x 16 outputs x (even input, odd input) of bfloat16, 1,024 bytes
"""

from __future__ import annotations

from typing import Any, NamedTuple

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.gemm.amx_kernel import PANEL_BYTES, TILE_BYTES, generate_multiply_block
from plait.kernels.cpu.gemm.block_values import (
    BlockPlace,
    BlockQuants,
    Prefetch,
    block_scales,
    generate_float_dequantize,
    generate_float_output,
    prefetch_share,
    tile_block_place,
    unit_scales,
)
from plait.kernels.cpu.gemm.layouts import (
    GROUP_INPUTS,
    HALF_TILE,
    LINE,
    QUANT_BLOCK,
    PackedLayout,
)

LANES = v.LANES  # outputs of a vector: half a tile
HALF_BLOCK_BYTES = 2 * QUANT_BLOCK * LANES  # bytes of half a block of a panel
BLOCK_GROUPS = QUANT_BLOCK // GROUP_INPUTS
PREFETCH, FLOAT_PREFETCH = Prefetch(5120), Prefetch(8192)
# An integer becomes a float32 by setting it at bit `position` of the mantissa of 2 ** (23 - position).
POSITIONS = {4: (8, 12, 16), 8: (8,)}
# For each of the 8 or 4 integers in 32 bits: the shift to the left (negative: right) and the position it then has.
SHIFTS = {
    4: ((12, 12), (0, 8), (0, 16), (-12, 12), (12, 16), (0, 12), (-12, 8), (-12, 16)),
    8: ((8, 8), (0, 8), (-8, 8), (-16, 8)),
}


def _half_place(b: Any, layout: PackedLayout, tile: Any, block: Any, half: Any) -> BlockPlace:
    """The place of a block, moved so that the vector 0 of its outputs are those of the half."""
    place = tile_block_place(b, layout, tile, block)
    return place._replace(quants=b.add(place.quants, b.mul(half, v.I64(layout.half_bytes))))


def generate_dequantize(b: Any, layout: PackedLayout, tile: Any, block: Any, half: Any, out: Any) -> None:
    """Dequantizes 32 inputs of 16 outputs of a tile, those of block `block` and half `half`, to half a panel's block.

    Needs AVX-512. `tile` and `out` are addresses.
    """
    place = _half_place(b, layout, tile, block, half)
    prefetch_share(b, layout, place, FLOAT_PREFETCH if layout.is_float else PREFETCH, half)
    if layout.is_float:
        generate_float_dequantize(b, layout, place.quants, out)
        return
    factors = _factors_of_half(b, layout, place, half)
    if layout.widths == (4,) and not layout.table:
        words = [v.load(b, place.quants, v.I32X16, LINE * line) for line in range(4)]
        bits = 4
    else:
        quants = BlockQuants(b, layout, place, 0, LANES)
        words = [b.bitcast(quants.group(group), v.I32X16) for group in range(BLOCK_GROUPS)]
        bits = 8
    per_word = 32 // bits
    # The minimum, less the power of two that each integer is set into.
    powers = [
        {at: v.fma(b, v.constant(v.F32X16, -(2.0 ** (23 - at))), scale, minimum) for at in POSITIONS[bits]}
        for scale, minimum in factors
    ]
    for index, word in enumerate(words):
        part = index * per_word * len(factors) // QUANT_BLOCK
        floats = [
            v.fma(b, _float_of(b, bits, word, i), factors[part][0], powers[part][SHIFTS[bits][i][1]])
            for i in range(per_word)
        ]
        for i in range(0, per_word, 2):
            v.store(b, _bf16_pairs(b, floats[i], floats[i + 1]), out, LINE * ((index * per_word + i) // 2))


class PassArgs(NamedTuple):
    """The arguments of `generate_pass`, int64 addresses and numbers."""

    tile: Any  # of the panel's first half, and which half of it
    half: Any
    other_tile: Any  # of the second half
    other_half: Any
    block: Any  # the first block
    blocks: Any  # at least one
    panel: Any
    mask: Any  # block i of the chunk is written to block i & mask of the panel
    x: Any  # bfloat16 tiles of 16 rows, the next 16 rows `x_stride` bytes further
    x_stride: Any
    two_tiles: Any  # 32 rows; 0: 16


def generate_pass(b: Any, layout: PackedLayout, args: PassArgs) -> None:
    """Dequantizes the blocks of a chunk to a panel, both halves of the same layout, and multiplies rows with them.

    The matrix registers must hold the sums so far. A block is multiplied after the next one was dequantized, when its
    stores have reached the cache: matrix registers do not read what has not.
    """
    loop = v.Loop(b, b.add(args.blocks, v.I64(1)))
    with b.if_then(b.icmp_signed("<", loop.i, args.blocks)):
        index = b.add(args.block, loop.i)
        target = _panel_block(b, args, loop.i)
        generate_dequantize(b, layout, args.tile, index, args.half, target)
        generate_dequantize(b, layout, args.other_tile, index, args.other_half, b.add(target, v.I64(HALF_BLOCK_BYTES)))
    with b.if_then(b.icmp_signed(">", loop.i, v.I64(0))):
        before = b.sub(loop.i, v.I64(1))
        operands = b.add(args.x, b.mul(before, v.I64(TILE_BYTES))), args.x_stride, _panel_block(b, args, before)
        with b.if_else(b.icmp_signed("!=", args.two_tiles, v.I64(0))) as (two, one):
            with two:
                generate_multiply_block(b, 2, *operands)
            with one:
                generate_multiply_block(b, 1, *operands)
    loop.end()


def _panel_block(b: Any, args: PassArgs, block: Any) -> Any:
    """The address of a chunk's block in the panel."""
    return b.add(args.panel, b.mul(b.and_(block, args.mask), v.I64(PANEL_BYTES)))


def _factors_of_half(b: Any, layout: PackedLayout, place: BlockPlace, half: Any) -> list[tuple[Any, Any]]:
    """The scales and minima of 16 outputs of a block (`block_scales`); `half` is known only when the code runs."""
    halves = b.add(place.unit, b.mul(half, v.I64(2 * HALF_TILE)))
    scales = unit_scales(b, layout, halves, 0, LANES)
    small = b.add(place.start, b.mul(half, v.I64(HALF_TILE * layout.scale_bytes)))
    return block_scales(b, layout, place._replace(start=small), scales, 0, LANES)


def _float_of(b: Any, bits: int, packed: Any, index: int) -> Any:
    """Returns integer `index` of each 32 bits as float32, plus a power of two."""
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


def generate_output(b: Any, layout: PackedLayout, tile: Any, lane: Any, blocks: Any, out: Any) -> None:
    """Writes output `lane` of a tile to float32 [32 * blocks] at `out`, exactly as GGUF defines the numbers.

    All 16 outputs beside it are computed too; this is for a few rows of an embedding.
    """
    half, index = b.lshr(lane, v.I64(4)), b.trunc(b.and_(lane, v.I64(LANES - 1)), v.I32)
    loop = v.Loop(b, blocks)
    place = _half_place(b, layout, tile, loop.i, half)
    target = b.add(out, b.mul(loop.i, v.I64(4 * QUANT_BLOCK)))
    if layout.is_float:
        generate_float_output(b, layout, place.quants, b.and_(lane, v.I64(LANES - 1)), target)
        loop.end()
        return
    factors = _factors_of_half(b, layout, place, half)
    quants = BlockQuants(b, layout, place, 0, LANES)
    for group in range(BLOCK_GROUPS):
        word = b.extract_element(b.bitcast(quants.group(group), v.I32X16), index)
        scale, minimum = (b.extract_element(x, index) for x in factors[group * len(factors) // BLOCK_GROUPS])
        for i in range(GROUP_INPUTS):
            integer = b.and_(b.lshr(word, v.I32(8 * i)), v.I32(255))
            number = b.sitofp(b.sub(integer, v.I32(layout.offset)), v.F32)
            value = b.fmul(number, scale)
            if layout.has_minima:
                value = b.fadd(value, minimum)
            v.store(b, value, target, 4 * (group * GROUP_INPUTS + i))
    loop.end()
