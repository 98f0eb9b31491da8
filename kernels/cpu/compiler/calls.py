"""Calls in compiled code: of kernels, of intrinsics that generate LLVM code, and of a few known functions."""

from __future__ import annotations

import ast
from types import FunctionType, SimpleNamespace
from typing import Any, Protocol

import numpy as np
from llvmlite import ir

from plait.kernels.cpu.compiler import arrays, operators
from plait.kernels.cpu.compiler import signatures as types
from plait.kernels.cpu.compiler.intrinsics import Intrinsic, carray
from plait.kernels.cpu.compiler.values import (
    BOOL,
    CASTS,
    FLOAT32,
    INT,
    Array,
    CompileError,
    Record,
    Value,
    as_value,
    convert,
    items_of,
    number,
    record,
)


class Caller(Protocol):
    """What a call needs from the function that it stands in."""

    b: Any  # llvmlite's builder

    def call_kernel(self, function: FunctionType, arguments: list[Value]) -> Any:
        """Calls another kernel, which is compiled first."""


class _IntrinsicContext:
    """What intrinsics use of the compiler."""

    def get_dummy_value(self) -> None:
        """Returns the result of an intrinsic without one."""

    def make_array(self, kind: Any) -> Any:
        """Returns the accessor of arrays, which here gives an array's pointer only."""
        return lambda context, b, value: SimpleNamespace(data=value.parts[0])


_CONTEXT = _IntrinsicContext()
_RESULTS = {types.int64: INT, types.boolean: BOOL, types.float32: FLOAT32}
_TYPES = {INT: types.int64, BOOL: types.boolean, FLOAT32: types.float32}


def call(caller: Caller, function: Any, arguments: list[Any]) -> Any:
    """Returns the result of a call; None if the function has none."""
    b = caller.b
    if function in CASTS:
        return _cast(b, function, *arguments)
    if function is min or function is max:
        return operators.extreme(b, ast.Lt if function is min else ast.Gt, arguments)
    if function is len:
        return _length(*arguments)
    if function is np.sqrt:
        return operators.square_root(b, *arguments)
    if function is carray:
        pointer, shape, dtype = arguments
        return arrays.array_at(b, pointer, items_of(as_value(shape)), dtype)
    if isinstance(function, Intrinsic):
        return _call_intrinsic(b, function, arguments)
    if isinstance(function, type) and issubclass(function, tuple) and hasattr(function, "_fields"):
        if len(arguments) != len(function._fields):
            raise CompileError(f"{function.__name__} has {len(function._fields)} fields")
        return record(function, [as_value(argument) for argument in arguments])
    if not isinstance(function, FunctionType):
        raise CompileError(f"{function!r} cannot be called")
    return caller.call_kernel(function, [as_value(argument) for argument in arguments])


def _cast(b: Any, kind: Any, value: Any) -> Any:
    target = CASTS[kind]
    if isinstance(value, Value):
        return convert(b, value, target)
    return int(value) if target is INT else kind(value)


def _length(value: Any) -> Any:
    if isinstance(value, Value) and isinstance(value.kind, Array):
        return number(INT, value.parts[1])
    return len(value.kind.items) if isinstance(value, Value) and isinstance(value.kind, Record) else len(value)


def _call_intrinsic(b: Any, intrinsic: Any, arguments: list[Any]) -> Any:
    """Generates an intrinsic's code in the calling function."""
    literal = intrinsic.prefer_literal
    kinds = [
        types.Literal(argument) if literal and isinstance(argument, int) else _intrinsic_type(as_value(argument))
        for argument in arguments
    ]
    signature, generate = intrinsic.define(_CONTEXT, *kinds)
    if len(signature.args) != len(arguments):
        raise CompileError(f"{intrinsic.__name__} takes {len(signature.args)} arguments")
    values = [_passed(b, kind, argument) for kind, argument in zip(signature.args, arguments, strict=True)]
    result = generate(_CONTEXT, b, signature, values)
    if signature.return_type is types.void:
        return None
    if signature.return_type is types.voidptr:
        return result
    return number(_RESULTS[signature.return_type], result)


def _intrinsic_type(value: Value) -> Any:
    if isinstance(value.kind, Array):
        return types.Array(value.kind.dtype, value.kind.ndim)
    if isinstance(value.kind, Record):
        return types.UniTuple(types.int64, len(value.kind.items))
    return _TYPES[value.kind]


def _passed(b: Any, kind: Any, argument: Any) -> Any:
    """Returns an argument as an intrinsic with such a parameter takes it."""
    if isinstance(kind, types.Literal):
        return None
    value = as_value(argument)
    if isinstance(kind, types.Array):
        return value
    if not isinstance(kind, types.UniTuple):
        return convert(b, value, _RESULTS[kind]).number
    if kind.count != len(value.parts) or any(part.type != INT.llvm for part in value.parts):
        raise CompileError(f"a tuple of {kind.count} integers is needed")
    aggregate: Any = ir.Constant(ir.ArrayType(INT.llvm, len(value.parts)), ir.Undefined)
    for i, part in enumerate(value.parts):
        aggregate = b.insert_value(aggregate, part, i)
    return aggregate
