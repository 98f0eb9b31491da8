"""A whole engine over random weights, without files or sockets, for the engine's benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import reference_matmul
import torch
from machine import DRY
from reference_fused import REFERENCE_FUSED_OPERATORS
from synchronous_stream import ImmediateStream

from plait.constrained import CompilePool, Vocabulary
from plait.kernels.kernel_selection import select_kernels
from plait.kernels.layout import PrefixSharingCost
from plait.kernels.operators import Kernels
from plait.kernels.quantized_matrix import E4M3_NAN, Grid, e4m3_numbers
from plait.runtime.config import engine_config
from plait.runtime.errors import InputError
from plait.runtime.executor.gpu.step_launcher import GpuStepLauncher, make_gpu_step_launcher, prepare_device
from plait.runtime.executor.gpu.stream import Stream
from plait.runtime.executor.torch_runner import TorchRunner
from plait.runtime.messages import PROTOCOL, Append, Close, Failed, Finished, Generate, Open, Tokens, Welcome
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.registry import config_from_hf
from plait.runtime.sampling.sampler import Sampler
from plait.runtime.sampling.torch_ops import TorchLogitOperations
from plait.runtime.sampling_params import sampling_params
from plait.runtime.scheduler.engine_loop import EngineLoop
from plait.runtime.weights.checkpoint import expected_shapes

LLAMA = {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "hidden_act": "silu"}
LARGE = LLAMA | dict(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32)
LARGE |= dict(num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=16384, rope_theta=500000.0)
TINY = LLAMA | dict(vocab_size=1024, hidden_size=64, intermediate_size=96, num_hidden_layers=2, rope_theta=10000.0)
TINY |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096)
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": LARGE,
    "llama-3-8b-narrow": LARGE | dict(hidden_size=64, intermediate_size=96, head_dim=128),  # launches, little memory
    "llama-3-8b-one-layer": LARGE | dict(num_hidden_layers=1),  # the kernels of the large model
    "tiny": TINY,
}
DRY_MEMORY = 320 << 20  # bytes, of which the reserve takes 256 MB


class RandomCheckpoint:
    """Weights of the right shapes, made on the device."""

    container: Literal["safetensors"] = "safetensors"
    quantization: str | None = None

    def __init__(self, config: ModelConfig) -> None:
        self.config, self.shapes = config, expected_shapes(config)

    def names(self) -> tuple[str, ...]:
        return tuple(self.shapes)

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        shape = self.shapes[name]
        if "norm" in name:
            return torch.ones(shape, dtype=dtype, device=device)
        return torch.randn(shape, device=device, dtype=dtype) * 0.02

    def raw_blocks(self, name: str) -> Any:
        raise InputError("random weights have no raw blocks")

    def is_quantized(self, name: str) -> bool:
        return False

    def grid(self, name: str) -> Grid | None:
        return None

    def close(self) -> None:
        pass


class RandomFloat8Checkpoint(RandomCheckpoint):
    """The layers' matrices in fp8 with a scale per output, for activations in fp8; all else in 16 bits."""

    quantization: str | None = "fp8, a scale per output"

    def is_quantized(self, name: str) -> bool:
        return ".layers." in name and len(self.shapes[name]) == 2

    def grid(self, name: str) -> Grid | None:
        if not self.is_quantized(name):
            return None
        outputs, inputs = self.shapes[name]
        scale = 0.02 / np.nanstd(e4m3_numbers())
        return Grid("e4m3", np.full((outputs, 1), scale, np.float32), inputs)

    def codes(self, name: str, device: torch.device | str) -> torch.Tensor:
        codes = torch.randint(0, 256, self.shapes[name], dtype=torch.uint8, device=device)
        return codes.masked_fill_((codes & 0x7F) == E4M3_NAN, 0)


def random_vocabulary(size: int) -> Vocabulary:
    """All bytes, then words of printable letters; the last id ends a text."""
    generator = np.random.default_rng(0)
    tokens = dict.fromkeys(bytes([i]) for i in range(256))
    while len(tokens) < size - 1:
        word = bytes(generator.integers(97, 123, generator.integers(2, 9)).tolist())
        tokens[b" " + word if generator.random() < 0.5 else word] = None
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

    def take_disconnected(self) -> list[bytes]:
        return []

    def send(self, client: bytes, reply: Any) -> None:
        if isinstance(reply, Tokens):
            self.num_tokens += len(reply.token_ids)
        elif isinstance(reply, (Finished, Failed)):
            self.ends[reply.call] = reply


