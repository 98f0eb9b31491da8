"""Building blocks for LLVM code on vectors of 16 numbers, used by the kernels' intrinsics (imported as `v`).

A kernel's Python has no vector types, and LLVM does not find these instructions in scalar loops. `b` is the
llvmlite builder that all functions here append to. Addresses are int64. No operation is fast-math, so sums are added
in the order written. With AVX-512 such a vector is one register; otherwise LLVM splits it in two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from plait.kernels.cpu import isa

LANES = 16
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()


class _BFloat16(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat type, which llvmlite lacks; it serves for arguments of intrinsics and bitcasts only."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


def vector(element: Any, lanes: int = LANES) -> Any:
    """Returns the vector type of `lanes` elements."""
    return ir.VectorType(element, lanes)


HAS_AVX512, HAS_BF16_DOT = isa.has_features("avx512f"), isa.has_features("avx512bf16")
F32X16, I32X16 = vector(F32), vector(I32)


def constant(kind: Any, value: float) -> Any:
    """Returns a vector constant with the same value in every lane."""
    return ir.Constant(kind, [value] * kind.count)


def splat(b: Any, value: Any, lanes: int = LANES) -> Any:
    """Broadcasts a scalar to every lane."""
    empty = ir.Constant(vector(value.type, lanes), ir.Undefined)
    return b.shuffle_vector(b.insert_element(empty, value, I32(0)), empty, constant(vector(I32, lanes), 0))


def pointer_at(b: Any, address: Any, kind: Any, offset: int = 0) -> Any:
    """Converts an address plus `offset` bytes to a pointer."""
    return b.inttoptr(b.add(address, I64(offset)) if offset else address, kind.as_pointer())


def load(b: Any, address: Any, kind: Any, offset: int = 0) -> Any:
    """Loads a value of type `kind` from an unaligned address."""
    return b.load(pointer_at(b, address, kind, offset), align=1)


def store(b: Any, value: Any, address: Any, offset: int = 0) -> None:
    """Stores a value at an unaligned address."""
    b.store(value, pointer_at(b, address, value.type, offset), align=1)


def broadcast_load(b: Any, address: Any, kind: Any = F32, offset: int = 0, lanes: int = LANES) -> Any:
    """Loads the scalar at an address and broadcasts it to every lane."""
    return splat(b, load(b, address, kind, offset), lanes)


def external_function(b: Any, name: str, kind: Any) -> Any:
    """Returns the function of LLVM or of the C library with this name and type, which the module declares once."""
    return b.module.globals.get(name) or ir.Function(b.module, kind, name)


def allocate_on_stack(b: Any, kind: Any) -> Any:
    """Returns a pointer to memory for a value of type `kind`, once for a call of the current function."""
    with b.goto_entry_block():
        return b.alloca(kind)


def call_intrinsic(b: Any, name: str, result: Any, values: Sequence[Any]) -> Any:
    """Calls one of LLVM's intrinsic functions."""
    signature = ir.FunctionType(result, [value.type for value in values])
    return b.call(external_function(b, name, signature), values)


def prefetch(b: Any, address: Any, offset: int = 0, level: int = 1) -> None:
    """Prefetches the cache line `offset` bytes on to the cache of level 1 or 2; the address need not be valid."""
    pointer = pointer_at(b, address, I8, offset)
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
    function = external_function(b, "llvm.prefetch.p0", kind)
    b.call(function, [pointer, I32(0), I32(4 - level), I32(1)])


def keep_memory_order(b: Any) -> None:
    """Keeps LLVM from moving loads and stores past this place; generates no instruction."""
    b.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)


def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """Returns x * y + z, rounded once."""
    return call_intrinsic(b, f"llvm.fma.v{x.type.count}f32", x.type, [x, y, z])


def dot_bf16(b: Any, sums: Any, x: Any, y: Any) -> Any:
    """VDPBF16PS: adds to sums [16] both products of the bfloat16 pairs of x and y. Needs `HAS_BF16_DOT`.

    The instruction takes operands and results below 2^-126 as zero.
    """
    pairs = vector(_BFloat16(), 2 * LANES)
    return call_intrinsic(
        b, "llvm.x86.avx512bf16.dpbf16ps.512", F32X16, [sums, b.bitcast(x, pairs), b.bitcast(y, pairs)]
    )


def load_f16_as_f32(b: Any, address: Any, offset: int, lanes: int = LANES) -> Any:
    """Loads `lanes` float16 as float32."""
    return b.fpext(load(b, address, vector(F16, lanes), offset), vector(F32, lanes))


def round_to_bf16_bits(b: Any, wide: Any) -> Any:
    """Rounds 16 float32 to the bits of bfloat16: to nearest, ties to even; NaN stays NaN.

    VCVTNEPS2BF16, used where the CPU has it, takes numbers below 2^-126 as zero, as the products do.
    """
    if HAS_BF16_DOT:
        narrow = call_intrinsic(b, "llvm.x86.avx512bf16.cvtneps2bf16.512", vector(_BFloat16()), [wide])
        return b.bitcast(narrow, vector(I16))
    bits = b.bitcast(wide, I32X16)
    upper = b.lshr(bits, constant(I32X16, 16))
    tie = b.add(b.and_(upper, constant(I32X16, 1)), constant(I32X16, 0x7FFF))
    rounded = b.lshr(b.add(bits, tie), constant(I32X16, 16))
    quiet = b.or_(upper, constant(I32X16, 0x40))
    return b.trunc(b.select(b.fcmp_unordered("uno", wide, wide), quiet, rounded), vector(I16))


