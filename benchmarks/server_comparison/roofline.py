"""The roofline of this machine and model: memory bandwidth, bfloat16 FLOP/s, and the lower bound of a workload's time.

A workload is bound by the slower of the two: every prompt token that must be computed costs its FLOPs, and every decode
step reads the weights once and each stream's keys and values. Weights count as the file stores them, keys and values
as two bytes per number, for all servers alike.
"""

from __future__ import annotations

import math
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from server_comparison.workloads import Done

from plait.runtime.torch_import import require_torch
from plait.runtime.weights.checkpoint import expected_shapes, open_checkpoint

READ_BYTES = 1 << 29
ROUNDS = 6


def processor_name() -> str:
    """Returns the name of this machine's processor, as far as the system tells it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


@dataclass(frozen=True)
class Machine:
    """Bytes and bfloat16 FLOPs per second, the best of `ROUNDS` measurements."""

    read_b_s: float
    bf16_flop_s: float
    threads: int


@dataclass(frozen=True)
class Model:
    """What a step reads and computes. `token_flop`: FLOPs per token in the layers; `head_flop`: of its logits."""

    weight_bytes: int
    parameters: int
    token_flop: float
    head_flop: float
    attention_flop: float  # per token and token of its context
    kv_bytes: int  # of one token

    def min_step_s(self, machine: Machine, width: int, context: float) -> float:
        """Returns the lower bound, in seconds, of a step with `width` decoding rows of `context` tokens each."""
        read_s = (self.weight_bytes + width * context * self.kv_bytes) / machine.read_b_s
        return max(read_s, width * (self.token_flop + self.head_flop) / machine.bf16_flop_s)

    def lower_bound_s(self, machine: Machine, done: Done) -> float:
        """Returns the lower bound, in seconds, of a workload whose steps are all full."""
        context = (done.prompt_tokens + done.out_tokens / 2) / len(done.answers)
        prompt_s = (
            done.uncached_prompt_tokens * (self.token_flop + self.attention_flop * context / 2) / machine.bf16_flop_s
        )
        steps = math.ceil(done.out_tokens / done.width)
        return prompt_s + steps * self.min_step_s(machine, done.width, context)


def describe(path: Path) -> Model:
    """Reads the sizes of the model in a GGUF file or a folder."""
    config = open_checkpoint(path).config
    sizes = {name: math.prod(shape) for name, shape in expected_shapes(config).items()}
    layers = sum(size for name, size in sizes.items() if ".layers." in name)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return Model(
        weight_bytes=sum(file.stat().st_size for file in files),
        parameters=sum(sizes.values()),
        token_flop=2.0 * layers,
        head_flop=2.0 * config.vocab_size * config.hidden_size,
        attention_flop=4.0 * config.num_layers * config.num_heads * config.head_dim,
        kv_bytes=config.num_layers * 2 * config.num_kv_heads * config.head_dim * 2,
    )


def measure() -> Machine:
    """Measures the machine for some seconds, in which nothing else should run. Raises InputError without torch."""
    require_torch("the roofline's rate of matrix products")
    import torch

    threads = torch.get_num_threads()
    return Machine(read_bytes_per_s(threads), _bf16_flops(), threads)


def read_bytes_per_s(threads: int) -> float:
    """Returns the rate at which so many threads together read memory, the best of `ROUNDS`."""
    parts, best = np.array_split(np.ones(READ_BYTES // 8, dtype=np.int64), threads), 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(ROUNDS):
            start = time.perf_counter()
            list(pool.map(np.sum, parts))
            best = max(best, READ_BYTES / (time.perf_counter() - start))
    return best


def _bf16_flops() -> float:
    import torch

    best = 0.0
    for rows, inner, columns in ((2048, 2048, 2048), (1024, 576, 3072), (1024, 1536, 576)):
        a, b = torch.ones(rows, inner, dtype=torch.bfloat16), torch.ones(columns, inner, dtype=torch.bfloat16)
        torch.nn.functional.linear(a, b)
        for _ in range(ROUNDS):
            start = time.perf_counter()
            for _ in range(4):
                torch.nn.functional.linear(a, b)
            best = max(best, 4 * 2.0 * rows * inner * columns / (time.perf_counter() - start))
    return best
