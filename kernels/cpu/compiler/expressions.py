"""Expressions of compiled code. What is known when a kernel is compiled is computed then, by Python."""

from __future__ import annotations

import ast
from types import FunctionType
from typing import Any

import numpy as np

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.compiler import arrays, operators
from plait.kernels.cpu.compiler.arrays import Slice
from plait.kernels.cpu.compiler.intrinsics import Intrinsic, OneOf, Passing, carray
from plait.kernels.cpu.compiler.sources import outer_name
from plait.kernels.cpu.compiler.values import (
    BOOL,
    CASTS,
    I1,
    INT,
    Array,
    CompileError,
    Kind,
    Number,
    Record,
    Value,
    as_value,
    common_kind,
    convert,
    items_of,
    number,
    record,
    truth,
)


class Variable:
    """A local variable: its type and a stack slot for each of its parts, which LLVM turns into registers."""

    def __init__(self, b: Any, kind: Kind) -> None:
        self.kind = kind
        with b.goto_entry_block():
            self.slots = [b.alloca(part) for part in kind.parts]

    def load(self, b: Any) -> Value:
        """Returns the present value."""
        return Value(self.kind, tuple(b.load(slot) for slot in self.slots))

    def store(self, b: Any, value: Any) -> None:
        """Assigns a value; an integer may become a float, nothing else changes its type."""
        value = as_value(value)
        if value.kind != self.kind and common_kind(value, Value(self.kind, ())) != self.kind:
            raise CompileError(f"{value.kind} is assigned to a variable of type {self.kind}")
        for part, slot in zip(convert(b, value, self.kind).parts, self.slots, strict=True):
            b.store(part, slot)


class Expressions:
    """Generates the code of expressions in a function; `b` is its builder."""

    def __init__(self, b: Any, function: FunctionType) -> None:
        self.b, self.function = b, function
        self.variables: dict[str, Variable] = {}

    def call_kernel(self, function: FunctionType, arguments: list[Value]) -> Any:
        """Calls another kernel, which is compiled first."""
        raise NotImplementedError

    def evaluate(self, node: ast.expr) -> Any:
        """Returns an expression's value, or the Python object that it is known to be."""
        generate = getattr(self, f"_{type(node).__name__.lower()}", None)
        if generate is None:
            raise CompileError(f"{type(node).__name__} is not compiled")
        return generate(node)

    def test(self, node: ast.expr) -> Any:
        """Returns whether an expression is true: an LLVM value, or a Python bool if that is known."""
        value = self.evaluate(node)
        return truth(self.b, value).number if isinstance(value, Value) else bool(value)

    def _constant(self, node: ast.Constant) -> Any:
        return node.value

    def _name(self, node: ast.Name) -> Any:
        if node.id in self.variables:
            return self.variables[node.id].load(self.b)
        if node.id in self.function.__code__.co_varnames:
            raise CompileError(f"{node.id} is read before anything is assigned to it")
        return outer_name(self.function, node.id)

    def _attribute(self, node: ast.Attribute) -> Any:
        value = self.evaluate(node.value)
        if not isinstance(value, Value):
            return getattr(value, node.attr)
        if isinstance(value.kind, Array) and node.attr == "shape":
            return arrays.shape_of(value)
        if isinstance(value.kind, Record) and value.kind.cls and node.attr in value.kind.cls._fields:
            return items_of(value)[value.kind.cls._fields.index(node.attr)]
        raise CompileError(f"{value.kind} has no {node.attr}")

    def _tuple(self, node: ast.Tuple) -> Any:
        items = [self.evaluate(item) for item in node.elts]
        return record(None, [as_value(item) for item in items])

    def index(self, node: ast.expr) -> list[Any]:
        """Returns the index of a subscript, one entry for each dimension."""
        parts = node.elts if isinstance(node, ast.Tuple) else [node]
        return [self._index_part(part) for part in parts]

    def _index_part(self, node: ast.expr) -> Any:
        if not isinstance(node, ast.Slice):
            return self.evaluate(node)
        if node.step is not None:
            raise CompileError("a slice has no step")
        return Slice(*(part and self.evaluate(part) for part in (node.lower, node.upper)))

    def _subscript(self, node: ast.Subscript) -> Any:
        return arrays.subscript(self.b, self.evaluate(node.value), self.index(node.slice))

    def _binop(self, node: ast.BinOp) -> Any:
        left = self.evaluate(node.left)
        return operators.binary(self.b, type(node.op), left, self.evaluate(node.right))

    def _unaryop(self, node: ast.UnaryOp) -> Any:
        if isinstance(node.op, ast.Not):
            value = self.test(node.operand)
            return not value if isinstance(value, bool) else number(BOOL, self.b.not_(value))
        if isinstance(node.op, ast.USub):
            return operators.negative(self.b, self.evaluate(node.operand))
        raise CompileError(f"{type(node.op).__name__} is not compiled")

    def _compare(self, node: ast.Compare) -> Any:
        if len(node.ops) != 1:
            raise CompileError("one comparison at a time")
        left = self.evaluate(node.left)
        return operators.compare(self.b, type(node.ops[0]), left, self.evaluate(node.comparators[0]))

    def _boolop(self, node: ast.BoolOp) -> Any:
        """Evaluates operands until the result is certain; the result is a bool."""
        b, ends_with = self.b, isinstance(node.op, ast.Or)
        after, incoming = None, []
        for i, operand in enumerate(node.values):
            value = self.test(operand)
            if isinstance(value, bool) and value is not ends_with:
                value = I1(int(value))
                if i < len(node.values) - 1:
                    continue
            is_known, value = isinstance(value, bool), I1(int(value)) if isinstance(value, bool) else value
            if is_known and after is None:
                return ends_with
            if i == len(node.values) - 1 and after is None:
                return number(BOOL, value)
            after = after or b.append_basic_block("any")
            incoming.append((value, b.block))
            if is_known or i == len(node.values) - 1:
                b.branch(after)
                break
            following = b.append_basic_block("following")
            b.cbranch(value, *((after, following) if ends_with else (following, after)))
            b.position_at_end(following)
        return number(BOOL, self._phi(after, I1, incoming))

    def _phi(self, block: Any, kind: Any, incoming: list[tuple[Any, Any]]) -> Any:
        self.b.position_at_end(block)
        phi = self.b.phi(kind)
        for value, source in incoming:
            phi.add_incoming(value, source)
        return phi

    def _ifexp(self, node: ast.IfExp) -> Any:
        b, test = self.b, self.test(node.test)
        if isinstance(test, bool):
            return self.evaluate(node.body if test else node.orelse)
        starts = [b.append_basic_block("if_true"), b.append_basic_block("if_false")]
        b.cbranch(test, *starts)
        values, ends = [], []
        for start, branch in zip(starts, (node.body, node.orelse), strict=True):
            b.position_at_end(start)
            values.append(as_value(self.evaluate(branch)))
            ends.append(b.block)
        kind = values[0].kind if values[0].kind == values[1].kind else common_kind(*values)
        after, converted = b.append_basic_block("after"), []
        for end, value in zip(ends, values, strict=True):
            b.position_at_end(end)
            converted.append(convert(b, value, kind).parts)
            b.branch(after)
        b.position_at_end(after)
        phis = [b.phi(part) for part in kind.parts]
        for phi, *parts in zip(phis, *converted, strict=True):
            for part, end in zip(parts, ends, strict=True):
                phi.add_incoming(part, end)
        return Value(kind, tuple(phis))

    def _call(self, node: ast.Call) -> Any:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "_replace":
            return self._replaced(as_value(self.evaluate(node.func.value)), node)
        if node.keywords:
            raise CompileError("arguments have no names")
        if isinstance(node.func, ast.Attribute) and node.func.attr == "reshape":
            (shape,) = node.args
            return arrays.reshaped(
                self.b, self.evaluate(node.func.value), list(items_of(as_value(self.evaluate(shape))))
            )
        function = self.evaluate(node.func)
        return call(self, function, [self.evaluate(argument) for argument in node.args])

    def _replaced(self, value: Value, node: ast.Call) -> Value:
        """Returns a NamedTuple with some of its fields changed."""
        if not isinstance(value.kind, Record) or not value.kind.cls or node.args:
            raise CompileError("`_replace` takes named fields of a NamedTuple")
        fields = dict(zip(value.kind.cls._fields, items_of(value), strict=True))
        for change in node.keywords:
            if change.arg not in fields:
                raise CompileError(f"{value.kind} has no {change.arg}")
            fields[change.arg] = as_value(self.evaluate(change.value))
        return record(value.kind.cls, list(fields.values()))