@dataclass
class Workbench:
    """`call` posts one; `finish` steps until all have ended. Numbers of calls count up."""

    runner: TorchRunner
    engine_loop: EngineLoop
    inbox: Inbox
    steps: GpuStepLauncher | None
    num_calls: int = 0

    def call(self, prompt: list[int], max_tokens: int, constraint: Any = None, **fields: Any) -> int:
        """A session of its own with one generation; greedy and past its end unless `fields` say otherwise."""
        params = sampling_params(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True} | fields)
        number = self.num_calls = self.num_calls + 1
        request = Generate(number, number, params, constraint)
        self.inbox.requests += [Open(number), Append(number, prompt), request, Close(number)]
        return number

    def step(self) -> None:
        self.engine_loop.step(timeout_s=0.001)

    def finish(self) -> None:
        """Steps until nothing is left, and raises for calls that failed."""
        while self.engine_loop.has_work or self.inbox.requests or self.engine_loop.calls.num_compiling:
            self.step()
        failed = [end for end in self.inbox.ends.values() if isinstance(end, Failed)]
        if failed:
            raise RuntimeError(f"{len(failed)} calls failed; the first: {failed[0].text}")

    def until_decoding(self) -> None:
        """Steps until every row brings one token."""
        rows = self.engine_loop.batch_scheduler
        while self.inbox.requests or rows.waiting or any(row.num_pending > 1 for row in rows.running):
            self.step()

    def flush(self) -> None:
        """No prefix is cached after it."""
        self.finish()
        self.engine_loop.cache.flush()
        self.inbox.ends.clear()
        self.inbox.num_tokens = 0

    def close(self) -> None:
        self.engine_loop.compiler.close()


def workbench(
    shape: str,
    device: str,
    *,
    kernels: Kernels | None = None,
    stream: Stream | None = None,
    num_layers: int | None = None,
    float8: bool = False,
    **settings: Any,
) -> Workbench:
    """The engine of one of SHAPES in bfloat16 (on a CPU float32, unless its `weights` are narrow).

    `kernels` and `stream` replace those of the device. `float8`: the checkpoint is stored in fp8.
    """
    has_quantized_weights = float8 or settings.get("weights", "bf16") != "bf16"
    dtype = "float32" if device == "cpu" and not has_quantized_weights else "bfloat16"
    config = engine_config(**{"device": device, "dtype": dtype} | settings)
    model = config_from_hf(SHAPES[shape] | ({"num_hidden_layers": num_layers} if num_layers else {}))
    if DRY and kernels is None:
        kernels, stream = dry_kernels(device, has_quantized_weights), ImmediateStream(torch.device(device))
    checkpoint = RandomFloat8Checkpoint(model) if float8 else RandomCheckpoint(model)
    with mock.patch("plait.runtime.executor.torch_runner.open_checkpoint", return_value=checkpoint):
        torch.manual_seed(0)
        runner = TorchRunner(config, Path("random weights"), kernels=kernels)
    vocabulary = random_vocabulary(model.vocab_size)
    compiler = CompilePool(vocabulary, deadline_s=30.0)
    compiler.start()
    inbox, steps = Inbox(), make_gpu_step_launcher(config, runner)
    if DRY and stream is not None and not (config.max_pages or config.kv_memory_bytes):
        steps = prepare_device(config, runner, DryMemory(runner), lambda: stream)
    elif stream is not None:
        steps = GpuStepLauncher(runner, config.max_batch_rows or 64, stream)
        steps.graphs.capture_all() if steps.graphs is not None else None
    welcome = Welcome(PROTOCOL, "", model.vocab_size, runner.max_session_tokens, 0)
    made = (Sampler(TorchLogitOperations(runner.device)), vocabulary, compiler, inbox, steps)
    return Workbench(runner, EngineLoop(config, welcome, runner, *made), inbox, steps)


class DryMemory:
    """A GPU's memory in a dry run: `DRY_MEMORY` bytes that only the KV pool takes."""

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner

    def free(self) -> int:
        return DRY_MEMORY - self._runner.num_pages * self._runner.page_bytes

    def total(self) -> int:
        return DRY_MEMORY

    def peak_of(self, work: Callable[[], None]) -> int:
        work()
        return 0


def dry_kernels(device: str, has_quantized_weights: bool) -> Kernels:
    """Plain operators in the place of a GPU's."""
    fused = replace(REFERENCE_FUSED_OPERATORS, prefix_sharing_cost=lambda shape, most: PrefixSharingCost(1, 0, 1, most))
    plain = select_kernels(torch.device(device), torch.float32)
    products = {"linear": reference_matmul.make_linear(), "dequantize_rows": reference_matmul.dequantize_rows}
    return replace(plain, fused=fused, supports_quantized_weights=has_quantized_weights, **products)


def prompts(lengths: Iterable[int], vocab: int, seed: int = 0) -> list[list[int]]:
    """Random tokens."""
    generator = np.random.default_rng(seed)
    return [generator.integers(256, vocab - 1, length).tolist() for length in lengths]
