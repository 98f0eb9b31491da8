"""Calls of a layout's functions (`layout_kernels`) by their addresses: a step is compiled once for all layouts."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.compiler.intrinsics import Int, Ints, intrinsic
from plait.kernels.cpu.gemm.int8_kernel import ProductArgs
from plait.kernels.cpu.gemm.panel_kernel import PassArgs


def _call(b: Any, address: Any, arguments: list[Any]) -> None:
    kind = ir.FunctionType(ir.VoidType(), [v.I64] * len(arguments))
    b.call(b.inttoptr(address, kind.as_pointer()), arguments)


def _call_with_record(b: Any, address: Any, record: Any) -> None:
    """Calls a function with the address of a NamedTuple's fields, int64 side by side."""
    memory = v.allocate_on_stack(b, ir.ArrayType(v.I64, len(record)))
    for i, field in enumerate(record):
        b.store(field, b.gep(memory, [v.I64(0), v.I64(i)], inbounds=True))
    _call(b, address, [b.ptrtoint(memory, v.I64)])


@intrinsic
def call_product(b: Any, function: Int, arguments: Ints) -> None:
    """`int8_kernel.generate_product`; `arguments` are the fields of ProductArgs, all int64."""
    _call_with_record(b, function, ProductArgs(*arguments))


@intrinsic
def call_pass(b: Any, function: Int, arguments: Ints) -> None:
    """`panel_kernel.generate_pass`; `arguments` are the fields of PassArgs, all int64."""
    _call_with_record(b, function, PassArgs(*arguments))


@intrinsic
def call_dequantize(b: Any, function: Int, tile: Int, block: Int, half: Int, out: Int) -> None:
    """`panel_kernel.generate_dequantize`."""
    _call(b, function, [tile, block, half, out])


@intrinsic
def call_output(b: Any, function: Int, tile: Int, lane: Int, blocks: Int, out: Int) -> None:
    """`panel_kernel.generate_output`."""
    _call(b, function, [tile, lane, blocks, out])
