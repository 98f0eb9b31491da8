"""The costs of pipeline parallelism on a CPU: `python benchmarks/pipeline_parallel.py`.

First the hand-over of hidden states from one stage to the next over gloo, then steps of the embedded model by torch: in
one process, and by two stages with and without micro-batches. Each kind of run is a process that waits while another
one measures; the rounds alternate.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from plait.runtime.batch.batch import Batch
from plait.runtime.batch.request import Request
from plait.runtime.config import engine_config
from plait.runtime.executor.distributed.process_group import ProcessGroup
from plait.runtime.executor.runner import LoadedRunner
from plait.runtime.executor.runner_factory import make_runner
from plait.runtime.kv_cache.sequence import Sequence
from plait.runtime.model_files.locate import locate_model
from plait.runtime.models.weight_split import Rank

ROUNDS = 7
HAND_OVERS = ((1, 576), (64, 576), (1024, 576), (1, 4096), (64, 4096), (1024, 4096))  # [tokens, hidden size] bfloat16
KINDS = {  # (pipeline_parallel_size, whether steps are divided)
    "one process": (1, False),
    "2 stages": (2, True),
    "2 stages, steps not divided": (2, False),
}
CONTEXT = 512
STEPS = {  # name: (rows, new tokens of each, tokens of context before them)
    "prompt of 256 tokens": (1, 256, 0),
    "prompt of 768 tokens": (1, 768, 0),
    "decode step of 1 row": (1, 1, CONTEXT),
    "decode step of 16 rows": (16, 1, CONTEXT),
    "decode step of 64 rows": (64, 1, CONTEXT),
}


def hand_over_times(index: int, rendezvous: str, rounds: int = 200) -> Iterator[tuple[int, int, float]]:
    """(tokens, hidden size, median seconds until the next stage has them and has answered with one row)."""
    group = ProcessGroup(Rank(index, 2), "cpu", rendezvous, num_stages=2)
    for tokens, size in HAND_OVERS:
        states, row, times = torch.zeros((tokens, size), dtype=torch.bfloat16), torch.zeros((1, size)), []
        for _ in range(rounds):
            began = time.perf_counter()
            if index == 0:
                group.send_to_next_stage(states)
            else:
                group.receive_from_previous_stage(states)
            group.last_stage_to_rank0(row)
            times.append(time.perf_counter() - began)
        yield tokens, size, statistics.median(times)
    group.close()


def compare_hand_overs() -> None:
    folder = tempfile.mkdtemp()
    rendezvous = str(Path(folder) / "rendezvous")
    child = os.fork()
    if child == 0:
        list(hand_over_times(1, rendezvous))
        os._exit(0)
    print("hidden states to the next stage and one row back: tokens x size, bytes, median time")
    for tokens, size, seconds in hand_over_times(0, rendezvous):
        print(f"{tokens:>5} x {size:<5} {2 * tokens * size:>10,} bytes  {seconds * 1e6:,.0f} us")
    os.waitpid(child, 0)


def batch_of(rows: int, count: int, context: int) -> Batch:
    batch = Batch(1 << 20)
    for row in range(rows):
        seq = Sequence(("", ""), np.arange(context + count) % 1000 + 5)
        seq.pages.extend(np.arange(context + count, dtype=np.int32) + row * (context + count))
        batch.add(Request(None, seq, 0, context + count - 1), context, count)
    return batch


def step_times(runner: LoadedRunner) -> Callable[[str], float]:
    def seconds(name: str) -> float:
        batch = batch_of(*STEPS[name])
        began = time.perf_counter()
        runner.argmax_tokens(runner.forward(batch))
        return time.perf_counter() - began

    return seconds


def serve_measurements(kind: str) -> None:
    """The process of one kind: measures the steps that it is told on the standard input."""
    stages, is_divided = KINDS[kind]
    config = engine_config(device="cpu", weights="bf16", max_pages=64 * 600, pipeline_parallel_size=stages)
    runner = make_runner(config, locate_model(None))[0]
    if stages > 1 and not is_divided:
        runner.micro_batch_ends = lambda arrays: [len(arrays.token_ids)]  # type: ignore[attr-defined]
    seconds = step_times(runner)
    for line in sys.stdin:
        print(seconds(line.strip()), flush=True)


def compare_steps() -> None:
    children = {
        kind: subprocess.Popen(
            [sys.executable, __file__, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        for kind in KINDS
    }

    def measure(kind: str, step: str) -> float:
        ours, theirs = children[kind].stdin, children[kind].stdout
        assert ours is not None and theirs is not None
        ours.write(f"{step}\n")
        return float(theirs.readline())

    for step in STEPS:
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(ROUNDS + 1):
            for kind in KINDS:
                seconds = measure(kind, step)
                if number:  # the first one warms up
                    times[kind].append(seconds)
        medians = {kind: statistics.median(values) for kind, values in times.items()}
        print(f"\n{step}:")
        for kind, median in medians.items():
            print(f"  {kind:<30} {median * 1e3:8.1f} ms  {median / medians['one process']:.2f} x", flush=True)
    for child in children.values():
        child.communicate()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve_measurements(sys.argv[1])
    else:
        compare_hand_overs()
        compare_steps()
