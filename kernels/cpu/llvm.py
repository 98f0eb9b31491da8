"""Vectors of 16 numbers in LLVM's own language, for the kernels that numba compiles.

numba's Python has no vector types, and LLVM does not find these instructions in scalar loops by itself. Addresses
are int64; no operation here is fast-math, so the order of sums is the order written. With AVX-512 such a vector is a
register, without it LLVM makes two of it.
Knows: llvmlite. Must not know: what is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from plait.kernels.cpu import isa

LANES = 16
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()


class _BFloat16(ir.Type):  # type: ignore[misc]
    """LLVM's own type, which llvmlite has not: only to be called with, and cast."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


def vector(element: Any, lanes: int = LANES) -> Any:
    return ir.VectorType(element, lanes)


HAS_AVX512, HAS_BF16_DOT = isa.has_features("avx512f"), isa.has_features("avx512bf16")
F32X16, I32X16 = vector(F32), vector(I32)


def constant(kind: Any, value: float) -> Any:
    """That value in every lane of the vector type."""
    return ir.Constant(kind, [value] * kind.count)


def splat(b: Any, value: Any, lanes: int = LANES) -> Any:
    """A scalar in every lane."""
    empty = ir.Constant(vector(value.type, lanes), ir.Undefined)
    return b.shuffle_vector(b.insert_element(empty, value, I32(0)), empty, constant(vector(I32, lanes), 0))


def pointer_at(b: Any, address: Any, kind: Any, offset: int = 0) -> Any:
    """The address, `offset` bytes on, as a pointer."""
    return b.inttoptr(b.add(address, I64(offset)) if offset else address, kind.as_pointer())


def load(b: Any, address: Any, kind: Any, offset: int = 0) -> Any:
    return b.load(pointer_at(b, address, kind, offset), align=1)


def store(b: Any, value: Any, address: Any, offset: int = 0) -> None:
    b.store(value, pointer_at(b, address, value.type, offset), align=1)


def broadcast_load(b: Any, address: Any, kind: Any = F32, offset: int = 0, lanes: int = LANES) -> Any:
    """The scalar at an address, in every lane."""
    return splat(b, load(b, address, kind, offset), lanes)


def call_intrinsic(b: Any, name: str, result: Any, values: Sequence[Any]) -> Any:
    """One of LLVM's intrinsic functions."""
    signature = ir.FunctionType(result, [value.type for value in values])
    return b.call(cgutils.get_or_insert_function(b.module, signature, name), values)


