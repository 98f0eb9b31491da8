"""Calls parts of the CPU kernels from Python: functions as the decoder's compiler makes them, and a layout's code.

@compiled_kernel
def update(scores, count):
    online_softmax.online_softmax_update(address_of(scores), count)

update(np.zeros(64, np.float32), 3)
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.compiler import object_code
from plait.kernels.cpu.compiler.functions import KernelModule
from plait.kernels.cpu.compiler.values import FLOAT64, INT, Array, Kind, Record
from plait.kernels.cpu.gemm.int8_kernel import ProductArgs
from plait.kernels.cpu.gemm.layout_kernels import LayoutKernel, layout_kernel
from plait.kernels.cpu.gemm.packed_weights import PackedWeight
from plait.kernels.cpu.kernel_types import QuantizedActivations

TILE = 32  # outputs of a tile


class CompiledKernel:
    """A function without a result, compiled once for the types of its arguments: numbers, arrays and tuples of them.

    The machine code is kept in the kernels' cache, for the text of the module: compiling takes most of a test's time.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._entries: dict[tuple[Kind, ...], Callable[..., None]] = {}
        self._texts: list[str] = []  # the modules of all that was compiled

    def __call__(self, *arguments: Any) -> None:
        kinds = tuple(_kind_of(argument) for argument in arguments)
        if kinds not in self._entries:
            self._entries[kinds] = self._compiled(kinds)
        self._entries[kinds](*(part for argument in arguments for part in _parts_of(argument)))

    def _compiled(self, kinds: tuple[Kind, ...]) -> Callable[..., None]:
        module = KernelModule(self._function.__name__)
        compiled, result = module.compiled(self._function, kinds)
        assert result is None, "a kernel has no result"
        entry = ir.Function(module.module, ir.FunctionType(ir.VoidType(), compiled.ftype.args[1:]), "entry")
        b = ir.IRBuilder(entry.append_basic_block())
        b.call(compiled, [v.I64(0).inttoptr(v.I8.as_pointer()), *entry.args])
        b.ret_void()
        text = str(module.module)
        self._texts.append(text)
        (address,) = object_code.load(_object_file(self._function.__name__, text), ("entry",))
        types = [ctypes.c_double if part == FLOAT64.llvm else ctypes.c_int64 for part in entry.ftype.args]
        return ctypes.PYFUNCTYPE(None, *types)(address)

    @property
    def assembly(self) -> str:
        """The assembly language of all that was compiled."""
        machine = object_code.target_machine()
        return "".join(machine.emit_assembly(object_code.optimized(text, machine)) for text in self._texts)


def compiled_kernel(function: Callable[..., None]) -> CompiledKernel:
    return CompiledKernel(function)


def _object_file(name: str, text: str) -> bytes:
    """The optimized object file of a module's text, compiled if no earlier run has done so."""
    path = object_code.cache_path(f"test-{name}", text)
    code = object_code.read(path)
    if code is None:
        machine = object_code.target_machine()
        code = machine.emit_object(object_code.optimized(text, machine))
        object_code.write(path, code)
    return code


def _kind_of(argument: Any) -> Kind:
    if isinstance(argument, np.ndarray):
        assert argument.flags.c_contiguous
        return Array(argument.dtype.name, argument.ndim)
    if isinstance(argument, tuple):
        return Record(type(argument), tuple(_kind_of(item) for item in argument))
    return FLOAT64 if isinstance(argument, float) else INT


def _parts_of(argument: Any) -> list[Any]:
    """The arguments of the machine code."""
    if isinstance(argument, np.ndarray):
        return [argument.ctypes.data, *argument.shape]
    if isinstance(argument, tuple):
        return [part for item in argument for part in _parts_of(item)]
    return [argument if isinstance(argument, float) else int(argument)]


def _call(address: int, *arguments: int) -> None:
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arguments))(address)(*arguments)


def product(weight: PackedWeight, x: QuantizedActivations, kernel: LayoutKernel | None = None) -> np.ndarray:
    """The product [rows, O] in int8, all tiles in one call."""
    rows, blocks = x.scales.shape
    out = np.full((rows, TILE * len(weight.data)), np.nan, np.float32)
    addresses = (x.scales.ctypes.data, x.block_sums.ctypes.data, x.half_sums.ctypes.data)
    args = ProductArgs(
        weight.address, weight.tile_bytes, len(weight.data), x.quants.ctypes.data, x.quants.strides[0], *addresses,
        blocks, out.ctypes.data, out.strides[0], 4 * TILE, rows,
    )  # fmt: skip
    memory = np.array(args, np.int64)
    _call((kernel or layout_kernel(weight.layout.name)).product, memory.ctypes.data)
    return out[:, : weight.outputs]


def unpacked(weight: PackedWeight, kernel: LayoutKernel | None = None) -> np.ndarray:
    """The weight [O, C] as the function that reads embeddings dequantizes it."""
    out = np.full((weight.outputs, weight.inputs), np.nan, np.float32)
    function = (kernel or layout_kernel(weight.layout.name)).output
    for row in range(weight.outputs):
        tile = weight.address + row // weight.layout.outputs * weight.tile_bytes
        _call(function, tile, row % weight.layout.outputs, weight.inputs // 32, out[row].ctypes.data)
    return out
