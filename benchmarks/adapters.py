"""What LoRA adapters cost: a decoding step of 1, 4 and 16 adapters, and more adapters than the model holds at once.

    python benchmarks/adapters.py [MODEL] [--rank 16] [--steps 60]
    python benchmarks/adapters.py [MODEL] --registered 1000 [--rank 16] [--pairs 5] [--requests 200] [--seconds 10]

MODEL: a GGUF file or a folder; the embedded model by default. The adapters are random and change all linear layers.
The second form writes N adapters (of 16 bits; 10 MB each for rank 16 of the embedded model), of which 16 are held at
once. They lie in a temporary folder, which is removed at the end, also by SIGTERM; it takes at most half of what is
free there (`TMPDIR` names another place). The report has, over alternating pairs of runs,
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
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
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


def write_adapter(folder: Path, model: Path, rank: int, seed: int, dtype: type[np.floating] = np.float32) -> str:
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
            tensors[f"base_model.model.{module}.lora_{part}.weight"] = values.astype(dtype)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return str(folder)


class Traffic:
    """Requests to a runtime of `names`, of which NUM_ADAPTERS are resident."""

    def __init__(self, runtime: plait.Runtime, names: Sequence[str], seed: int = 0) -> None:
        self._client, self.names, self._random = runtime.client, names, random.Random(seed)
        weights = [1 / (place + 1) for place in range(len(names))]
        self._cumulative = list(itertools.accumulate(weights))

    def by_zipf(self) -> str:
        """A name, drawn by Zipf's law."""
        return self._random.choices(self.names, cum_weights=self._cumulative)[0]

    def ask(self, name: str, max_tokens: int) -> Call:
        """Starts a request with a prompt of its own."""
        session = self._client.open_session(adapter=name)
        session.append_tokens([self._random.randrange(100, 5000) for _ in range(32)])
        call = session.generate(sampling_params(max_tokens=max_tokens, ignore_eos=True, temperature=0))
        session.close()
        return call

    def tokens_per_s(self, name_of: Callable[[], str], num_requests: int) -> float:
        """The output tokens a second of CLIENTS clients that each wait for an answer before they ask again."""
        began = time.perf_counter()
        with ThreadPoolExecutor(CLIENTS) as pool:
            for _ in pool.map(lambda _: self.ask(name_of(), OUTPUT).result(600), range(num_requests)):
                pass
        return num_requests * OUTPUT / (time.perf_counter() - began)

    def p99_between_tokens(self, name_of: Callable[[], str], seconds: float) -> float:
        """Milliseconds between two tokens of STREAMS streams with the first adapter, while another request begins
        twice a second."""
        streams = [self.ask(self.names[0], 100_000) for _ in range(STREAMS)]
        times = list[list[float]]()
        for stream in streams:
            stamps = list[float]()
            stream.add_listener(partial(lambda stamps: stamps.append(time.perf_counter()), stamps))
            times.append(stamps)
        time.sleep(1.0)
        for stamps in times:
            stamps.clear()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self.ask(name_of(), 1).result(600)
            time.sleep(0.5)
        for stream in streams:
            stream.abort()
        gaps = [1e3 * gap for stamps in times for gap in np.diff(stamps)]
        return float(np.percentile(gaps, 99))


def compare_beyond_slots(model: Path, options: argparse.Namespace) -> None:
    """The second form."""
    with tempfile.TemporaryDirectory() as folder:
        names, paths = [f"a{i}" for i in range(options.registered)], dict[str, str]()
        for number, name in enumerate(names):
            paths[name] = write_adapter(Path(folder, name), model, options.rank, number, np.float16)
            if not number:
                check_room(folder, sum(file.stat().st_size for file in Path(folder, name).iterdir()) * len(names))
        began = time.perf_counter()
        with plait.Runtime(str(model), adapters=paths, max_adapters=NUM_ADAPTERS, progress=False) as runtime:
            ready_s = time.perf_counter() - began
            print(f"{model.name}, rank {options.rank}, {len(names)} adapters: ready in {ready_s:.1f} s")
            traffic, absent = Traffic(runtime, names), itertools.cycle(names[NUM_ADAPTERS:])
            present = itertools.cycle(names[1:NUM_ADAPTERS])
            for name in names[:NUM_ADAPTERS]:
                traffic.ask(name, 1).result(600)
            pauses, rates = list[float](), list[float]()
            for _ in range(options.pairs):
                for name in names[1:NUM_ADAPTERS]:
                    traffic.ask(name, 1).result(600)
                beside = [
                    traffic.p99_between_tokens(partial(next, those), options.seconds) for those in (present, absent)
                ]
                pauses.append(beside[1] / beside[0])
                print(f"p99 between tokens {beside[0]:.1f} ms, while adapters are read {beside[1]:.1f} ms")
            for _ in range(options.pairs):
                one = traffic.tokens_per_s(lambda: names[0], options.requests)
                many = traffic.tokens_per_s(traffic.by_zipf, options.requests)
                rates.append(many / one)
                print(f"tokens/s with one adapter {one:.0f}, by Zipf {many:.0f}")
    print(f"medians: throughput {statistics.median(rates):.2f}, p99 {statistics.median(pauses):.2f}")


def check_room(folder: str, needed: int) -> None:
    """Ends the program if its files would take more than half of a disk's free space."""
    free = shutil.disk_usage(folder).free
    print(f"writing {needed / 1e6:,.0f} MB of adapters; {free / 1e6:,.0f} MB are free")
    if needed > free / 2:
        sys.exit("too many for this disk; set TMPDIR to a folder on a larger one, or lower --registered or --rank")


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--registered", type=int, metavar="N")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    if options.registered and options.registered <= NUM_ADAPTERS:
        parser.error(f"--registered is more than {NUM_ADAPTERS}")
    model = locate_model(options.model)
    if options.registered:
        compare_beyond_slots(model, options)
    else:
        time_steps(model, options)


def time_steps(model: Path, options: argparse.Namespace) -> None:
    """The first form."""
    with tempfile.TemporaryDirectory() as folder:
        adapters = {f"a{i}": write_adapter(Path(folder, f"a{i}"), model, options.rank, i) for i in range(NUM_ADAPTERS)}
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


if __name__ == "__main__":
    main()
