"""What this machine and model would allow: bytes read a second, bfloat16 products a second, and the time of a workload.

The limit of a workload is what the slower of the two leaves: every prompt token that must be computed costs its
products, every decoding step reads the weights once and each stream's keys and values. Weights count as the file
stores them, keys and values as two bytes, for every server alike.

Knows: arithmetic, one model's header. Must not know: servers.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import numba
import numpy as np
import torch
from server_comparison.workloads import Done

from plait.runtime.weights.checkpoint import expected_shapes, open_checkpoint

READ_BYTES = 1 << 29
ROUNDS = 6


@dataclass(frozen=True)
class Machine:
    """Bytes and floating-point operations a second, the best of a few rounds."""

    read_b_s: float
    bf16_flop_s: float
    threads: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Model:
    """What a step reads and computes. `token_flop`: a token's products in the layers; `head_flop`: its logits."""

    weight_bytes: int
    parameters: int
    token_flop: float
    head_flop: float
    attention_flop: float  # per token and per token before it
    kv_bytes: int  # of one token

    def min_step_s(self, machine: Machine, width: int, context: float) -> float:
        """The least seconds of a step of `width` decoding rows with `context` tokens each."""
        read = (self.weight_bytes + width * context * self.kv_bytes) / machine.read_b_s
        return max(read, width * (self.token_flop + self.head_flop) / machine.bf16_flop_s)

    def lower_bound_s(self, machine: Machine, done: Done) -> float:
        """The least seconds of a workload, its steps full."""
        context = (done.prompt_tokens + done.out_tokens / 2) / len(done.answers)
        prompts = (
            done.uncached_prompt_tokens * (self.token_flop + self.attention_flop * context / 2) / machine.bf16_flop_s
        )
        steps = math.ceil(done.out_tokens / done.width)
        return prompts + steps * self.min_step_s(machine, done.width, context)


def describe(path: Path) -> Model:
    """The model in a GGUF file or a folder."""
    config = open_checkpoint(path).config
    shapes = expected_shapes(config)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    head = config.vocab_size * config.hidden_size
    layers = sum(size for name, size in sizes.items() if ".layers." in name)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return Model(
        weight_bytes=sum(file.stat().st_size for file in files),
        parameters=sum(sizes.values()),
        token_flop=2.0 * layers,
        head_flop=2.0 * head,
        attention_flop=4.0 * config.num_layers * config.num_heads * config.head_dim,
        kv_bytes=config.num_layers * 2 * config.num_kv_heads * config.head_dim * 2,
    )


def measure() -> Machine:
    """Takes some seconds; nothing else should run."""
    threads = torch.get_num_threads()
    return Machine(_read(threads), _products(), threads)


def _read(threads: int) -> float:
    data = np.ones(READ_BYTES // 8, dtype=np.int64)
    parts = np.array_split(data, threads)
    _total(parts[0][:8])
    best = 0.0
    for _ in range(ROUNDS):
        team = [Thread(target=_total, args=(part,)) for part in parts]
        begun = time.perf_counter()
        for thread in team:
            thread.start()
        for thread in team:
            thread.join()
        best = max(best, READ_BYTES / (time.perf_counter() - begun))
    return best


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _total(values: np.ndarray) -> int:
    total = 0
    for value in values:
        total += value
    return total


def _products() -> float:
    best = 0.0
    for rows, inner, columns in ((2048, 2048, 2048), (1024, 576, 3072), (1024, 1536, 576)):
        a, b = torch.ones(rows, inner, dtype=torch.bfloat16), torch.ones(columns, inner, dtype=torch.bfloat16)
        torch.nn.functional.linear(a, b)
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            for _ in range(4):
                torch.nn.functional.linear(a, b)
            best = max(best, 4 * 2.0 * rows * inner * columns / (time.perf_counter() - begun))
    return best