def prefetch(b: Any, address: Any, offset: int = 0, write: bool = False) -> None:
    """Asks for the cache line `offset` bytes on, which need not be there to be had."""
    place = pointer_at(b, address, I8, offset)
    kind = ir.FunctionType(ir.VoidType(), [place.type, I32, I32, I32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    b.call(function, [place, I32(int(write)), I32(3), I32(1)])


def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    return call_intrinsic(b, f"llvm.fma.v{x.type.count}f32", x.type, [x, y, z])


def dot_bf16(b: Any, sums: Any, x: Any, y: Any) -> Any:
    """VDPBF16PS: sums [16] plus, of each 32 bits of x and y, both products of bfloat16; for CPUs that have it.

    Numbers below 2^-126, coming in or going out, are zero to it.
    """
    pairs = vector(_BFloat16(), 2 * LANES)
    return call_intrinsic(
        b, "llvm.x86.avx512bf16.dpbf16ps.512", F32X16, [sums, b.bitcast(x, pairs), b.bitcast(y, pairs)]
    )


def load_f16_as_f32(b: Any, address: Any, offset: int, lanes: int = LANES) -> Any:
    """So many float16 at an address as float32."""
    return b.fpext(load(b, address, vector(F16, lanes), offset), vector(F32, lanes))


def round_to_bf16_bits(b: Any, wide: Any) -> Any:
    """16 float32 as bfloat16's bits: to nearest, ties to even; not-a-number stays so.

    By VCVTNEPS2BF16 where the CPU has it, which, as all its products do, takes numbers below 2^-126 for zero.
    """
    if HAS_BF16_DOT:
        found = call_intrinsic(b, "llvm.x86.avx512bf16.cvtneps2bf16.512", vector(_BFloat16()), [wide])
        return b.bitcast(found, vector(I16))
    bits = b.bitcast(wide, I32X16)
    upper = b.lshr(bits, constant(I32X16, 16))
    tie = b.add(b.and_(upper, constant(I32X16, 1)), constant(I32X16, 0x7FFF))
    rounded = b.lshr(b.add(bits, tie), constant(I32X16, 16))
    quiet = b.or_(upper, constant(I32X16, 0x40))
    return b.trunc(b.select(b.fcmp_unordered("uno", wide, wide), quiet, rounded), vector(I16))


def maximum(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def reduce(b: Any, x: Any, combine: Any) -> Any:
    """All lanes combined pairwise, halves first; a scalar."""
    width = x.type.count
    while width > 1:
        width //= 2
        empty = ir.Constant(x.type, ir.Undefined)
        half = ir.VectorType(I32, width)
        low = b.shuffle_vector(x, empty, ir.Constant(half, list(range(width))))
        x = combine(low, b.shuffle_vector(x, empty, ir.Constant(half, list(range(width, 2 * width)))))
    return b.extract_element(x, I32(0))


# 2^r for |r| <= 1/2 as 1 + r (a + r (b + ...)), the largest relative error least: 3e-6.
_TERMS = (0.009582853220668064, 0.0559064262081037, 0.2402409861776473, 0.693124193225303, 1.0)
_EVERY_LANE, _AS_SET = ir.Constant(I16, 0xFFFF), I32(4)  # of masked instructions; rounding as the thread has it


def exp2(b: Any, x: Any) -> Any:
    """2 to the x, to 3e-6 of it, exactly 1 at 0 and 0 far below; x is not infinite.

    Without VSCALEFPS what is below 2^-126 is 0.
    """
    whole = call_intrinsic(b, "llvm.nearbyint.v16f32", F32X16, [x])
    rest = b.fsub(x, whole)
    sum_ = constant(F32X16, _TERMS[0])
    for term in _TERMS[1:]:
        sum_ = fma(b, sum_, rest, constant(F32X16, term))
    if HAS_AVX512:
        return call_intrinsic(
            b, "llvm.x86.avx512.mask.scalef.ps.512", F32X16, [sum_, whole, sum_, _EVERY_LANE, _AS_SET]
        )
    # The bits of 2^whole: those of 0 at -127, those of infinity at 128.
    held = maximum(b, whole, constant(F32X16, -127.0))
    held = b.select(b.fcmp_ordered("<", held, constant(F32X16, 128.0)), held, constant(F32X16, 128.0))
    bits = b.shl(b.add(b.fptosi(held, I32X16), constant(I32X16, 127)), constant(I32X16, 23))
    return b.fmul(sum_, b.bitcast(bits, F32X16))


def reciprocal(b: Any, x: Any) -> Any:
    """1 / x to float32's last bits: with AVX-512 14 bits looked up and one step of Newton's. For 2^-100 < x < 2^100."""
    if not HAS_AVX512:
        return b.fdiv(constant(F32X16, 1.0), x)
    near = call_intrinsic(b, "llvm.x86.avx512.rcp14.ps.512", F32X16, [x, x, _EVERY_LANE])
    return b.fmul(near, fma(b, b.fneg(x), near, constant(F32X16, 2.0)))


def transpose_16x16(b: Any, rows: Sequence[Any]) -> list[Any]:
    """16 vectors of 16 numbers of 32 bits, the i-th made of the i-th of each."""
    found, low, high = list(rows), [*range(LANES // 2)], [*range(LANES // 2, LANES)]
    zips = [ir.Constant(I32X16, [x for i in part for x in (i, i + LANES)]) for part in (low, high)]
    for _ in range(4):  # zipping each row with the one 8 further on, four times
        found = [b.shuffle_vector(found[i], found[i + 8], each) for i in range(8) for each in zips]
    return found


class Loop:
    """`for i in range(count)` with count >= 1, carrying values: `i` and `carried` inside, `carried` after `end`."""

    def __init__(self, b: Any, count: Any, carried: Sequence[Any] = ()) -> None:
        self.b, self.count = b, count
        before, self.body = b.block, b.append_basic_block("body")
        b.branch(self.body)
        b.position_at_end(self.body)
        self.i = b.phi(I64)
        self.i.add_incoming(I64(0), before)
        self.carried = [b.phi(value.type) for value in carried]
        for phi, value in zip(self.carried, carried, strict=True):
            phi.add_incoming(value, before)

    def end(self, values: Sequence[Any] = ()) -> list[Any]:
        """Closes the body, `values` going into the next round; returns them as they are after the last."""
        b, inside = self.b, self.b.block
        for phi, value in zip(self.carried, values, strict=True):
            phi.add_incoming(value, inside)
        following = b.add(self.i, I64(1))
        self.i.add_incoming(following, inside)
        after = b.append_basic_block("after")
        b.cbranch(b.icmp_signed("<", following, self.count), self.body, after)
        b.position_at_end(after)
        return list(values)
