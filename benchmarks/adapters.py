"""What LoRA adapters cost a decoding step: rows of 1, 4 and 16 adapters against rows of none, alternating.

    python benchmarks/adapters.py [MODEL] [--rank 16] [--steps 60]

MODEL: a GGUF file or a folder; the embedded model by default. The adapters are random and change all linear layers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from plait.runtime.adapters.adapter import modules_of
from plait.runtime.batch.batch import Batch
from plait.runtime.batch.request import Request
from plait.runtime.config import engine_config
from plait.runtime.executor.runner_factory import make_runner
from plait.runtime.kv_cache.radix_node import CacheNamespace
from plait.runtime.kv_cache.sequence import Sequence
from plait.runtime.model_files.locate import locate_model
from plait.runtime.models.registry import FAMILIES_BY_NAME
from plait.runtime.weights.checkpoint import expected_shapes, open_checkpoint

NUM_ADAPTERS = 16
CONTEXT = 128  # tokens of a row


def write_adapter(folder: Path, model: Path, rank: int, seed: int) -> str:
    """A random adapter of all linear layers of a model."""
    rng, tensors = np.random.default_rng(seed), {}
    config = open_checkpoint(model).config
    shapes = expected_shapes(config)
    for module in modules_of(config, FAMILIES_BY_NAME[config.architecture]):
        outputs, inputs = shapes[f"{module}.weight"]
        for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            values = 0.02 * rng.standard_normal(shape, np.float32)
            tensors[f"base_model.model.{module}.lora_{part}.weight"] = values
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return str(folder)


def batch(rows: int, digest_of: Callable[[int], str]) -> Batch:
    """Rows that each decode their next token."""
    step = Batch(rows)
    for row in range(rows):
        seq = Sequence(CacheNamespace(adapter=digest_of(row)), [1 + row % 50] * CONTEXT)
        seq.pages.extend(np.arange(row * CONTEXT, (row + 1) * CONTEXT, dtype=np.int32))
        step.add(Request(None, seq, 0, CONTEXT - 1), CONTEXT - 1, 1)
    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    model = locate_model(options.model)
    with tempfile.TemporaryDirectory() as folder:
        adapters = {f"a{i}": write_adapter(Path(folder, f"a{i}"), model, options.rank, i) for i in range(NUM_ADAPTERS)}
        runner, _, _ = make_runner(engine_config(max_pages=32 * CONTEXT, adapters=adapters), model)
    digests = list(runner.adapters.values())
    print(f"{model.name}, rank {options.rank}, {type(runner).__name__}: milliseconds of a step, times that of none")
    for rows in (1, 16):
        steps = {"none": batch(rows, lambda row: "")}
        for count in (1, 4, NUM_ADAPTERS):
            steps[f"{count} adapters"] = batch(rows, lambda row, count=count: digests[row % count])
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(options.steps):
            for name, step in steps.items():
                began = time.perf_counter()
                runner.forward(step)
                seconds[name].append(time.perf_counter() - began)
        medians = {name: statistics.median(taken) for name, taken in seconds.items()}
        figures = (f"{name} {1e3 * median:.2f} ({median / medians['none']:.2f})" for name, median in medians.items())
        print(f"{rows:2} rows: {', '.join(figures)}")


if __name__ == "__main__":
    main()
