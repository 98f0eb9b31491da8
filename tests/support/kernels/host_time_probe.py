"""Runs benchmarks/gpu/host_time.py with a delay in every replay; then compares what the driver gets by two ways.

A script, because Triton's interpreter, which the tests use, cannot be turned off in a process. Takes the benchmark's
options, and the delay in ms from the environment's DELAY_MS. Prints one JSON object a line.
"""

from __future__ import annotations

import json
import os
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks/gpu"))

import host_time
import no_driver

from plait.kernels.kv_cache import LayerCache
from plait.kernels.layout import AttentionLayout, AttentionShape
from plait.kernels.operators import AttentionLayer
from plait.kernels.triton.attention import paged
from plait.kernels.triton.attention.layer_launches import LayerLaunches

HEADS, KV_HEADS, DIM = 32, 8, 128
CACHE_SHAPE = (2, 64, KV_HEADS, DIM)
DELAY_S = float(os.environ["DELAY_MS"]) / 1e3
sent: list[Any] = []  # (kernel, grid, arguments) of each launch, with addresses in the place of tensors
dispatched: list[Any] = []  # the kernels for which Triton searched the compiled one


class RecordingDriver(no_driver.NoDriver):
    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        launch = super().launcher_cls(source, metadata)

        def launch_and_record(*arguments: Any) -> None:
            launch(*arguments)
            values = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments[9:]]
            sent.append((id(arguments[4]), arguments[:3], values))

        return launch_and_record


def install() -> None:
    """Records launches; delays the replays of the steps that are measured."""
    measured, count, run = host_time.measured, host_time.NoStream._count, JITFunction.run
    delays = [0.0]

    def measure(*arguments: Any) -> Any:
        dispatched.clear()
        delays.append(DELAY_S)
        times = measured(*arguments)
        delays.pop()
        print(json.dumps({"dispatched": len(dispatched)}))
        return times

    def count_late(stream: host_time.NoStream) -> None:
        count(stream)
        time.sleep(delays[-1])

    def dispatch(kernel: Any, *arguments: Any, **options: Any) -> Any:
        dispatched.append(kernel)
        return run(kernel, *arguments, **options)

    host_time.measured, host_time.NoStream._count, JITFunction.run = measure, count_late, dispatch
    no_driver.NoDriver = RecordingDriver


def layer(first_element: int) -> AttentionLayer:
    """A layer whose caches are aligned to 16 bytes if `first_element` is 0."""
    size = torch.Size(CACHE_SHAPE).numel()
    memory = torch.zeros(first_element + size, dtype=torch.bfloat16)[first_element:]
    return AttentionLayer(LayerCache(*memory.view(CACHE_SHAPE)), DIM**-0.5)


def layout_of(q_starts: tuple[int, int, int]) -> AttentionLayout:
    """Two rows of 30 tokens."""
    arrays = (q_starts, (0, 30, 60), range(60), range(q_starts[2]), range(q_starts[2]))
    q_lens = q_starts[1], q_starts[2] - q_starts[1]
    tensors = [torch.tensor(list(values), dtype=torch.int32) for values in arrays]
    return AttentionLayout(*tensors, min_q_len=min(q_lens), max_q_len=max(q_lens))


def compare(layers: list[AttentionLayer], layout: AttentionLayout, num_kinds: int) -> None:
    """Raises AssertionError if repeated launches are not those that each layer makes, or are dispatched one by one."""
    planned = paged.with_plans(layout, AttentionShape(HEADS, KV_HEADS, DIM, torch.bfloat16))
    q = torch.zeros(len(layout.positions), HEADS, DIM, dtype=torch.bfloat16)
    out = torch.zeros_like(q)
    sent.clear()
    dispatched.clear()
    for each in layers:
        paged.attend(q, each, planned, out=out)
    expected, num_dispatched = list(sent), len(dispatched)
    sent.clear()
    dispatched.clear()
    for launch in LayerLaunches(layers)(q, planned, out):
        launch()
    assert sent == expected, (sent, expected)
    assert len(dispatched) == num_dispatched // len(layers) * num_kinds


def check_lifetime(layers: list[AttentionLayer], layout: AttentionLayout) -> None:
    """A plan that the first layer makes, because the layout has none, lives until the last layer is launched."""
    allocate, plans = paged.allocate_plan, []

    def allocate_plan(*arguments: Any, **options: Any) -> Any:
        plan = allocate(*arguments, **options)
        plans.append(weakref.ref(plan.partial_out))
        return plan

    paged.allocate_plan = allocate_plan
    q = torch.zeros(len(layout.positions), HEADS, DIM, dtype=torch.bfloat16)
    launches = LayerLaunches(layers)(q, replace(layout, plans=()), q)
    launches[0]()
    assert len(plans) == 1 and plans[0]() is not None


if __name__ == "__main__":
    install()
    host_time.main()
    compare([layer(0), layer(0)], layout_of((0, 1, 21)), 1)
    compare([layer(0), layer(1), layer(0)], layout_of((0, 1, 2)), 2)
    check_lifetime([layer(0), layer(0)], layout_of((0, 1, 2)))
    print(json.dumps({"compared": True}))
