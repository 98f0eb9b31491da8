"""Calls of a form's functions (`form_kernels`) by their addresses, so that a step is compiled once for all forms."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.gemm.int8_kernel import ProductArgs


def _call(b: Any, address: Any, arguments: list[Any]) -> None:
    kind = ir.FunctionType(ir.VoidType(), [v.I64] * len(arguments))
    b.call(b.inttoptr(address, kind.as_pointer()), arguments)


@intrinsic  # type: ignore[untyped-decorator]
def call_product(context: Any, function: Any, arguments: Any) -> Any:
    """`int8_kernel.generate_product`; `arguments` are the fields of ProductArgs, all int64."""
    count = len(ProductArgs._fields)

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        memory = cgutils.alloca_once(b, ir.ArrayType(v.I64, count))
        for i in range(count):
            b.store(b.extract_value(values[1], i), cgutils.gep_inbounds(b, memory, 0, i))
        _call(b, values[0], [b.ptrtoint(memory, v.I64)])
        return context.get_dummy_value()

    return types.void(types.int64, types.UniTuple(types.int64, count)), generate


@intrinsic  # type: ignore[untyped-decorator]
def call_dequantize(context: Any, function: Any, tile: Any, block: Any, half: Any, out: Any) -> Any:
    """`panel_kernel.generate_dequantize`."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        _call(b, values[0], [*values[1:]])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@intrinsic  # type: ignore[untyped-decorator]
def call_dequantize_pair(
    context: Any,
    function: Any,
    tile: Any,
    half: Any,
    other_tile: Any,
    other_half: Any,
    block: Any,
    count: Any,
    out: Any,
) -> Any:
    """`panel_kernel.generate_dequantize_pair`."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        _call(b, values[0], [*values[1:]])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), generate


@intrinsic  # type: ignore[untyped-decorator]
def call_output(context: Any, function: Any, tile: Any, lane: Any, blocks: Any, out: Any) -> Any:
    """`panel_kernel.generate_output`."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        _call(b, values[0], [*values[1:]])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate
