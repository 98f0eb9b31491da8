"""The device of a benchmark: timing of calls, and its limits: copy bandwidth and matrix rates.

With --dry everything runs once without a GPU, on the CPU and in Triton's interpreter, at tiny sizes. Import this module
before any that imports triton.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support" / "kernels"))  # the kernels' references
sys.path.append(str(Path(__file__).parents[1]))
DRY = "--dry" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
from common.options import parsed  # noqa: E402

DEVICE = "cpu" if DRY else "cuda"
DTYPE = torch.float16 if DRY else torch.bfloat16  # the interpreter has no bfloat16 products
REPEATS = 1 if DRY else 30
SIZE = 64 if DRY else 8192  # of the matrices whose products are timed


def mend_interpreter() -> None:
    """Lets kernels in Triton 3.6's interpreter loop to a number in an array [1], which numpy 2.4 makes no int.

    Newer versions of Triton do so themselves.
    """
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, *more: Any) -> None:
        original(tensor, *more)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch


if DRY:
    mend_interpreter()


def require() -> None:
    """Ends the program where there is neither a GPU nor --dry."""
    if not DRY and not torch.cuda.is_available():
        sys.exit("this benchmark needs an NVIDIA GPU, and torch sees none; --dry tries its code without one")


def report(name: str, value: float, unit: str, goal: float | None = None, **more: Any) -> None:
    """Prints a figure as all.py reads it. `ok` in `more`: whether the result was that of the reference."""
    print(json.dumps({"name": name, "value": value, "unit": unit, "goal": goal, **more}), flush=True)


def report_failure(case: str, error: Exception) -> None:
    """Prints that a case failed; the others may work."""
    traceback.print_exception(error)
    print(json.dumps({"failed": case, "error": f"{type(error).__name__}: {error}"[:300]}), flush=True)


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call as a CUDA graph's replay, compiled and warmed up before; fails if it waits for the device."""
    if DRY:
        call()
        return call
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def seconds_of(call: Callable[[], Any], before: Callable[[], Any] = lambda: None, repeats: int = REPEATS) -> float:
    """Median seconds of a call on the GPU, after a few to warm up; `before` runs before each and is not timed."""
    if DRY:
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun
    for _ in range(5):
        call()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in pairs:
        before()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in pairs)[repeats // 2] / 1e3


class Limits(NamedTuple):
    """What a GPU can do: bytes per second that a copy reads and writes, FLOP per second of products."""

    copy: float
    bf16: float
    fp8: float


@functools.cache
def limits() -> Limits:
    """Those that `--limits` hands down; else measured now, so first call it before anything fills the memory.

    The preflight of all.py measures them, and every part shares in the same ones.
    """
    if "--limits" in sys.argv:
        return Limits(*map(float, sys.argv[sys.argv.index("--limits") + 1].split(",")))
    require()
    found = Limits(copy_bandwidth(), matrix_rate(), float8_rate())
    if not DRY:
        torch.cuda.empty_cache()
    return found


def options(doc: str | None, **defaults: Any) -> argparse.Namespace:
    """The options of a script, `--dry` and `--limits COPY,BF16,FP8` (B/s and FLOP/s; default: measured) among them."""
    return parsed(doc, dry=False, limits=None, **defaults)


def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy of 2 GiB."""
    source = torch.zeros(1 << (20 if DRY else 31), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * len(source) / seconds_of(lambda: target.copy_(source))


def matrix_rate() -> float:
    """FLOP/s of a bf16 product of 8192 x 8192 matrices of random numbers."""
    a, b = (torch.randn(SIZE, SIZE, device=DEVICE, dtype=DTYPE) for _ in range(2))
    out = torch.empty_like(a)
    return 2.0 * SIZE**3 / seconds_of(lambda: torch.mm(a, b, out=out))


def float8_rate() -> float:
    """FLOP/s of products of fp8 with fp8: torch's, of 8192 x 8192 matrices; of bf16 on a GPU without such products."""
    if DRY or torch.cuda.get_device_capability() < (8, 9):
        return matrix_rate()
    a, b = (torch.randn(SIZE, SIZE, device=DEVICE).mul(64).clamp(-448, 448).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=DEVICE)
    product = partial(torch._scaled_mm, a, b.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    return 2.0 * SIZE**3 / seconds_of(product)


class CompilationCounter:
    """Counts the Triton kernels that are compiled, or loaded from the cache on disk, while it exists."""

    def __init__(self) -> None:
        import triton

        self.count = 0
        runtime = triton.knobs.runtime
        self._hook_before = getattr(runtime, "jit_post_compile_hook", None)
        runtime.jit_post_compile_hook = self._record

    def _record(self, **details: Any) -> Any:
        self.count += 1
        return self._hook_before(**details) if self._hook_before is not None else None
