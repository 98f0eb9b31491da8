"""Measures the host's time of a step without a GPU: the real engine over launches and graphs that do nothing.

    python benchmarks/gpu/host_time.py [--rows 64] [--chunk 256] [--layers 32] [--steps 100]

The model has the layers and heads of Llama 3 8B, and few channels. Triton binds the arguments of its kernels as on a
GPU (they are compiled for sm_90); only the calls of the driver and of CUDA are left out. Captured work is run
once, at its capture. Prints one JSON object a line.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import machine
from common.options import parsed
from no_driver import NoDriver, install_no_driver
from workbench import ImmediateStream, Workbench, prompts, workbench

from plait.kernels.kv_cache import LayerCache
from plait.runtime.executor.gpu.stream import DeviceWork, PieceReplay

GOAL_MS = 1.0
MAX_MIXED_STEPS = 40
TOKEN_BYTES = 4096  # KV of a token in a layer


class NoStream(ImmediateStream):
    """Graphs do nothing; what is between them is run. Counts replays."""

    num_replays = 0

    def capture(self, work: DeviceWork) -> DeviceWork:
        work()
        return self._count

    def capture_pieces(self, work: Callable[[DeviceWork], None]) -> PieceReplay:
        work(lambda: None)

        def replay(between: Sequence[DeviceWork]) -> None:
            self._count()
            for launch in between:
                launch()
                self._count()

        return replay

    def _count(self) -> None:
        self.num_replays += 1


def overlapping_caches(
    kind: str, dtype: torch.dtype, layers: int, pages: int, num_kv_heads: int, head_dim: int, device: torch.device
) -> list[LayerCache]:
    """As `allocate_caches` for `kind` "auto", in the memory of one layer: no kernel reads or writes it."""
    slot, cache = num_kv_heads * head_dim, pages * num_kv_heads * head_dim
    shape, strides = (layers, 2, pages, num_kv_heads, head_dim), (slot, cache, slot, head_dim, 1)
    both = torch.empty(2 * cache + layers * slot, dtype=dtype).as_strided(shape, strides)
    return [LayerCache(layer[0], layer[1]) for layer in both]


def measured(step: Callable[[], None], count: int) -> tuple[list[float], list[float]]:
    """Seconds of `count` steps, and of the processor."""
    seconds, processor_seconds = [], []
    for _ in range(count):
        begun, processor_begun = time.perf_counter(), time.thread_time()
        step()
        seconds.append(time.perf_counter() - begun)
        processor_seconds.append(time.thread_time() - processor_begun)
    return seconds, processor_seconds


def main() -> None:
    arguments = parsed(__doc__, rows=64, chunk=256, layers=32, steps=100)
    no_driver = install_no_driver()
    from plait.kernels.triton.operators import triton_kernels

    stream = NoStream(torch.device("cpu"))
    caches = mock.patch("plait.runtime.executor.torch_runner.allocate_caches", overlapping_caches)
    with torch.inference_mode(), caches:
        bench = workbench(
            "llama-3-8b-narrow",
            "cpu",
            kernels=triton_kernels(torch.bfloat16),
            stream=stream,
            num_layers=arguments.layers,
            dtype="bfloat16",
            max_batch_rows=arguments.rows,
            max_batch_tokens=arguments.rows + arguments.chunk,
            kv_memory_bytes=(arguments.rows * 640 + arguments.chunk * 60) * arguments.layers * TOKEN_BYTES,
            prompt_lookup=False,  # all tokens are the same here
        )
        for prompt in prompts([64] * (arguments.rows - 1), 4096):
            bench.call(prompt, 1000)
        bench.call(prompts([64], 4096, 1)[0], 3 * arguments.steps)
        bench.until_decoding()
        gc.collect()
        gc.freeze()  # as the engine's process does
        for kind, count in (("decode", arguments.steps), ("mixed", min(arguments.steps, MAX_MIXED_STEPS))):
            if kind == "mixed":
                while len(bench.engine_loop.batch_scheduler.running) == arguments.rows:
                    bench.step()
                bench.call(prompts([arguments.chunk * 60], 4096, 2)[0], 2)
            measure_steps(bench, no_driver, stream, count, kind, arguments)
        bench.close()


def measure_steps(
    bench: Workbench, no_driver: NoDriver, stream: NoStream, count: int, kind: str, arguments: argparse.Namespace
) -> None:
    """Reports `count` steps behind a few others. Raises RuntimeError if they are not all of the kind."""
    steps = bench.steps
    assert steps is not None and steps.graphs is not None
    for _ in range(10):
        bench.step()
    launches, replays, piecewise = no_driver.num_launches, stream.num_replays, steps.num_piecewise
    seconds, processor_seconds = measured(bench.step, count)
    if steps.num_piecewise - piecewise != (count if kind == "mixed" else 0) or steps.graphs.num_late_captures:
        raise RuntimeError(f"not every step was {kind}, or a graph was captured late")
    name = f"{arguments.rows} rows" + (f", {arguments.chunk} of a prompt" if kind == "mixed" else "")
    machine.report(
        f"host time of a step, {name}",
        statistics.median(seconds) * 1e3,
        "ms",
        GOAL_MS,
        fastest=min(seconds) * 1e3,
        processor=statistics.median(processor_seconds) * 1e3,  # steadier where other processes run
        launches=(no_driver.num_launches - launches) / count,
        replays=(stream.num_replays - replays) / count,
    )


if __name__ == "__main__":
    main()
