"""Compiles kernels: functions in a small part of Python, to one LLVM module.

A kernel works on numbers, C-contiguous arrays and NamedTuples, and calls other kernels and intrinsics, which generate
LLVM code. A loop over a generator is the generator's code, with the loop's body where it yields. The types of a
function's variables follow from its arguments, in the order of its statements: a variable keeps the type of its first
value. Whatever is not known here raises CompileError with file and line.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import FunctionType
from typing import Any

from llvmlite import ir

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.compiler import arrays, operators
from plait.kernels.cpu.compiler.expressions import Expressions, Variable
from plait.kernels.cpu.compiler.sources import syntax_tree
from plait.kernels.cpu.compiler.values import (
    INT,
    CompileError,
    Kind,
    Record,
    Value,
    as_value,
    convert,
    items_of,
    number,
)

RESULT_STRIDE = 8  # bytes from one part of a result to the next


class KernelModule:
    """An LLVM module of kernels. A function is compiled once for the types of its arguments."""

    def __init__(self, name: str) -> None:
        self.module = ir.Module(name)
        self._functions: dict[tuple[Any, ...], tuple[Any, Kind | None]] = {}
        self._begun: set[tuple[Any, ...]] = set()

    def add_entry(self, name: str, function: FunctionType) -> None:
        """Adds a kernel that others call by its address; all its arguments are int64."""
        count = function.__code__.co_argcount
        entry = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [v.I64] * count), name)
        b = ir.IRBuilder(entry.append_basic_block("entry"))
        compiled, kind = self.compiled(function, (INT,) * count)
        if kind is not None:
            raise CompileError(f"{name} has a result")
        b.call(compiled, [v.I64(0).inttoptr(v.I8.as_pointer()), *entry.args])
        b.ret_void()

    def compiled(self, function: FunctionType, kinds: tuple[Kind, ...]) -> tuple[Any, Kind | None]:
        """Returns the LLVM function for arguments of these types, and the type of its result; None: it has none.

        Its first argument is the address to which it writes the parts of its result.
        """
        key = (function, kinds)
        if key not in self._functions:
            if key in self._begun:
                raise CompileError(f"{function.__name__} calls itself")
            self._begun.add(key)
            self._functions[key] = FunctionBody(self, function, kinds).compile()
        return self._functions[key]


class FunctionBody(Expressions):
    """Generates the code of one function."""

    def __init__(self, module: KernelModule, function: FunctionType, kinds: tuple[Kind, ...]) -> None:
        self.module, self.tree, self.kinds = module, syntax_tree(function), kinds
        parts = [v.I8.as_pointer(), *(part for kind in kinds for part in kind.parts)]
        name = module.module.get_unique_name(function.__name__)
        self.compiled = ir.Function(module.module, ir.FunctionType(ir.VoidType(), parts), name)
        self.compiled.linkage = "internal"
        self.compiled.attributes.add("nounwind")
        super().__init__(ir.IRBuilder(self.compiled.append_basic_block("entry")), function)
        self.result_kind: Kind | None = None
        self.has_returned = False
        self.loops: list[tuple[Any, Any]] = []  # of each enclosing loop: where `continue` and `break` go

    def compile(self) -> tuple[Any, Kind | None]:
        """Returns the function and the type of its result."""
        b = self.b
        start = b.append_basic_block("start")
        b.branch(start)
        b.position_at_end(start)
        parts = iter(self.compiled.args[1:])
        self.run_with([Value(kind, tuple(next(parts) for _ in kind.parts)) for kind in self.kinds])
        if not b.block.is_terminated:
            b.ret_void()
        return self.compiled, self.result_kind

    def run_with(self, arguments: list[Any]) -> None:
        """Generates the function's statements."""
        names = [parameter.arg for parameter in self.tree.args.args]
        if len(names) != len(arguments):
            raise CompileError(f"{self.function.__name__} takes {len(names)} arguments")
        for name, argument in zip(names, arguments, strict=True):
            self.assign_name(name, argument)
        self.run(self.tree.body)

    def call_kernel(self, function: FunctionType, arguments: list[Value]) -> Any:
        """As in `Expressions`."""
        b = self.b
        compiled, kind = self.module.compiled(function, tuple(argument.kind for argument in arguments))
        parts = [part for argument in arguments for part in argument.parts]
        if kind is None:
            b.call(compiled, [v.I64(0).inttoptr(v.I8.as_pointer()), *parts])
            return None
        with b.goto_entry_block():
            memory = b.alloca(ir.ArrayType(v.I8, RESULT_STRIDE * len(kind.parts)))
            memory.align = RESULT_STRIDE
            result = b.bitcast(memory, v.I8.as_pointer())
        b.call(compiled, [result, *parts])
        return Value(kind, tuple(b.load(pointer) for pointer in self._result_parts(result, kind)))

    def _result_parts(self, result: Any, kind: Kind) -> list[Any]:
        """Returns the address of each part of a result."""
        addresses = [self.b.gep(result, [v.I64(RESULT_STRIDE * i)]) for i in range(len(kind.parts))]
        return [self.b.bitcast(address, part.as_pointer()) for address, part in zip(addresses, kind.parts, strict=True)]

    def run(self, statements: list[ast.stmt]) -> None:
        """Generates statements up to the first after which nothing is reached."""
        for statement in statements:
            if self.b.block.is_terminated:
                return
            try:
                getattr(self, f"_{type(statement).__name__.lower()}", self._unknown)(statement)
            except CompileError as error:
                if error.args[0].startswith(error_mark := "kernel "):
                    raise
                file = Path(self.function.__code__.co_filename).name
                raise CompileError(f"{error_mark}{file}:{statement.lineno}: {error}") from error

    def _unknown(self, node: ast.stmt) -> None:
        raise CompileError(f"{type(node).__name__} is not compiled")

    def _pass(self, node: ast.Pass) -> None:
        pass

    def _expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # else a docstring
            self.evaluate(node.value)

    def _assign(self, node: ast.Assign) -> None:
        value = self.evaluate(node.value)
        for target in node.targets:
            self._assign_to(target, value)

    def _annassign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assign_to(node.target, self.evaluate(node.value))

    def _assign_to(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.assign_name(target.id, value)
        elif isinstance(target, ast.Tuple):
            items = items_of(as_value(value))
            if len(items) != len(target.elts):
                raise CompileError(f"{len(items)} values for {len(target.elts)} names")
            for part, item in zip(target.elts, items, strict=True):
                self._assign_to(part, item)
        elif isinstance(target, ast.Subscript):
            arrays.store(self.b, as_value(self.evaluate(target.value)), self.index(target.slice), value)
        else:
            self._unknown(target)  # type: ignore[arg-type]

    def assign_name(self, name: str, value: Any) -> None:
        """Assigns to a local variable, which has the type of its first value."""
        value = as_value(value)
        if name not in self.variables:
            self.variables[name] = Variable(self.b, value.kind)
        self.variables[name].store(self.b, value)

    def _augassign(self, node: ast.AugAssign) -> None:
        operand = self.evaluate(node.value)
        if isinstance(node.target, ast.Name):
            old = self.variables[node.target.id].load(self.b)
            self.assign_name(node.target.id, operators.binary(self.b, type(node.op), old, operand))
        elif isinstance(node.target, ast.Subscript):
            array, index = as_value(self.evaluate(node.target.value)), self.index(node.target.slice)
            old = arrays.subscript(self.b, array, index)
            arrays.store(self.b, array, index, operators.binary(self.b, type(node.op), old, operand))
        else:
            self._unknown(node)

    def _return(self, node: ast.Return) -> None:
        value = None if node.value is None else as_value(self.evaluate(node.value))
        kind = None if value is None else value.kind
        if self.has_returned and kind != self.result_kind:
            raise CompileError(f"results of type {self.result_kind} and {kind}")
        self.has_returned, self.result_kind = True, kind
        if value is not None and kind is not None:
            for part, pointer in zip(value.parts, self._result_parts(self.compiled.args[0], kind), strict=True):
                self.b.store(part, pointer)
        self.b.ret_void()

    def _if(self, node: ast.If) -> None:
        b, test = self.b, self.test(node.test)
        if isinstance(test, bool):
            self.run(node.body if test else node.orelse)
            return
        starts, after = [b.append_basic_block("then"), b.append_basic_block("else")], b.append_basic_block("after")
        b.cbranch(test, *starts)
        for start, statements in zip(starts, (node.body, node.orelse), strict=True):
            b.position_at_end(start)
            self.run(statements)
            if not b.block.is_terminated:
                b.branch(after)
        b.position_at_end(after)

    def _while(self, node: ast.While) -> None:
        b = self.b
        condition, body, after = (b.append_basic_block(name) for name in ("while", "body", "after"))
        b.branch(condition)
        b.position_at_end(condition)
        test = self.test(node.test)
        if isinstance(test, bool):
            b.branch(body if test else after)
        else:
            b.cbranch(test, body, after)
        self._run_body(node, body, condition, after)
        b.position_at_end(after)

    def _run_body(self, node: ast.While | ast.For, body: Any, next_round: Any, after: Any) -> None:
        """Generates a loop's body in a block, which goes on to `next_round`."""
        if node.orelse:
            raise CompileError("a loop has no else")
        self.b.position_at_end(body)
        self.loops.append((next_round, after))
        self.run(node.body)
        self.loops.pop()
        if not self.b.block.is_terminated:
            self.b.branch(next_round)

    def run_loop_body(self, node: ast.For, item: Any, after: Any = None) -> None:
        """Generates a loop's body for one item; `break` goes to `after`."""
        body, next_round = self.b.append_basic_block("body"), self.b.append_basic_block("next")
        self._assign_to(node.target, item)
        self.b.branch(body)
        self._run_body(node, body, next_round, after)
        self.b.position_at_end(next_round)

    def _continue(self, node: ast.Continue) -> None:
        self.b.branch(self.loops[-1][0])

    def _break(self, node: ast.Break) -> None:
        if self.loops[-1][1] is None:
            raise CompileError("a loop over a generator has no break")
        self.b.branch(self.loops[-1][1])

    def _for(self, node: ast.For) -> None:
        call = node.iter
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            arguments = [self.evaluate(argument) for argument in call.args]
            if call.func.id == "range":
                self._for_range(node, arguments)
                return
            if inspect.isgeneratorfunction(generator := self.evaluate(call.func)):
                InlinedGenerator(self, node, generator).run_with(arguments)
                return
        value = as_value(self.evaluate(call))
        if not isinstance(value.kind, Record):
            raise CompileError("a loop is over a range, or a tuple")
        b, after = self.b, self.b.append_basic_block("after")
        for item in items_of(value):
            self.run_loop_body(node, item, after)
        b.branch(after)
        b.position_at_end(after)

    def _for_range(self, node: ast.For, bounds: list[Any]) -> None:
        """A step is positive unless it is known to be negative."""
        b, step = self.b, bounds[2] if len(bounds) == 3 else 1
        start, stop = (0, bounds[0]) if len(bounds) == 1 else bounds[:2]
        end, width = convert(b, stop, INT).number, convert(b, step, INT).number
        counter = Variable(b, INT)
        counter.store(b, convert(b, start, INT))
        condition, body, next_round, after = (
            b.append_basic_block(name) for name in ("for", "body", "next", "after")
        )  # fmt: skip
        b.branch(condition)
        b.position_at_end(condition)
        is_downwards = isinstance(step, int) and step < 0
        b.cbranch(b.icmp_signed(">" if is_downwards else "<", counter.load(b).number, end), body, after)
        b.position_at_end(body)
        self._assign_to(node.target, counter.load(b))
        self._run_body(node, b.block, next_round, after)
        b.position_at_end(next_round)
        counter.store(b, number(INT, b.add(counter.load(b).number, width, flags=["nsw"])))
        b.branch(condition)
        b.position_at_end(after)


class InlinedGenerator(FunctionBody):
    """Generates a loop over a generator: the generator's code in the function of the loop, whose body it runs."""

    def __init__(self, outer: FunctionBody, loop: ast.For, generator: FunctionType) -> None:
        Expressions.__init__(self, outer.b, generator)
        self.module, self.tree, self.outer, self.loop = outer.module, syntax_tree(generator), outer, loop
        self.loops = []

    def _expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Yield) and node.value.value is not None:
            self.outer.run_loop_body(self.loop, self.evaluate(node.value.value))
        else:
            super()._expr(node)

    def _return(self, node: ast.Return) -> None:
        raise CompileError("a generator ends at its end")
