"""What LoRA adapters cost: a decoding step of 1, 4 and 16 adapters, and more adapters than the model holds at once.

    python benchmarks/adapters.py [--model MODEL] [--rank 16] [--steps 60]
    python benchmarks/adapters.py [--model MODEL] --registered 1000 [--rank 16] [--pairs 5]
                                  [--requests 200] [--seconds 10]

MODEL: a GGUF file or a folder; the embedded model by default. The adapters are random and change all linear layers.
The second form writes N adapters (of 16 bits; 10 MB each for rank 16 of the embedded model) into TMPDIR, of which 16
are held at once. Over alternating pairs of runs it reports
- the output tokens a second of 32 clients whose requests have adapters by Zipf's law (the n-th with weight 1/n), as a
  part of those of requests with one adapter;
- the 99th percentile of the time between two tokens of four streams while an adapter is read twice a second, as a
  multiple of that beside the same requests with adapters that are there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from common.options import parsed
from common.signals import unwind_on_signal
from common.steps import random_texts, step_batch
from safetensors.numpy import save_file

import plait
from plait.runtime.adapters.adapter import EMBEDDING, HEAD, modules_of
from plait.runtime.client.call import Call
from plait.runtime.config import engine_config
from plait.runtime.executor.runner_factory import make_runner
from plait.runtime.model_files.locate import locate_model
from plait.runtime.models.registry import FAMILIES_BY_NAME
from plait.runtime.sampling_params import sampling_params
from plait.runtime.weights.checkpoint import expected_shapes, open_checkpoint

NUM_ADAPTERS = 16
CONTEXT = 128  # tokens of a row
CLIENTS, OUTPUT, STREAMS = 32, 64, 4


def main() -> None:
    options = parsed(__doc__, model=None, rank=16, steps=60, registered=0, pairs=5, requests=200, seconds=10.0)
    unwind_on_signal()
    model, count = locate_model(options.model), options.registered or NUM_ADAPTERS
    with tempfile.TemporaryDirectory() as folder:
        paths: dict[str, str] = {}
        for number in range(count):
            paths[f"a{number}"] = write_adapter(Path(folder, f"a{number}"), model, options.rank, number)
            needed = count * sum(file.stat().st_size for file in Path(folder, "a0").iterdir())
            if not number and needed > shutil.disk_usage(folder).free / 2:
                sys.exit(f"{needed / 1e6:,.0f} MB are more than half of what is free; set TMPDIR, or lower the numbers")
        (compare_beyond_slots if options.registered else time_steps)(model, paths, options)


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


def time_steps(model: Path, adapters: dict[str, str], options: argparse.Namespace) -> None:
    """The first form."""
    runner, _, _ = make_runner(engine_config(max_pages=32 * CONTEXT, adapters=adapters), model)
    assert runner.adapter_pool is not None
    digests = list(runner.adapter_pool.names.values())
    print(f"{model.name}, rank {options.rank}, {type(runner).__name__}: milliseconds of a step, times that of none")
    for rows in (1, 16):
        texts = random_texts(rows, CONTEXT)
        steps = {"none": step_batch(texts, 1, CONTEXT - 1)}
        for count in (1, 4, NUM_ADAPTERS):
            of_rows = [digests[row % count] for row in range(rows)]
            steps[f"{count} adapters"] = step_batch(texts, 1, CONTEXT - 1, of_rows)
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(options.steps):
            for name, step in steps.items():
                began = time.perf_counter()
                runner.forward(step)
                seconds[name].append(time.perf_counter() - began)
        medians = {name: statistics.median(taken) for name, taken in seconds.items()}
        figures = (f"{name} {1e3 * median:.2f} ({median / medians['none']:.2f})" for name, median in medians.items())
        print(f"{rows:2} rows: {', '.join(figures)}")


class Traffic:
    """Requests with prompts of their own."""

    def __init__(self, runtime: plait.Runtime) -> None:
        self._client, self._random = runtime.client, random.Random(0)

    def ask(self, name: str, max_tokens: int) -> Call:
        session = self._client.open_session(adapter=name)
        session.append_tokens([self._random.randrange(100, 5000) for _ in range(32)])
        call = session.generate(sampling_params(max_tokens=max_tokens, ignore_eos=True, temperature=0))
        session.close()
        return call

    def ask_each(self, names: Sequence[str]) -> None:
        for name in names:
            self.ask(name, 1).result(600)

    def tokens_per_s(self, names: Sequence[str]) -> float:
        """Of CLIENTS clients that each wait for an answer before they ask again."""
        began = time.perf_counter()
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(lambda name: self.ask(name, OUTPUT).result(600).token_ids, names))
        return len(names) * OUTPUT / (time.perf_counter() - began)

    def p99_between_tokens(self, stream_name: str, name_of: Callable[[], str], seconds: float) -> float:
        """Milliseconds between two tokens of STREAMS streams, while another request begins twice a second."""
        streams, times = [self.ask(stream_name, 100_000) for _ in range(STREAMS)], list[list[float]]()
        for stream in streams:
            times.append([])
            stream.add_listener(partial(lambda stamps: stamps.append(time.perf_counter()), times[-1]))
        time.sleep(1.0)
        for stamps in times:
            stamps.clear()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self.ask_each([name_of()])
            time.sleep(0.5)
        for stream in streams:
            stream.abort()
        return float(np.percentile([1e3 * gap for stamps in times for gap in np.diff(stamps)], 99))


def compare_beyond_slots(model: Path, paths: dict[str, str], options: argparse.Namespace) -> None:
    """The second form."""
    names, draw, pauses, rates = list(paths), random.Random(0), list[float](), list[float]()
    weights = [1 / (place + 1) for place in range(len(names))]
    held, absent = names[:NUM_ADAPTERS], itertools.cycle(names[NUM_ADAPTERS:])
    with plait.Runtime(str(model), adapters=paths, max_adapters=NUM_ADAPTERS, progress=False) as runtime:
        traffic = Traffic(runtime)
        for _ in range(options.pairs):
            traffic.ask_each(held)
            present = itertools.cycle(held[1:])
            quiet, reading = (
                traffic.p99_between_tokens(held[0], partial(next, those), options.seconds)
                for those in (present, absent)
            )
            pauses.append(reading / quiet)
            print(f"p99 between tokens {quiet:.1f} ms, while adapters are read {reading:.1f} ms", flush=True)
        for _ in range(options.pairs):
            one = traffic.tokens_per_s(held[:1] * options.requests)
            many = traffic.tokens_per_s(draw.choices(names, weights, k=options.requests))
            rates.append(many / one)
            print(f"tokens/s with one adapter {one:.0f}, by Zipf {many:.0f}", flush=True)
    print(f"medians: throughput {statistics.median(rates):.2f}, p99 {statistics.median(pauses):.2f}")


if __name__ == "__main__":
    main()
