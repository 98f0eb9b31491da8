"""The values of compiled code: numbers, arrays and records, and conversions between numbers.

Integers are int64 wherever they come from, so that a variable has one type. What is known when a function is compiled
(a global number, a class, a module) stays a Python object until it meets a value.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from plait.kernels.cpu import llvm as v

I1, F64 = ir.IntType(1), ir.DoubleType()


class CompileError(Exception):
    """A kernel uses something that the compiler does not know."""


class Number(NamedTuple):
    """The type of a number, which is one LLVM value."""

    name: str
    llvm: Any

    @property
    def parts(self) -> tuple[Any, ...]:
        """The LLVM types that a value of this type consists of."""
        return (self.llvm,)


class Array(NamedTuple):
    """The type of a C-contiguous array: its address as a pointer, and the sizes of its dimensions."""

    dtype: str
    ndim: int

    @property
    def parts(self) -> tuple[Any, ...]:
        """As of Number."""
        return (DTYPES[self.dtype].as_pointer(), *[v.I64] * self.ndim)


class Record(NamedTuple):
    """The type of a tuple; `cls` is its NamedTuple class, or None."""

    cls: Any
    items: tuple[Any, ...]

    @property
    def parts(self) -> tuple[Any, ...]:
        """As of Number, of all items."""
        return tuple(part for item in self.items for part in item.parts)


Kind = Number | Array | Record
INT, BOOL, FLOAT32, FLOAT64 = (
    Number("int64", v.I64),
    Number("bool", I1),
    Number("float32", v.F32),
    Number("float64", F64),
)
DTYPES: dict[str, Any] = {
    "int8": v.I8, "uint16": v.I16, "int32": v.I32, "int64": v.I64, "float32": v.F32, "float64": F64
}  # fmt: skip
CASTS: dict[Any, Number] = {
    np.int64: INT, np.int32: INT, int: INT, np.float32: FLOAT32, np.float64: FLOAT64, float: FLOAT64
}  # fmt: skip


class Value(NamedTuple):
    """A value of compiled code: its type, and the LLVM values of its parts."""

    kind: Kind
    parts: tuple[Any, ...]

    @property
    def number(self) -> Any:
        """The LLVM value of a number."""
        if not isinstance(self.kind, Number):
            raise CompileError(f"{self.kind} is not a number")
        return self.parts[0]


def number(kind: Number, value: Any) -> Value:
    """Returns a number of one LLVM value."""
    return Value(kind, (value,))


def record(cls: Any, items: list[Value]) -> Value:
    """Returns a tuple of values."""
    return Value(Record(cls, tuple(item.kind for item in items)), tuple(part for item in items for part in item.parts))


def items_of(value: Value) -> list[Value]:
    """Returns the items of a tuple."""
    if not isinstance(value.kind, Record):
        raise CompileError(f"{value.kind} is not a tuple")
    items, start = [], 0
    for kind in value.kind.items:
        items.append(Value(kind, value.parts[start : start + len(kind.parts)]))
        start += len(kind.parts)
    return items


def as_value(known: Any) -> Value:
    """Returns a value for a Python number or tuple that is known already; values stay as they are."""
    if isinstance(known, Value):
        return known
    if isinstance(known, bool | np.bool_):
        return number(BOOL, ir.Constant(I1, int(known)))
    if isinstance(known, int | np.integer):
        return number(INT, v.I64(int(known)))
    if isinstance(known, np.float32):
        return number(FLOAT32, ir.Constant(v.F32, float(known)))
    if isinstance(known, float):
        return number(FLOAT64, ir.Constant(F64, known))
    if isinstance(known, tuple):
        cls = type(known) if type(known) is not tuple else None
        return record(cls, [as_value(item) for item in known])
    raise CompileError(f"{known!r} is no value of compiled code")


def convert(b: Any, known: Any, kind: Kind) -> Value:
    """Converts a number to another type as NumPy does; arrays and records must have the type already."""
    value: Value = as_value(known)
    if value.kind == kind:
        return value
    if not isinstance(kind, Number) or not isinstance(value.kind, Number):
        raise CompileError(f"{value.kind} where {kind} is needed")
    x, source = value.number, value.kind
    if kind is BOOL:
        return truth(b, value)
    if kind is INT:
        return number(INT, b.zext(x, v.I64) if source is BOOL else b.fptosi(x, v.I64))
    if source is BOOL:
        return number(kind, b.uitofp(x, kind.llvm))
    if source is INT:
        return number(kind, b.sitofp(x, kind.llvm))
    return number(kind, b.fpext(x, F64) if kind is FLOAT64 else b.fptrunc(x, v.F32))


def truth(b: Any, known: Any) -> Value:
    """Returns whether a number is not zero."""
    value: Value = as_value(known)
    if value.kind is BOOL:
        return value
    zero = ir.Constant(value.number.type, 0)
    compare = b.icmp_signed if value.kind is INT else b.fcmp_unordered
    return number(BOOL, compare("!=", value.number, zero))


def common_kind(x: Value, y: Value) -> Number:
    """Returns the type in which two numbers are computed: the wider float; float64 for an integer and a float."""
    kinds = (x.kind, y.kind)
    if not all(isinstance(kind, Number) for kind in kinds):
        raise CompileError(f"{x.kind} and {y.kind} are not numbers")
    if FLOAT64 in kinds or (FLOAT32 in kinds and kinds != (FLOAT32, FLOAT32)):
        return FLOAT64
    return FLOAT32 if FLOAT32 in kinds else INT
