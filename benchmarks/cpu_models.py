"""Measures the packed CPU decoder on models of several sizes and forms, beside llama.cpp where that is installed.

    python benchmarks/cpu_models.py [--rows 1b:Q4_K_M,1b:Q4_0,8b:Q4_K_M] [--files a.gguf,b.gguf] [--llama PYTHON]
                                    [--repeat 3] [--folder DIR] [--beside NICE] [--steps]

A row is a shape of Llama's (270m, 1b, 3b, 8b), or of Qwen 3 with experts (moe), and a form: a GGUF type for all
matrices, or Q4_K_M, which mixes Q4_K and Q6_K as llama.cpp does. The file is made in `--folder` with random weights
and the embedded model's tokenizer; "embedded" among the files is the embedded model. Printed are tokens a second of
one stream, of a prompt of 512 and of 16 streams, the step alone; of one stream through the language and through HTTP
(`whole_way.py`), with the share of the step's that they keep (medians of three ratios, in turn); the gaps between
tokens in the first 10 s; the seconds to load, and the share of the reading limit that one stream reaches: the bytes
of the weights a token needs over the rate that this machine reads, measured in the same run. With packed weights from
an earlier run, loading maps them; PLAIT_PACKED_CACHE_GB=0 packs them each time. `--llama`: a Python with
xllamacpp, which takes a turn in each round. `--beside 19`: each engine is measured a second time in each
round beside a process of that nice value (0: a normal one) that counts on one of the processors; the share of the
first figures that is kept is printed too. Steps are averaged then, not their median taken, since the other process
delays only some of them. `--steps` prints the milliseconds of steps of several shapes instead. Run it with nothing
else on the machine.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from common.options import parsed
from common.steps import random_texts, step_batch
from random_models import make_file
from server_comparison.roofline import processor_name, read_bytes_per_s
from whole_way import WholeWay

from plait.runtime.config import engine_config
from plait.runtime.executor.packed_cpu_runner import PackedCpuRunner
from plait.runtime.executor.runner_factory import make_runner
from plait.runtime.model_files.locate import locate_model

PROMPT, STREAMS = 512, 16
SHAPES = [(1, 1, 100), (1, 1, 1000), (4, 1, 200), (16, 1, 200), (64, 1, 200), (1, 256, 256), (1, 256, 1024)]
FIRST_S = 10.0  # after a start, whose gaps are measured
BESIDE = " beside"
COLUMNS = ("model", "engine", "one stream", "language", "HTTP", "prompt of 512", "16 streams", "load")
Average = Callable[[list[float]], float]
LLAMA_CPP = Path(__file__).with_name("llama_cpp_speed.py")


class Figures(NamedTuple):
    """Tokens a second, the seconds to load, and the share of the reading limit. 0: not measured."""

    one: float
    language: float
    http: float
    prompt: float
    many: float
    load: float
    share: float


def main() -> None:
    folder = Path(tempfile.gettempdir()) / "plait-cpu-models"
    more = {"folder": folder, "beside": -1, "steps": False}
    options = parsed(__doc__, rows="1b:Q4_K_M,1b:Q4_0,1b:Q8_0", files="", llama=None, repeat=3, **more)
    options.folder.mkdir(parents=True, exist_ok=True)
    paths = [make_file(options.folder, *row.split(":")) for row in filter(None, options.rows.split(","))]
    files = filter(None, options.files.split(","))
    paths += [Path(locate_model(None) if file == "embedded" else file) for file in files]
    print(f"{processor_name()}, {len(os.sched_getaffinity(0))} processors\n")
    if options.steps:
        for path in paths:
            print_steps(path)
        return
    print_row(*COLUMNS, "of the reading limit")
    print_row(*["---"] * 9)
    for path in paths:
        rounds: dict[str, list[Figures]] = {}
        for _ in range(options.repeat):
            measure_round(path, options.llama, None, rounds)
            if options.beside >= 0:
                measure_round(path, options.llama, options.beside, rounds)
        medians = {name: Figures(*map(statistics.median, zip(*of, strict=True))) for name, of in rounds.items()}
        for name, (one, language, http, prompt, many, load, share) in medians.items():
            ways = [f"{rate:.1f} ({rate / (one or math.inf):.0%})" if rate else "-" for rate in (language, http)]
            rates = [f"{one:.1f} tok/s", *ways, f"{prompt:.0f} tok/s", f"{many:.1f} tok/s"]
            print_row(path.stem, name, *rates, f"{load:.1f} s", f"{share:.0%}")
            if name.endswith(BESIDE):
                pairs = zip(medians[name], medians[name.removesuffix(BESIDE)], strict=True)
                print_row("", "kept", *[f"{now / before:.0%}" if before else "-" for now, before in pairs][:5], "", "")


def print_row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def measure_round(path: Path, llama: str | None, nice: int | None, rounds: dict[str, list[Figures]]) -> None:
    """Measures each engine once, beside a busy process of the nice value `nice` if it is given."""
    with contextlib.nullcontext() if nice is None else busy_process(nice):
        suffix = "" if nice is None else BESIDE
        ours = measure_plait(path, statistics.median if nice is None else statistics.fmean)
        rounds.setdefault(f"plait{suffix}", []).append(ours)
        if llama:
            theirs = measure_llama(llama, path, limit=ours.share / ours.one)
            rounds.setdefault(f"llama.cpp{suffix}", []).append(theirs)


@contextlib.contextmanager
def busy_process(nice: int) -> Iterator[None]:
    """Runs a process that counts on the last processor, for at most ten minutes."""
    code = f"import os, time; os.nice({nice}); end = time.monotonic() + 600\nwhile time.monotonic() < end: pass"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        os.sched_setaffinity(process.pid, {max(os.sched_getaffinity(0))})
        yield
    finally:
        process.kill()
        process.wait()


def measure_llama(python: str, path: Path, limit: float) -> Figures:
    """Returns the row's figures of llama.cpp. `limit`: the seconds that reading the weights takes."""
    command = [python, str(LLAMA_CPP), str(path), str(len(os.sched_getaffinity(0)))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        print(f"llama.cpp ended with {done.returncode}: {done.stderr[-300:]}", file=sys.stderr)
        return Figures(*[0.0] * 7)
    one, prompt, many, load = map(float, done.stdout.split()[-4:])
    return Figures(one, 0.0, 0.0, prompt, many, load, one * limit)


def measure_plait(path: Path, average: Average) -> Figures:
    """Returns the row's figures of plait. `average`: of the times of steps."""
    start = time.perf_counter()
    runner = packed_runner(path, STREAMS * PROMPT)
    load = time.perf_counter() - start
    prompt = PROMPT / step_seconds(runner, 1, PROMPT, PROMPT, 3, average)
    one = step_seconds(runner, 1, 1, 200, 25, average)
    many = STREAMS / step_seconds(runner, STREAMS, 1, 200, 25, average)
    limit = weight_bytes(runner) / read_bytes_per_s(len(os.sched_getaffinity(0)))
    shares = []
    with WholeWay.started(str(path), FIRST_S) as way:
        print(f"{path.stem}: in the first {FIRST_S:g} s p99.9 / median and longest gap{way.gaps}", file=sys.stderr)
        for _ in range(3):
            step = step_seconds(runner, 1, 1, 200, 100, statistics.fmean)
            shares.append((way.language() * step, way.http() * step))
    language, http = map(statistics.median, zip(*shares, strict=True))
    return Figures(1 / one, language / one, http / one, prompt, many, load, limit / one)


def packed_runner(path: Path, max_pages: int) -> PackedCpuRunner:
    runner, _, _ = make_runner(engine_config(max_pages=max_pages), path)
    if not isinstance(runner, PackedCpuRunner):
        raise SystemExit(f"{path} is not packed on this machine; `plait check --model {path}` says why")
    return runner


def print_steps(path: Path) -> None:
    """Prints the median time of steps of several shapes."""
    runner = packed_runner(path, max(rows * length for rows, _, length in SHAPES))
    for rows, new, length in SHAPES:
        seconds = step_seconds(runner, rows, new, length, 30 if new == 1 else 6)
        text = f"{rows:3} rows of {new:3} tokens after {length - new:4}: {1e3 * seconds:7.2f} ms"
        print(f"{path.stem}, {text}, {rows * new / seconds:6.0f} tok/s", flush=True)


def step_seconds(
    runner: PackedCpuRunner, rows: int, new: int, length: int, steps: int, average: Average = statistics.median
) -> float:
    """Returns the average time of a step of `rows` requests with `new` new tokens of `length` each."""
    batch, times = step_batch(random_texts(rows, length), new, length - 1), []
    for _ in range(steps):
        start = time.perf_counter()
        runner.argmax_tokens(runner.forward(batch))
        times.append(time.perf_counter() - start)
    return average(times)


def weight_bytes(runner: PackedCpuRunner) -> int:
    """Returns the bytes of the packed weights that a token needs."""
    weights, experts = runner.model.weights, runner.model.weights.experts
    used = experts.experts_per_token / experts.num_experts if experts else 1.0
    attention = sum(part.data.nbytes for layer in weights.layers for part in (*layer.qkv, layer.output))
    mlp = sum(layer.gate_up.data.nbytes + layer.down.data.nbytes for layer in weights.layers)
    return attention + int(used * mlp) + weights.head.data.nbytes


if __name__ == "__main__":
    main()