def round_pair_to_bf16_bits(b: Any, low: Any, high: Any) -> Any:
    """Rounds 32 float32 as `round_to_bf16_bits` does, in one instruction where the CPU has it."""
    if HAS_BF16_DOT:
        kind = vector(_BFloat16(), 2 * LANES)
        narrow = call_intrinsic(b, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", kind, [high, low])
        return b.bitcast(narrow, vector(I16, 2 * LANES))
    halves = [round_to_bf16_bits(b, wide) for wide in (low, high)]
    return b.shuffle_vector(*halves, ir.Constant(vector(I32, 2 * LANES), list(range(2 * LANES))))


def maximum(b: Any, x: Any, y: Any) -> Any:
    """Returns the larger number of each lane; y where one is NaN."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def minimum(b: Any, x: Any, y: Any) -> Any:
    """Returns the smaller number of each lane; y where one is NaN."""
    return b.select(b.fcmp_ordered("<", x, y), x, y)


def larger_bits(b: Any, x: Any, y: Any) -> Any:
    """Returns the larger of two bit patterns, int32 [16]: of float32 >= 0 the larger number, NaN being the largest."""
    return b.select(b.icmp_unsigned(">", x, y), x, y)


def reduce(b: Any, x: Any, combine: Any) -> Any:
    """Combines all lanes to a scalar, halves first."""
    width = x.type.count
    while width > 1:
        width //= 2
        empty = ir.Constant(x.type, ir.Undefined)
        half = ir.VectorType(I32, width)
        low = b.shuffle_vector(x, empty, ir.Constant(half, list(range(width))))
        x = combine(low, b.shuffle_vector(x, empty, ir.Constant(half, list(range(width, 2 * width)))))
    return b.extract_element(x, I32(0))


# Minimax polynomial of 2^r for |r| <= 1/2, highest power first; relative error 3e-6.
_TERMS = (0.009582853220668064, 0.0559064262081037, 0.2402409861776473, 0.693124193225303, 1.0)
_ALL_LANES, _CURRENT_ROUNDING = ir.Constant(I16, 0xFFFF), I32(4)  # operands of masked AVX-512 instructions


def exp2(b: Any, x: Any, shift: Any = None) -> Any:
    """Returns 2^x for finite x, with a relative error of 3e-6: exactly 1 at 0, and 0 for very negative x.

    With `shift`, whole numbers as float32, the result is multiplied by 2^shift. Without VSCALEFPS results below 2^-126
    are 0.
    """
    exponent = call_intrinsic(b, "llvm.nearbyint.v16f32", F32X16, [x])
    rest = b.fsub(x, exponent)
    sum_ = constant(F32X16, _TERMS[0])
    for term in _TERMS[1:]:
        sum_ = fma(b, sum_, rest, constant(F32X16, term))
    if shift is not None:
        exponent = b.fadd(exponent, shift)
    if HAS_AVX512:
        return call_intrinsic(
            b, "llvm.x86.avx512.mask.scalef.ps.512", F32X16, [sum_, exponent, sum_, _ALL_LANES, _CURRENT_ROUNDING]
        )
    # The bits of 2^exponent: those of 0 at -127, those of infinity at 128.
    clamped = minimum(b, maximum(b, exponent, constant(F32X16, -127.0)), constant(F32X16, 128.0))
    bits = b.shl(b.add(b.fptosi(clamped, I32X16), constant(I32X16, 127)), constant(I32X16, 23))
    return b.fmul(sum_, b.bitcast(bits, F32X16))


def reciprocal(b: Any, x: Any) -> Any:
    """Returns 1 / x for 2^-100 < x < 2^100, accurate to float32's last bits.

    With AVX-512: VRCP14PS, an approximation of 14 bits, and one Newton step.
    """
    if not HAS_AVX512:
        return b.fdiv(constant(F32X16, 1.0), x)
    near = call_intrinsic(b, "llvm.x86.avx512.rcp14.ps.512", F32X16, [x, x, _ALL_LANES])
    return b.fmul(near, fma(b, b.fneg(x), near, constant(F32X16, 2.0)))


def transpose_16x16(b: Any, rows: Sequence[Any]) -> list[Any]:
    """Transposes 16 vectors of 16 numbers of 32 bits."""
    vectors, low, high = list(rows), [*range(LANES // 2)], [*range(LANES // 2, LANES)]
    zips = [ir.Constant(I32X16, [x for i in part for x in (i, i + LANES)]) for part in (low, high)]
    for _ in range(4):  # zipping each row with the one 8 further on four times transposes them
        vectors = [b.shuffle_vector(vectors[i], vectors[i + 8], mask) for i in range(8) for mask in zips]
    return vectors


class Loop:
    """A loop `for i in range(count)`, count >= 1, that carries values from one iteration to the next.

    Code appended between the constructor and `end` is the body; it reads `i` and `carried`.
    """

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
        """Closes the body; `values` become `carried` of the next iteration. Returns them as of the last iteration."""
        b, inside = self.b, self.b.block
        for phi, value in zip(self.carried, values, strict=True):
            phi.add_incoming(value, inside)
        following = b.add(self.i, I64(1))
        self.i.add_incoming(following, inside)
        after = b.append_basic_block("after")
        b.cbranch(b.icmp_signed("<", following, self.count), self.body, after)
        b.position_at_end(after)
        return list(values)
