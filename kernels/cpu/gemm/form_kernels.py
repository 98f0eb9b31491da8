"""The machine code of each form: compiled by LLVM when the form first occurs, in about a second, and kept on disk.

These functions take addresses and integers only, so they need none of numba's calling convention. A file of the cache
holds a checksum and an object file, and is named by what the code depends on: the kernels' sources, the compiler, and
the processor. A file that cannot be read is compiled again.
"""

from __future__ import annotations

import contextlib
import os
import threading
import zlib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite
import llvmlite.binding as llvm
from llvmlite import ir

from plait.kernels.cpu import isa
from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.amx import HAS_AMX
from plait.kernels.cpu.compile_cache import SOURCE_HASH
from plait.kernels.cpu.gemm.forms import FORMS, Form
from plait.kernels.cpu.gemm.int8_kernel import ProductArgs, generate_product
from plait.kernels.cpu.gemm.panel_kernel import PassArgs, generate_dequantize, generate_output, generate_pass
from plait.kernels.cpu.parallel import thread_pool

CHECKSUM_BYTES = 4


class FormKernel(NamedTuple):
    """The addresses of a form's functions. All arguments are int64.

    `product` (address of `ProductArgs`), `dequantize` (tile, block, half, out), `multiply_pass` (address of
    `PassArgs`), `output` (tile, lane, blocks, out). Without AMX the middle two are empty.
    """

    product: int
    dequantize: int
    multiply_pass: int
    output: int


_LOCK = threading.Lock()
_ENGINES: list[Any] = []  # own the machine code, which is never freed


def form_kernel(name: str) -> FormKernel:
    """Returns the functions of the form `name`, compiled or from the cache on disk."""
    with _LOCK:
        return _load(name)


@cache
def _load(name: str) -> FormKernel:
    machine, path = _target_machine(), _cache_path(name)
    code = _read(path)
    if code is None:
        code = _compile(FORMS[name], machine)
        _write(path, code)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _ENGINES.append(engine)
    return FormKernel(*(engine.get_function_address(field) for field in FormKernel._fields))


def _target_machine() -> Any:
    cpu, features = isa.compile_target()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(
        cpu=cpu, features=features, opt=3, reloc="pic", codemodel="jitdefault", jit=True
    )


def assembly(name: str) -> str:
    """Returns the assembly language of a form's functions."""
    machine = _target_machine()
    text: str = machine.emit_assembly(_optimized(FORMS[name], machine))
    return text


def _compile(form: Form, machine: Any) -> bytes:
    """Returns the object file of a form's functions."""
    code: bytes = machine.emit_object(_optimized(form, machine))
    return code


def _optimized(form: Form, machine: Any) -> Any:
    """Returns the module of a form's functions."""
    module = ir.Module(form.name)
    b, (address,) = _begin(module, "product", 1)
    generate_product(b, form, ProductArgs(*(v.load(b, address, v.I64, 8 * i) for i in range(len(ProductArgs._fields)))))
    b.ret_void()
    b, arguments = _begin(module, "dequantize", 4)
    if HAS_AMX:
        generate_dequantize(b, form, *arguments)
    b.ret_void()
    b, (address,) = _begin(module, "multiply_pass", 1)
    if HAS_AMX:
        generate_pass(b, form, PassArgs(*(v.load(b, address, v.I64, 8 * i) for i in range(len(PassArgs._fields)))))
    b.ret_void()
    b, arguments = _begin(module, "output", 4)
    generate_output(b, form, *arguments)
    b.ret_void()
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(parsed, builder)
    return parsed


def _begin(module: ir.Module, name: str, count: int) -> tuple[ir.IRBuilder, list[Any]]:
    """Begins a function of `count` int64."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [v.I64] * count), name)
    return ir.IRBuilder(function.append_basic_block("entry")), [*function.args]


def _cache_path(name: str) -> Path | None:
    """Returns the file of a form's code, beside the other kernels; None without a cache."""
    folder = thread_pool.launch.stats.cache_path
    key = (SOURCE_HASH, llvmlite.__version__, *isa.compile_target())
    return None if folder is None else Path(folder) / f"form-{name}-{zlib.crc32(repr(key).encode()):08x}.o"


def _read(path: Path | None) -> bytes | None:
    """Returns the object file in a file of the cache; None if there is none, or it is damaged."""
    try:
        content = b"" if path is None else path.read_bytes()
    except OSError:
        return None
    code = content[CHECKSUM_BYTES:]
    return code if code and zlib.crc32(code).to_bytes(CHECKSUM_BYTES, "little") == content[:CHECKSUM_BYTES] else None


def _write(path: Path | None, code: bytes) -> None:
    """Writes a file of the cache, completely or not at all; without a folder that can be written, nothing."""
    if path is None:
        return
    temporary = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):  # the code is compiled again by the next process
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(zlib.crc32(code).to_bytes(CHECKSUM_BYTES, "little") + code)
        temporary.replace(path)
