"""The machine code of each layout: compiled by LLVM when the layout first occurs, in about a second, and kept on disk.

These functions take addresses and integers only; `compiler.object_code` keeps their code.
"""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from llvmlite import ir

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.amx import HAS_AMX
from plait.kernels.cpu.compiler import object_code
from plait.kernels.cpu.gemm.int8_kernel import ProductArgs, generate_product
from plait.kernels.cpu.gemm.layouts import DOWN_LAYOUT, LAYOUTS, PackedLayout
from plait.kernels.cpu.gemm.panel_kernel import PassArgs, generate_dequantize, generate_output, generate_pass
from plait.kernels.cpu.gemm.prefetch_choice import prefetches


class LayoutKernel(NamedTuple):
    """The addresses of a layout's functions. All arguments are int64.

    `product` (address of `ProductArgs`), `dequantize` (tile, block, half, out), `multiply_pass` (address of
    `PassArgs`), `output` (tile, lane, blocks, out). Without AMX the middle two are empty.
    """

    product: int
    dequantize: int
    multiply_pass: int
    output: int


_LOCK = threading.Lock()


def layout_kernel(name: str) -> LayoutKernel:
    """Returns the functions of the layout `name`, compiled or from the cache on disk."""
    with _LOCK:
        return _load(name)


@cache
def _load(name: str) -> LayoutKernel:
    path = _cache_path(name)
    code = object_code.read(path)
    if code is None:
        code = _compile(_layout(name), object_code.target_machine())
        object_code.write(path, code)
    return LayoutKernel(*object_code.load(code, LayoutKernel._fields))


def _layout(name: str) -> PackedLayout:
    return DOWN_LAYOUT if name == DOWN_LAYOUT.name else LAYOUTS[name]


def _cache_path(name: str) -> Path | None:
    return object_code.cache_path(f"layout-{name}", prefetches())


def assembly(name: str) -> str:
    """Returns the assembly language of a layout's functions."""
    machine = object_code.target_machine()
    text: str = machine.emit_assembly(_optimized(_layout(name), machine))
    return text


def _compile(layout: PackedLayout, machine: Any) -> bytes:
    """Returns the object file of a layout's functions."""
    code: bytes = machine.emit_object(_optimized(layout, machine))
    return code


def _optimized(layout: PackedLayout, machine: Any) -> Any:
    """Returns the module of a layout's functions."""
    module = ir.Module(layout.name)
    b, (address,) = _begin(module, "product", 1)
    generate_product(b, layout, ProductArgs.at(b, address), prefetches())
    b.ret_void()
    b, arguments = _begin(module, "dequantize", 4)
    if HAS_AMX:
        generate_dequantize(b, layout, *arguments)
    b.ret_void()
    b, (address,) = _begin(module, "multiply_pass", 1)
    if HAS_AMX:
        generate_pass(b, layout, PassArgs(*(v.load(b, address, v.I64, 8 * i) for i in range(len(PassArgs._fields)))))
    b.ret_void()
    b, arguments = _begin(module, "output", 4)
    generate_output(b, layout, *arguments)
    b.ret_void()
    # Whether AMX's passes are as fast after few of LLVM's has not been measured.
    return (object_code.optimized if HAS_AMX else object_code.simplified)(module, machine)


def _begin(module: ir.Module, name: str, count: int) -> tuple[ir.IRBuilder, list[Any]]:
    """Begins a function of `count` int64."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [v.I64] * count), name)
    return ir.IRBuilder(function.append_basic_block("entry")), [*function.args]
