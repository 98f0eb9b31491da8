"""Reads packed weights that are floats (F16, BF16, F32) into vectors of float32 or to panels. Generates LLVM code."""

from __future__ import annotations

from typing import Any

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.gemm.layouts import HALF_TILE, LINE, QUANT_BLOCK, PackedLayout


def load_pair(b: Any, layout: PackedLayout, block: Any, part: int, lanes: int, pair: int) -> list[Any]:
    """Returns inputs 2 * pair and 2 * pair + 1 of a block for a vector of outputs, as float32."""
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