# -- calls ----------------------------------------------------------------------------------------
# Calls in compiled code: of kernels, of intrinsics that generate LLVM code, and of a few known functions.


def call(caller: Expressions, function: Any, arguments: list[Any]) -> Any:
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


def _call_intrinsic(b: Any, intrinsic: Intrinsic, arguments: list[Any]) -> Any:
    """Generates an intrinsic's code in the calling function."""
    *kinds, result = intrinsic.kinds.values()
    if len(kinds) != len(arguments):
        raise CompileError(f"{intrinsic.__name__} takes {len(kinds)} arguments")
    passed = [_passed(b, kind, argument) for kind, argument in zip(kinds, arguments, strict=True)]
    if not intrinsic.when:
        return None
    for place, kind in enumerate(kinds):
        if isinstance(kind, OneOf) and not isinstance(passed[place], int):
            return _choose(b, intrinsic, passed, place, kind.values)
    generated = intrinsic.generate(b, *passed)
    return number(result, generated) if isinstance(result, Number) else generated


def _choose(b: Any, intrinsic: Intrinsic, passed: list[Any], place: int, values: tuple[int, ...]) -> None:
    """Generates an intrinsic's code for each value that the argument at `place` may have."""
    after = b.append_basic_block("after")
    for value in values:
        chosen, other = b.append_basic_block("chosen"), b.append_basic_block("other")
        b.cbranch(b.icmp_signed("==", passed[place], v.I64(value)), chosen, other)
        b.position_at_end(chosen)
        intrinsic.generate(b, *passed[:place], value, *passed[place + 1 :])
        b.branch(after)
        b.position_at_end(other)
    b.unreachable()
    b.position_at_end(after)


def _passed(b: Any, kind: Any, argument: Any) -> Any:
    """Returns an argument as an intrinsic with such a parameter takes it."""
    if isinstance(kind, OneOf):
        if isinstance(argument, int) and argument not in kind.values:
            raise CompileError(f"{argument} is not one of {kind.values}")
        return argument if isinstance(argument, int) else convert(b, argument, INT).number
    value = as_value(argument)
    if kind is Passing.ARRAY:
        if not isinstance(value.kind, Array):
            raise CompileError(f"{value.kind} where an array is needed")
        return value.parts[0]
    if kind is not Passing.INTS:
        return convert(b, value, kind).number
    if any(part.type != INT.llvm for part in value.parts):
        raise CompileError("a tuple of integers is needed")
    return value.parts
