"""Elements, rows and slices of arrays. An index is not negative; only slices are clipped to the array."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.compiler import operators
from plait.kernels.cpu.compiler.values import (
    DTYPES,
    FLOAT32,
    FLOAT64,
    INT,
    Array,
    CompileError,
    Value,
    as_value,
    convert,
    items_of,
    number,
    record,
)


class Slice:
    """`begin:end` of an index; None: from the beginning, or to the end."""

    def __init__(self, begin: Any, end: Any) -> None:
        self.begin, self.end = begin, end


def array_at(b: Any, address: Any, shape: list[Value], dtype: Any) -> Value:
    """Returns the array of a shape at a pointer."""
    kind = Array(np.dtype(dtype).name, len(shape))
    pointer = b.bitcast(address, DTYPES[kind.dtype].as_pointer())
    return Value(kind, (pointer, *(convert(b, size, INT).number for size in shape)))


def shape_of(array: Value) -> Value:
    """Returns the sizes of an array's dimensions."""
    return record(None, [number(INT, size) for size in array.parts[1:]])


def reshaped(b: Any, array: Value, shape: list[Value]) -> Value:
    """Returns the array with another shape of as many elements."""
    assert isinstance(array.kind, Array)
    sizes = tuple(convert(b, size, INT).number for size in shape)
    return Value(Array(array.kind.dtype, len(shape)), (array.parts[0], *sizes))


def subscript(b: Any, value: Any, index: list[Any]) -> Any:
    """Returns the element, row or slice of an array, or an item of a tuple."""
    value = as_value(value)
    if not isinstance(value.kind, Array):
        (position,) = index
        if not isinstance(position, int):
            raise CompileError("the index of a tuple must be known")
        return items_of(value)[position]
    pointer, sizes = value.parts[0], list(value.parts[1:])
    for i, position in enumerate(index):
        stride = v.I64(1)
        for size in sizes[i + 1 :]:
            stride = b.mul(stride, size)
        if isinstance(position, Slice):
            if i != len(index) - 1:
                raise CompileError("only the last index may be a slice")
            begin, sizes[i] = _clipped(b, position, sizes[i])
            pointer = b.gep(pointer, [b.mul(begin, stride)])
            return Value(Array(value.kind.dtype, len(sizes) - i), (pointer, *sizes[i:]))
        pointer = b.gep(pointer, [b.mul(_position(b, position), stride)])
    if len(index) < len(sizes):
        return Value(Array(value.kind.dtype, len(sizes) - len(index)), (pointer, *sizes[len(index) :]))
    return _loaded(b, value.kind.dtype, pointer)


def _position(b: Any, position: Any) -> Any:
    if isinstance(position, int) and position < 0:
        raise CompileError("an index must not be negative")
    value = as_value(position)
    if value.kind is not INT:
        raise CompileError(f"an index of type {value.kind}")
    return value.number


def _clipped(b: Any, part: Slice, size: Any) -> tuple[Any, Any]:
    """Returns the begin and the length of a slice."""
    array_size = number(INT, size)
    begin = operators.extreme(b, ast.Lt, [part.begin, array_size]) if part.begin is not None else as_value(0)
    end = operators.extreme(b, ast.Lt, [part.end, array_size]) if part.end is not None else array_size
    length = operators.binary(b, ast.Sub, operators.extreme(b, ast.Gt, [begin, end]), begin)
    return as_value(begin).number, length.number


def _loaded(b: Any, dtype: str, pointer: Any) -> Value:
    loaded = b.load(pointer)
    if dtype.startswith("float"):
        return number(FLOAT32 if dtype == "float32" else FLOAT64, loaded)
    if dtype == "int64":
        return number(INT, loaded)
    return number(INT, (b.zext if dtype.startswith("u") else b.sext)(loaded, v.I64))


def store(b: Any, array: Value, index: list[Any], value: Any) -> None:
    """Stores a number as an element."""
    if not isinstance(array.kind, Array) or len(index) != array.kind.ndim:
        raise CompileError("only elements of arrays are stored")
    pointer, dtype = array.parts[0], array.kind.dtype
    row = subscript(b, array, index[:-1]) if index[:-1] else array
    pointer = b.gep(row.parts[0], [_position(b, index[-1])])
    if dtype.startswith("float"):
        b.store(convert(b, value, FLOAT32 if dtype == "float32" else FLOAT64).number, pointer)
    else:
        integer = convert(b, value, INT).number
        b.store(integer if dtype == "int64" else b.trunc(integer, DTYPES[dtype]), pointer)
