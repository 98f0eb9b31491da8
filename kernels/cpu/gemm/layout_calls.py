"""Calls of a layout's functions (`layout_kernels`) by their addresses: a step is compiled once for all layouts."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.compiler import signatures as types
from plait.kernels.cpu.compiler.intrinsics import intrinsic
from plait.kernels.cpu.gemm.int8_kernel import ProductArgs
from plait.kernels.cpu.gemm.panel_kernel import PassArgs


def _call(b: Any, address: Any, arguments: list[Any]) -> None:
    kind = ir.FunctionType(ir.VoidType(), [v.I64] * len(arguments))
    b.call(b.inttoptr(address, kind.as_pointer()), arguments)


def _call_with_record(count: int) -> Any:
    """Returns the type of a call whose `count` int64 are passed as the address of a record, and its generator."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        memory = v.allocate_on_stack(b, ir.ArrayType(v.I64, count))
        for i in range(count):
            b.store(b.extract_value(values[1], i), b.gep(memory, [v.I64(0), v.I64(i)], inbounds=True))
        _call(b, values[0], [b.ptrtoint(memory, v.I64)])
        return context.get_dummy_value()

    return types.void(types.int64, types.UniTuple(types.int64, count)), generate


def _call_with_four() -> Any:
    """Returns the type of a call with four int64 arguments, and its generator."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        _call(b, values[0], [*values[1:]])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@intrinsic
def call_product(context: Any, function: Any, arguments: Any) -> Any:
    """`int8_kernel.generate_product`; `arguments` are the fields of ProductArgs, all int64."""
    return _call_with_record(len(ProductArgs._fields))


@intrinsic
def call_pass(context: Any, function: Any, arguments: Any) -> Any:
    """`panel_kernel.generate_pass`; `arguments` are the fields of PassArgs, all int64."""
    return _call_with_record(len(PassArgs._fields))


@intrinsic
def call_dequantize(context: Any, function: Any, tile: Any, block: Any, half: Any, out: Any) -> Any:
    """`panel_kernel.generate_dequantize`."""
    return _call_with_four()


@intrinsic
def call_output(context: Any, function: Any, tile: Any, lane: Any, blocks: Any, out: Any) -> Any:
    """`panel_kernel.generate_output`."""
    return _call_with_four()
