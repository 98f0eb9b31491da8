"""Compiles the Triton kernels of the benchmarks without a GPU, so that a machine with one finds them in its cache.

    python benchmarks/gpu/compile_cache.py record launches.json           needs torch, and the GPU machine's Triton
    python benchmarks/gpu/compile_cache.py compile launches.json [FOLDER]   in the GPU machine's Python, without torch

`record` runs attention's cases and engines of one layer over launches that do nothing, and writes what Triton would
compile. `compile` compiles that for sm_90. Triton's keys depend on its version and on the build for one version of
Python. On the machine, FOLDER is the TRITON_CACHE_DIR, under the same absolute path, which Triton writes into it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
LOADED = (".cubin", ".json")  # of a kernel's files, what Triton needs to launch it


def record(file: Path, workloads: dict[str, Callable[[], None]]) -> None:
    """Writes what the workloads launch."""
    import torch
    import triton
    from no_driver import install_no_driver

    launches: dict[tuple[str, str, str], None] = {}

    def keep(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Triton's hook: keeps what would be compiled, and lets nothing be compiled or launched."""
        data = json.loads(compile["specialization_data"])
        data["options"].pop("extern_libs", None)  # paths of a machine; Triton fills them in
        launches[fn.module, fn.name, json.dumps(data)] = None
        return True

    install_no_driver()
    triton.knobs.runtime.jit_cache_hook = keep
    with torch.inference_mode():
        for name, workload in workloads.items():
            before = len(launches)
            workload()
            print(f"{name}: {len(launches) - before} more launches", flush=True)
    listed = [{"module": module, "name": name, "data": data} for module, name, data in launches]
    file.write_text(json.dumps({"triton": triton.__version__, "launches": listed}))
    print(f"{len(launches)} launches of Triton {triton.__version__}")


def run_attention() -> None:
    """Attention's cases in all tiles that the sweep tries."""
    import attention
    import machine

    machine.DEVICE = attention.DEVICE = "cpu"
    for case in map(attention.small_case, (*attention.CASES, *attention.MORE)):
        for blocks in (None, *attention.candidates(case)):
            layout, pages = attention.layout_of(case)
            q, layers = attention.inputs_of(case, pages)
            with attention.tile_forced(case, blocks), mock.patch.multiple(machine, captured=run_once, seconds_of=float):
                attention.step_seconds(case, layout, q, layers)


def run_once(call: Any) -> int:
    """In the place of a capture: runs the call. Returns what `float` takes in the place of a timing."""
    call()
    return 0


def run_engine(**settings: Any) -> None:
    """All graphs of an engine of the large model's shape, and steps with prompts, JSON and shared prefixes."""
    import torch
    from engine import SCHEMA
    from host_time import NoStream
    from torch.nn import functional
    from workbench import RandomCheckpoint, prompts, workbench

    from plait.constrained import JsonSchema
    from plait.kernels.triton.operators import triton_kernels

    def empty(self: Any, name: str, dtype: torch.dtype, device: Any) -> torch.Tensor:
        return torch.zeros(self.shapes[name], dtype=dtype, device=device)

    def no_product(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        return x.new_zeros((*x.shape[:-1], len(weight)))

    random, product = (
        mock.patch.object(RandomCheckpoint, "tensor", empty),
        mock.patch.object(functional, "linear", no_product),
    )
    with random, product, mock.patch.object(torch, "mm", lambda a, b, out: out):
        made = {"kernels": triton_kernels(torch.bfloat16), "stream": NoStream(torch.device("cpu")), "dtype": "bfloat16"}
        made |= {"max_batch_rows": 512, "max_pages": 100_000, "prompt_lookup": False}
        bench = workbench("llama-3-8b-one-layer", "cpu", **made, **settings)
        [shared] = prompts([9000], 4096, 9)
        texts = [*prompts([5, 300, 3000], 4096), *(shared + own for own in prompts([32] * 4, 4096, 3))]
        for number, text in enumerate(texts):
            bench.call(text, 8, JsonSchema(SCHEMA) if number == 0 else None, ignore_eos=number > 0)
        for _ in range(40):
            bench.step()
        bench.close()


WORKLOADS: dict[str, Callable[[], None]] = {
    "attention": run_attention,
    "bf16": run_engine,
    "int4": partial(run_engine, weights="int4"),
    "fp8": partial(run_engine, float8=True),
}


def replace_missing_torch() -> None:
    """Puts empty modules in the place of torch where it is not installed: the kernels' files import it."""
    if importlib.util.find_spec("torch") is not None:
        return
    for name in ("torch", "torch.nn", "torch.nn.functional"):
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = []
        module.__getattr__ = lambda attribute: type(attribute, (), {})  # type: ignore[method-assign]
    sys.modules["torch.nn"].functional = sys.modules["torch.nn.functional"]  # type: ignore[attr-defined]


def compile_all(file: Path, folder: Path) -> None:
    """Compiles recorded launches into Triton's cache in `folder`."""
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    import triton
    from no_driver import install_no_driver

    recorded = json.loads(file.read_text())
    if recorded["triton"] != triton.__version__:
        sys.exit(f"{file} is of Triton {recorded['triton']}, this is {triton.__version__}")
    install_no_driver()
    replace_missing_torch()
    begun = time.monotonic()
    for number, each in enumerate(recorded["launches"]):
        kernel = getattr(importlib.import_module(each["module"]), each["name"])
        kernel.preload(each["data"])
        if number % 20 == 19:
            print(f"{number + 1} of {len(recorded['launches'])}, {time.monotonic() - begun:.0f} s", flush=True)
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix not in LOADED:
            path.unlink()
    (folder / "made_with.json").write_text(json.dumps({"triton": triton.__version__, "python": sys.version}))
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{len(recorded['launches'])} kernels, {size / 1e6:.1f} MB in {folder}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("step", choices=("record", "compile"))
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path, nargs="?", help="of the cache (default /tmp/triton-cache)")
    arguments = parser.parse_args()
    sys.path[:0] = [str(Path(__file__).parent), str(ROOT / ".path")]
    if arguments.step == "record":
        record(arguments.file, WORKLOADS)
    else:
        compile_all(arguments.file, (arguments.folder or Path("/tmp/triton-cache")).resolve())


if __name__ == "__main__":
    main()
