"""Arithmetic and comparisons of compiled code, with Python's meaning, and the functions `min`, `max` and `np.sqrt`.

Integer divisions round down, as in Python. Overflow wraps around; a divisor must not be zero. No float operation is
fast-math.
"""

from __future__ import annotations

import ast
import operator
from functools import reduce
from typing import Any

from llvmlite import ir

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.compiler.values import (
    BOOL,
    FLOAT32,
    INT,
    CompileError,
    Value,
    as_value,
    common_kind,
    convert,
    number,
)

KNOWN: dict[type[ast.AST], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
COMPARISONS: dict[type[ast.AST], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}
INT_OPERATIONS: dict[type[ast.AST], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.LShift: "shl", ast.RShift: "ashr",
    ast.BitAnd: "and_", ast.BitOr: "or_", ast.BitXor: "xor",
}  # fmt: skip
FLOAT_OPERATIONS: dict[type[ast.AST], str] = {ast.Add: "fadd", ast.Sub: "fsub", ast.Mult: "fmul", ast.Div: "fdiv"}


def binary(b: Any, kind: type[ast.AST], x: Any, y: Any) -> Any:
    """Returns x (operator) y."""
    if not isinstance(x, Value) and not isinstance(y, Value):
        return KNOWN[kind](x, y)
    x, y = as_value(x), as_value(y)
    common = common_kind(x, y)
    if common is INT and kind is ast.Div:
        raise CompileError("a quotient of integers needs //, or floats")
    x, y = convert(b, x, common), convert(b, y, common)
    if common is not INT:
        if kind not in FLOAT_OPERATIONS:
            raise CompileError(f"{kind.__name__} of floats")
        return number(common, getattr(b, FLOAT_OPERATIONS[kind])(x.number, y.number))
    if kind in (ast.FloorDiv, ast.Mod):
        return number(INT, _floor_divide(b, kind is ast.Mod, x.number, y.number))
    return number(INT, getattr(b, INT_OPERATIONS[kind])(x.number, y.number))


def _floor_divide(b: Any, wants_rest: bool, x: Any, y: Any) -> Any:
    """Returns the quotient rounded down, or its rest, which has the sign of the divisor."""
    if isinstance(y, ir.Constant) and y.constant > 0 and y.constant & (y.constant - 1) == 0:
        return b.and_(x, v.I64(y.constant - 1)) if wants_rest else b.ashr(x, v.I64(y.constant.bit_length() - 1))
    rest = b.srem(x, y)
    differ = b.and_(b.icmp_signed("!=", rest, v.I64(0)), b.icmp_signed("<", b.xor(rest, y), v.I64(0)))
    if wants_rest:
        return b.add(rest, b.select(differ, y, v.I64(0)))
    return b.sub(b.sdiv(x, y), b.zext(differ, v.I64))


def compare(b: Any, kind: type[ast.AST], x: Any, y: Any) -> Any:
    """Returns x (comparison) y; all but != are false for NaN."""
    if not isinstance(x, Value) and not isinstance(y, Value):
        return KNOWN[kind](x, y)
    x, y = as_value(x), as_value(y)
    common = common_kind(x, y)
    left, right = convert(b, x, common).number, convert(b, y, common).number
    if common is INT:
        return number(BOOL, b.icmp_signed(COMPARISONS[kind], left, right))
    ordered = b.fcmp_unordered if kind is ast.NotEq else b.fcmp_ordered
    return number(BOOL, ordered(COMPARISONS[kind], left, right))


def negative(b: Any, x: Any) -> Any:
    """Returns -x."""
    if not isinstance(x, Value):
        return -x
    return binary(b, ast.Sub, 0, x) if x.kind is INT else number(x.kind, b.fneg(x.number))  # type: ignore[arg-type]


def extreme(b: Any, kind: type[ast.AST], values: list[Any]) -> Any:
    """Returns the smallest (ast.Lt) or the largest (ast.Gt) of several integers."""
    if not any(isinstance(value, Value) for value in values):
        return (min if kind is ast.Lt else max)(values)

    def better(x: Value, y: Value) -> Value:
        return number(INT, b.select(compare(b, kind, y, x).number, y.number, x.number))

    numbers = [as_value(value) for value in values]
    if any(value.kind is not INT for value in numbers):
        raise CompileError("min and max are for integers")
    return reduce(better, numbers)


def square_root(b: Any, x: Any) -> Value:
    """Returns the square root of a float32."""
    value = convert(b, x, FLOAT32)
    return number(FLOAT32, v.call_intrinsic(b, "llvm.sqrt.f32", v.F32, [value.number]))
