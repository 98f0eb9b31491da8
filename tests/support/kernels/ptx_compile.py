"""Compiles the kernels that operators launch for real GPUs, without a GPU.

A file of cases has `jobs()`: launches recorded as operators made them on `meta` tensors, each for one architecture. So
exactly what an operator launches is compiled, and an operator that reads a value back from the device fails here. What
`compiled_record` knows is not compiled again. The compilation runs in one child process, because the tests' own process
has Triton's interpreter enabled.

    reports = compile_file("tests/support/kernels/operator_launches.py")
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

sys.path.insert(0, str(Path(__file__).parent))  # not there in the child
import compiled_record

ARCHITECTURES = (80, 90)
SHARED_LIMIT = {
    80: 163 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
}  # bytes per thread block, CUDA C++ Programming Guide


@dataclass
class Launch:
    """One recorded launch, ready to be compiled."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int], list[list[Any]]]
    options: dict[str, int]

    def key(self) -> str:
        return repr((self.kernel.__name__, self.signature, self.constants, self.attributes, self.options))


@dataclass(frozen=True)
class Job:
    """A launch to compile."""

    case: str
    launch: Launch
    arch: int
    wants_tensor_core: bool  # whether it is a fault if the kernel uses no tensor cores


@dataclass(frozen=True)
class Report:
    """One kernel compiled for one architecture."""

    case: str
    kernel: str
    arch: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    tensor_core: str  # "wgmma", "tcgen05", "mma" or ""; "wgmma fp8" with float8 operands
    serialized: str  # the codes of ptxas' advice if it runs wgmma products one by one, such as "C7515"; else ""
    wants_tensor_core: bool
    copies_of_16: int = 0  # asynchronous copies of 16 bytes in the PTX
    copies_of_less: int = 0

    def faults(self) -> list[str]:
        faults = []
        if self.spilled_bytes:
            faults.append(f"spills {self.spilled_bytes} bytes of registers")
        if self.shared_bytes > SHARED_LIMIT[self.arch]:
            faults.append(f"needs {self.shared_bytes} bytes of shared memory")
        if self.wants_tensor_core and not self.tensor_core:
            faults.append("does not use the tensor cores")
        if self.serialized:
            faults.append(f"runs its products one by one ({self.serialized})")
        return faults


def compile_file(cases_file: str | Path) -> list[Report]:
    """Compiles the jobs of a file of cases; returns their reports in order. RuntimeError if the compilation fails."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as cache:
        environment |= {"TRITON_CACHE_DIR": cache, "TRITON_ALWAYS_COMPILE": "1", "TRITON_DISABLE_LINE_INFO": "1"}
        command = [sys.executable, "-P", __file__, str(cases_file)]
        child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if child.returncode:
        raise RuntimeError(f"the compilation failed:\n{child.stderr[-6000:]}")
    return [Report(**json.loads(line)) for line in child.stdout.splitlines()]


# -- in the child -------------------------------------------------------------------------------------


def record_launches(call: Callable[[], Any]) -> list[Launch]:
    """Returns what `call` launches, in order; identical launches once."""
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


def _type_of(value: Any) -> str:
    """Triton's name for the type of an argument, as its launcher chooses it."""
    import torch

    if isinstance(value, torch.Tensor):
        short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "bool": "i1", "uint8": "u8"}
        short["float8_e4m3fn"] = "fp8e4nv"
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
        is_aligned = isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0)
        if is_aligned and not param.do_not_specialize:
            launch.attributes[(i,)] = [["tt.divisibility", 16]]
    return launch


def compile_job(job: Job) -> Report:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    launch = job.launch
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        compiled = triton.compile(source, target=GPUTarget("cuda", job.arch, 32), options=launch.options)
    text, ptx = log.getvalue(), compiled.asm["ptx"]
    registers, spills = re.search(r"Used (\d+) registers", text), re.search(r"(\d+) bytes spill stores", text)
    assert registers and spills, f"no registers in the output of ptxas: {text}"
    patterns = {"wgmma": r"\bwgmma\.mma_async\.sync", "tcgen05": r"\btcgen05\.mma\b", "mma": r"\bmma\.sync"}
    kind = " fp8" if re.search(r"e4m3\.e4m3|kind::f8f6f4", ptx) else ""
    cores = (name + kind for name, pattern in patterns.items() if re.search(pattern, ptx))
    serialized = re.findall(r"\((C\d+)\)[^\n]*wgmma\.mma_async instructions are serialized", text)
    sizes = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], (?:0x)?(\w+)", ptx)
    copies_of_16 = sum(int(size, 16) in (0x10, 0x16) for size in sizes)
    return Report(
        case=job.case,
        kernel=launch.kernel.__name__,
        arch=job.arch,
        registers=int(registers[1]),
        spilled_bytes=int(spills[1]),
        shared_bytes=compiled.metadata.shared,
        tensor_core=next(cores, ""),
        serialized=" ".join(sorted(set(serialized))),
        wants_tensor_core=job.wants_tensor_core,
        copies_of_16=copies_of_16,
        copies_of_less=len(sizes) - copies_of_16,
    )


def jobs_of(cases_file: str | Path) -> list[Job]:
    """The jobs of a file of cases."""
    import triton

    triton.knobs.nvidia.dump_ptxas_log = True
    spec = importlib.util.spec_from_file_location("cases", cases_file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["cases"] = module
    spec.loader.exec_module(module)
    return list(module.jobs())


def _main(cases_file: str) -> None:
    for report in compiled_record.reports_of(jobs_of(cases_file), compile_job):
        print(json.dumps(asdict(report)), flush=True)


if __name__ == "__main__":
    sys.modules["ptx_compile"] = sys.modules["__main__"]  # the cases import it by its name
    _main(sys.argv[1])
