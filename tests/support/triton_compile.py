"""Compiles for real, with no GPU, every kernel that an operator launches.

A case is a function that calls operators on `meta` tensors. Its launches are caught, not run: what is compiled is
what the operator would launch, and an operator that read a value back from the device would fail here. Runs in
child processes, because the tests' own process has Triton's interpreter on.

Use: a file with `CASES = {"name": Case(function, tensor_core=True), ...}`, then `compile_file(path)`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = (80, 90)
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}  # bytes a block may have, CUDA C++ Programming Guide, table of limits
WORKERS = 2


@dataclass(frozen=True)
class Case:
    """`tensor_core`: its matrix kernels must use the tensor cores. Names of kernels that need not are in `plain`."""

    call: Callable[[], Any]
    tensor_core: bool = False
    plain: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """One kernel compiled for one architecture."""

    case: str
    kernel: str
    arch: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    tensor_core: str  # "wgmma", "mma" or ""
    wants_tensor_core: bool

    def faults(self) -> list[str]:
        found = []
        if self.spilled_bytes:
            found.append(f"spills {self.spilled_bytes} bytes of registers")
        if self.shared_bytes > SHARED_LIMIT[self.arch]:
            found.append(f"needs {self.shared_bytes} bytes of shared memory")
        if self.wants_tensor_core and not self.tensor_core:
            found.append("does not use the tensor cores")
        return found


def compile_file(cases_file: str | Path) -> list[Report]:
    """Reports of all kernels that the file's cases launch, for each architecture."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    reports: list[Report] = []
    with tempfile.TemporaryDirectory() as cache:
        environment |= {"TRITON_CACHE_DIR": cache, "TRITON_ALWAYS_COMPILE": "1"}
        command = [sys.executable, "-P", __file__, str(cases_file)]
        children = [
            subprocess.Popen([*command, str(i)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for i in range(WORKERS)
        ]
        outputs = [child.communicate() for child in children]
    for child, (out, err) in zip(children, outputs, strict=True):
        if child.returncode:
            raise RuntimeError(f"the compilation failed:\n{err.decode()[-6000:]}")
        reports += [Report(**line) for line in json.loads(out)]
    return reports


# -- in the child -------------------------------------------------------------------------------------


@dataclass
class Launch:
    """One caught launch, ready to be compiled."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int], list[list[Any]]]
    options: dict[str, int]

    def key(self) -> str:
        return repr((self.kernel.__name__, self.signature, self.constants, self.attributes, self.options))


def _type_of(value: Any) -> str:
    """Triton's name of an argument's type, as its launcher would choose it."""
    import torch

    if isinstance(value, torch.Tensor):
        short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "bool": "i1", "uint8": "u8"}
        name = str(value.dtype).removeprefix("torch.")
        return "*" + short.get(name, name.replace("int", "i"))
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def _launch_of(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    import torch

    names = [param.name for param in kernel.params]
    options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in kwargs}
    bound = dict(zip(names, args, strict=False)) | kwargs
    launch = Launch(kernel, {}, {}, {}, options)
    for i, param in enumerate(kernel.params):
        value = bound.get(param.name, param.default)
        is_one = isinstance(value, int) and value == 1 and not param.do_not_specialize
        if param.is_constexpr or value is None or is_one:
            launch.signature[param.name] = "constexpr"
            launch.constants[param.name] = value
            continue
        launch.signature[param.name] = _type_of(value)
        whole = isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0)
        if whole and not param.do_not_specialize:
            launch.attributes[(i,)] = [["tt.divisibility", 16]]
    return launch


def _caught(call: Callable[[], Any]) -> list[Launch]:
    from triton.runtime.jit import JITFunction

    launches: dict[str, Launch] = {}

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        assert all(int(size) > 0 for size in grid), f"{self.__name__} launched with the grid {grid}"
        launch = _launch_of(self, args, kwargs)
        launches[launch.key()] = launch

    original, JITFunction.run = JITFunction.run, run
    try:
        call()
    finally:
        JITFunction.run = original
    return list(launches.values())


def _compile(case: str, launch: Launch, arch: int, wants_tensor_core: bool) -> Report:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.options)
    text = log.getvalue()
    registers, spills = re.search(r"Used (\d+) registers", text), re.search(r"(\d+) bytes spill stores", text)
    assert registers and spills, f"ptxas said nothing of registers: {text}"
    ptx = compiled.asm["ptx"]
    found = next((name for name in ("wgmma", "mma") if re.search(rf"\b{name}(\.mma_async)?\.sync", ptx)), "")
    return Report(
        case=case,
        kernel=launch.kernel.__name__,
        arch=arch,
        registers=int(registers[1]),
        spilled_bytes=int(spills[1]),
        shared_bytes=compiled.metadata.shared,
        tensor_core=found,
        wants_tensor_core=wants_tensor_core,
    )


def _main(cases_file: str, worker: int) -> None:
    import triton

    triton.knobs.nvidia.dump_ptxas_log = True
    spec = importlib.util.spec_from_file_location("cases", cases_file)
    assert spec and spec.loader
    sys.path.insert(0, str(Path(__file__).parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules["cases"] = module
    spec.loader.exec_module(module)
    todo: dict[str, tuple[str, Launch, bool]] = {}
    for name, case in module.CASES.items():
        for launch in _caught(case.call):
            wants = case.tensor_core and launch.kernel.__name__ not in case.plain
            todo.setdefault(launch.key(), (name, launch, wants))
    jobs = [(each, arch) for each in todo.values() for arch in ARCHITECTURES]
    reports = [_compile(name, launch, arch, wants) for (name, launch, wants), arch in jobs[worker::WORKERS]]
    print(json.dumps([asdict(report) for report in reports]))


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
