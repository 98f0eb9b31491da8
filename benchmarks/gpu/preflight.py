"""Checks a machine before the GPU benchmarks: every module that they import, its limits, a kernel and a small engine.

    python benchmarks/gpu/preflight.py [--parts kernels,engine] [--dry]

Prints one JSON object a line: {"machine": ...}, {"missing": {part: [module, ...]}}, {"limits": ...} and figures. All
missing modules are found before anything else runs. The limits are measured while nothing fills the memory.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import re
import shutil
import sys
import time
import tomllib
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KERNEL_MODULES = ("torch", "triton", "numpy")
ENGINE_MODULES = ("msgspec", "llguidance", "outlines_core", "jsonschema_rs", "interegular", "safetensors")
TEST_MODULES = ("pytest", "tokenizers", "jinja2")
# What the parts of a kind import, beyond Python's own modules.
MODULES: dict[str, tuple[str, ...]] = {
    "kernels": KERNEL_MODULES,
    "engine": KERNEL_MODULES + ENGINE_MODULES,
    "tests": KERNEL_MODULES + ENGINE_MODULES + TEST_MODULES,
    "compute-sanitizer": KERNEL_MODULES,
    "ncu": KERNEL_MODULES,
}
PROGRAMS = ("compute-sanitizer", "ncu")  # kinds that also need the program of their name
DISTRIBUTIONS = {"zmq": "pyzmq"}  # the others have the name of their module
DRY_MODULES = ("llvmlite",)  # what an engine on the CPU imports besides


def modules_of(kind: str, dry: bool) -> tuple[str, ...]:
    """Returns the modules of a kind of parts."""
    return MODULES[kind] + (DRY_MODULES if dry and kind != "kernels" else ())


def import_errors(modules: Iterable[str]) -> dict[str, str]:
    """Imports every module. Returns the error of those that cannot be imported."""
    errors = {}
    for module in dict.fromkeys(modules):
        try:
            importlib.import_module(module)
        except Exception as error:  # a broken package may raise anything
            errors[module] = f"{type(error).__name__}: {error}"[:200]
    return errors


def requirement(module: str) -> str:
    """Returns what pip is asked for: the package with the versions that plait supports."""
    name = DISTRIBUTIONS.get(module, module.replace("_", "-"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    for line in (*project["dependencies"], *(line for extra in extras for line in extra)):
        if re.split(r"[<>=~! ;\[]", line)[0] == name:
            return line.partition(";")[0].strip()
    return name


def machine_report() -> dict[str, str]:
    """Returns what the figures belong to."""
    found = {"python": platform.python_version(), "date": time.strftime("%Y-%m-%d"), "gpu": "none"}
    for name in KERNEL_MODULES:
        found[name] = str(getattr(sys.modules.get(name), "__version__", "missing"))
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = torch.cuda.get_device_name()
        found["gpu memory"] = f"{properties.total_memory / 2**30:.1f} GiB"
        found["cuda"] = str(torch.version.cuda)
    return found


def try_kernel() -> dict[str, Any]:
    """Compiles and runs one small kernel. Returns its figure; raises if its result is wrong."""
    import machine
    import reference_float32
    import torch

    from plait.kernels.triton import activation

    begun = time.perf_counter()
    gate_up = torch.randn(3, 64, device=machine.DEVICE).to(machine.DTYPE)
    found, expected = activation.silu_and_multiply(gate_up), reference_float32.silu_and_multiply(gate_up)
    error = float((found.float() - expected.float()).abs().max())
    if not error < 2e-2:
        raise RuntimeError(f"the kernel differs from its reference by {error}")
    return {"name": "preflight: a small kernel", "value": time.perf_counter() - begun, "unit": "s", "error": error}


def try_engine(device: str) -> dict[str, Any]:
    """Starts a small engine whose pool is fitted to the memory, and runs three calls. Returns its figure.

    On a GPU it has one layer of the large model, whose kernels later parts then find in Triton's cache.
    """
    from workbench import prompts, workbench

    begun = time.perf_counter()
    shape = "tiny" if device == "cpu" else "llama-3-8b-one-layer"
    with contextlib.closing(workbench(shape, device, max_batch_rows=4)) as bench:
        for prompt in prompts([5, 9, 3], bench.runner.config.vocab_size):
            bench.call(prompt, 6)
        bench.finish()
        tokens, pages = bench.inbox.num_tokens, bench.runner.num_pages
    if tokens != 18:
        raise RuntimeError(f"the engine gave {tokens} tokens instead of 18")
    seconds = time.perf_counter() - begun
    return {"name": "preflight: a small engine", "value": seconds, "unit": "s", "tokens": tokens, "pages": pages}


def checks(kinds: list[str], dry: bool) -> Iterator[dict[str, Any]]:
    """Yields the machine, what is missing, then a figure for each check that ran."""
    errors = import_errors(module for kind in kinds for module in modules_of(kind, dry))
    yield {"machine": machine_report()}
    missing = {kind: [name for name in modules_of(kind, dry) if name in errors] for kind in kinds}
    for kind in PROGRAMS:
        if kind in kinds and shutil.which(kind) is None:
            missing[kind].append(f"the program {kind}")
    yield {"missing": missing}
    if errors:
        print("missing; bring the wheels of: " + " ".join(f"'{requirement(name)}'" for name in errors), flush=True)
        for name, text in errors.items():
            print(f"  {name}: {text}", flush=True)
    if errors.keys().isdisjoint(KERNEL_MODULES):
        yield try_kernel()
        import machine

        yield {"limits": machine.limits()._asdict()}
        if "engine" in kinds and errors.keys().isdisjoint(modules_of("engine", dry)):
            yield try_engine("cpu" if dry else "cuda")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", default=",".join(MODULES), help="kinds of parts, with commas; all: %(default)s")
    parser.add_argument("--dry", action="store_true", help="the CPU and Triton's interpreter")
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    if arguments.dry:  # before triton is imported
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        for line in checks(arguments.parts.split(","), arguments.dry):
            print(json.dumps(line), flush=True)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
