"""What LoRA adapters cost: a decoding step of 1, 4 and 16 adapters.

    python benchmarks/adapters.py [--model MODEL] [--rank 16] [--steps 60]

MODEL: a GGUF file or a folder; the embedded model by default. The adapters are random and change all linear layers.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from common.options import parsed
from common.steps import random_texts, step_batch
from safetensors.numpy import save_file

from plait.runtime.adapters.adapter import EMBEDDING, HEAD, modules_of
from plait.runtime.config import engine_config
from plait.runtime.executor.runner import LoadedRunner
from plait.runtime.executor.runner_factory import make_runner
from plait.runtime.model_files.locate import locate_model
from plait.runtime.models.registry import FAMILIES_BY_NAME
from plait.runtime.weights.checkpoint import expected_shapes, open_checkpoint

NUM_ADAPTERS = 16
CONTEXT = 128  # tokens of a row


def main() -> None:
    options = parsed(__doc__, model=None, rank=16, steps=60)
    model = locate_model(options.model)
    with tempfile.TemporaryDirectory() as folder:
        adapters = {f"a{i}": write_adapter(Path(folder, f"a{i}"), model, options.rank, i) for i in range(NUM_ADAPTERS)}
        runner, _, _ = make_runner(engine_config(max_pages=32 * CONTEXT, adapters=adapters), model)
    print(f"{model.name}, rank {options.rank}, {type(runner).__name__}: milliseconds of a step, times that of none")
    time_steps(runner, options.steps)


def write_adapter(folder: Path, model: Path, rank: int, seed: int) -> str:
    """A random adapter of all linear layers of a model."""
    rng, tensors = np.random.default_rng(seed), {}
    config = open_checkpoint(model).config
    shapes = expected_shapes(config)
    for module in modules_of(config, FAMILIES_BY_NAME[config.architecture]):
        if module in (EMBEDDING, HEAD):
            continue
        outputs, inputs = shapes[f"{module}.weight"]
        for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            values = 0.02 * rng.standard_normal(shape, np.float32)
            tensors[f"base_model.model.{module}.lora_{part}.weight"] = values.astype(np.float16)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return str(folder)


def time_steps(runner: LoadedRunner, num_steps: int) -> None:
    assert runner.adapter_pool is not None
    digests = list(runner.adapter_pool.names.values())
    for rows in (1, 16):
        texts = random_texts(rows, CONTEXT)
        steps = {"none": step_batch(texts, 1, CONTEXT - 1)}
        for count in (1, 4, NUM_ADAPTERS):
            of_rows = [digests[row % count] for row in range(rows)]
            steps[f"{count} adapters"] = step_batch(texts, 1, CONTEXT - 1, of_rows)
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(num_steps):
            for name, step in steps.items():
                began = time.perf_counter()
                runner.forward(step)
                seconds[name].append(time.perf_counter() - began)
        medians = {name: statistics.median(taken) for name, taken in seconds.items()}
        figures = (f"{name} {1e3 * median:.2f} ({median / medians['none']:.2f})" for name, median in medians.items())
        print(f"{rows:2} rows: {', '.join(figures)}")


if __name__ == "__main__":
    main()
