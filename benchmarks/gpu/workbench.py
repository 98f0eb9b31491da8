"""A whole engine over random weights, without files or sockets: what the engine's benchmarks step and time.

Knows: how to put a scheduler together. Must not know: what is measured with it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
from machine import DRY

from plait.constrained import CompilePool, Vocabulary
from plait.kernels.fused import REFERENCE
from plait.kernels.layout import Sharing
from plait.kernels.select import select_kernels
from plait.runtime.config import engine_config
from plait.runtime.errors import InputError
from plait.runtime.gpu.logit_operations import TorchOperations
from plait.runtime.gpu.steps import GpuSteps, gpu_steps
from plait.runtime.gpu.stream import Direct
from plait.runtime.messages import PROTOCOL, Append, Close, Failed, Finished, Generate, Open, Tokens, Welcome
from plait.runtime.model_runner import ModelRunner
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.registry import from_hf
from plait.runtime.sampler import Sampler
from plait.runtime.sampling import sampling_params
from plait.runtime.scheduler.scheduler import Scheduler
from plait.runtime.weights.checkpoint import expected_shapes

LLAMA = {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "hidden_act": "silu"}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": LLAMA
    | dict(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, rope_theta=500000.0)
    | dict(num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=16384),
    "tiny": LLAMA
    | dict(vocab_size=1024, hidden_size=64, intermediate_size=96, num_hidden_layers=2, rope_theta=10000.0)
    | dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096),
}


class RandomCheckpoint:
    """Weights of the right shapes, made on the device."""

    container: Literal["safetensors"] = "safetensors"

    def __init__(self, config: ModelConfig) -> None:
        self.config, self.shapes = config, expected_shapes(config)

    def names(self) -> tuple[str, ...]:
        return tuple(self.shapes)

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        shape = self.shapes[name]
        if "norm" in name:
            return torch.ones(shape, dtype=dtype, device=device)
        return torch.randn(shape, device=device, dtype=dtype) * 0.02

    def raw(self, name: str) -> Any:
        raise InputError("random weights have no raw blocks")


def random_vocabulary(size: int) -> Vocabulary:
    """All bytes, then words of printable letters; the last id ends a text."""
    generator = np.random.default_rng(0)
    tokens = [bytes([i]) for i in range(256)]
    seen = set(tokens)
    while len(tokens) < size - 1:
        word = bytes(generator.integers(97, 123, generator.integers(2, 9)).tolist())
        word = b" " + word if generator.random() < 0.5 else word
        if word not in seen:
            seen.add(word)
            tokens.append(word)
    return Vocabulary((*tokens, b""), (size - 1,), lambda text: list(text.encode()))


class Inbox:
    """The scheduler's link: requests from a list; of what is sent, the ends and the number of tokens are kept."""

    num_bad_frames, num_clients = 0, 1

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.ends: dict[int, Finished | Failed] = {}
        self.num_tokens = 0

    def receive(self, timeout_s: float | None, wake_fds: list[int]) -> list[tuple[bytes, Any]]:
        taken, self.requests = self.requests, []
        if not taken and timeout_s:
            time.sleep(min(timeout_s, 0.001))
        return [(b"c", request) for request in taken]

    def gone(self) -> list[bytes]:
        return []

    def send(self, client: bytes, reply: Any) -> None:
        if isinstance(reply, Tokens):
            self.num_tokens += len(reply.token_ids)
        elif isinstance(reply, (Finished, Failed)):
            self.ends[reply.call] = reply


@dataclass
class Workbench:
    """`call` posts one; `step` until `idle`. Numbers of calls count up."""

    runner: ModelRunner
    scheduler: Scheduler
    inbox: Inbox
    steps: GpuSteps | None
    num_calls: int = 0
    compiled: list[Any] = field(default_factory=list)

    def call(self, prompt: list[int], max_tokens: int, constraint: Any = None, **fields: Any) -> int:
        """A session of its own with one generation; greedy and past its end unless `fields` say otherwise."""
        params = sampling_params(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True} | fields)
        number = self.num_calls = self.num_calls + 1
        request = Generate(number, number, params, constraint)
        self.inbox.requests += [Open(number), Append(number, prompt), request, Close(number)]
        return number

    def step(self) -> None:
        self.scheduler.step(timeout_s=0.001)

    @property
    def idle(self) -> bool:
        waiting = self.inbox.requests or self.scheduler.calls.num_compiling
        return not (self.scheduler.has_work or waiting)

    def finish(self) -> None:
        """Steps until nothing is left, and raises for calls that failed."""
        while not self.idle:
            self.step()
        failed = [end for end in self.inbox.ends.values() if isinstance(end, Failed)]
        if failed:
            raise RuntimeError(f"{len(failed)} calls failed; the first: {failed[0].text}")

    def until_decoding(self) -> None:
        """Steps until every row brings one token."""
        while (
            self.inbox.requests
            or self.scheduler.policy.waiting
            or any(row.num_pending > 1 for row in self.scheduler.policy.running)
        ):
            self.step()

    def flush(self) -> None:
        """No prefix is cached after it."""
        self.finish()
        self.scheduler.cache.flush()
        self.inbox.ends.clear()
        self.inbox.num_tokens = 0

    def close(self) -> None:
        self.scheduler.compiler.close()


def workbench(shape: str, device: str, **settings: Any) -> Workbench:
    """The engine of one of SHAPES in bfloat16 (on a CPU float32, unless its `weights` are narrow)."""
    narrow = settings.get("weights", "bf16") != "bf16"
    dtype = "float32" if device == "cpu" and not narrow else "bfloat16"
    config = engine_config(device=device, dtype=dtype, **settings)
    model = from_hf(SHAPES[shape])
    with mock.patch("plait.runtime.model_runner.open_checkpoint", return_value=RandomCheckpoint(model)):
        torch.manual_seed(0)
        fused = replace(REFERENCE, sharing=lambda shape, most: Sharing(1, 0, 1, most))
        plain = select_kernels(torch.device(device), torch.float32)
        kernels = replace(plain, fused=fused, has_narrow=narrow) if DRY else None
        runner = ModelRunner(config, Path("random weights"), kernels=kernels)
    vocabulary = random_vocabulary(model.vocab_size)
    compiler = CompilePool(vocabulary, deadline_s=30.0)
    compiler.start()
    inbox, steps = Inbox(), gpu_steps(config, runner)
    if DRY:  # the steps of a GPU, in its buffers, as if it were quick
        steps = GpuSteps(runner, config.max_batch_rows, Direct(runner.device))
        steps.graphs.capture_decode() if steps.graphs is not None else None
    welcome = Welcome(PROTOCOL, "", model.vocab_size, runner.max_session_tokens, 0)
    made = (Sampler(TorchOperations(runner.device)), vocabulary, compiler, inbox, steps)
    return Workbench(runner, Scheduler(config, welcome, runner, *made), inbox, steps)


def prompts(lengths: Iterable[int], vocab: int, seed: int = 0) -> list[list[int]]:
    """Random tokens."""
    generator = np.random.default_rng(seed)
    return [generator.integers(256, vocab - 1, length).tolist() for length in lengths]
