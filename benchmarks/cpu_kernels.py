"""Benchmarks the CPU's packed decoder alone: milliseconds of a step, and the perplexity of each weight format.

    python benchmarks/cpu_kernels.py [--model PATH] [--steps] [--perplexity] [--tokens 4096]

Steps are timed inside one process, without scheduler and sampler: the median, and the share of the limit that memory
bandwidth (`--read-gb-s`) or bfloat16 products (`--gflop-s`) set. Perplexity is that of Python's reference text
(`pydoc_data.topics`), in windows of 512 tokens, each format beside float32 of the same file.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

import numpy as np

from plait.runtime.batch.batch import Batch
from plait.runtime.batch.request import Request
from plait.runtime.config import engine_config
from plait.runtime.executor.packed_cpu_runner import PackedCpuRunner
from plait.runtime.executor.runner import LoadedRunner
from plait.runtime.executor.runner_factory import make_runner
from plait.runtime.kv_cache.radix_node import CacheNamespace
from plait.runtime.kv_cache.sequence import Sequence
from plait.runtime.model_files.locate import locate_model
from plait.runtime.tokenizer.tokenizer import load_tokenizer
from plait.runtime.torch_import import require_torch

if TYPE_CHECKING:  # the steps are timed without torch
    import torch

WINDOW = 512
FORMATS = [
    ("float32", dict(dtype="float32")),
    ("bf16", dict(dtype="bfloat16", weights="bf16")),
    ("as-stored", dict(dtype="bfloat16", weights="as-stored")),
    ("int8 KV", dict(dtype="bfloat16", weights="as-stored", kv_dtype="int8")),
    ("int8", dict(dtype="bfloat16", weights="int8")),
    ("int4", dict(dtype="bfloat16", weights="int4")),
]
SHAPES = [(1, 1, 100), (1, 1, 1000), (4, 1, 200), (16, 1, 200), (64, 1, 200), (1, 256, 256), (1, 256, 1024)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="a GGUF or a folder; default: the embedded model")
    parser.add_argument("--steps", action="store_true", help="measure only the times")
    parser.add_argument("--perplexity", action="store_true", help="measure only the perplexities")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the text that are read")
    parser.add_argument("--read-gb-s", type=float, default=47.0)
    parser.add_argument("--gflop-s", type=float, default=303.0)
    options = parser.parse_args()
    if not options.steps:
        require_torch("--perplexity")
    path = locate_model(options.model)
    if not options.perplexity:
        time_steps(path, options.read_gb_s, options.gflop_s)
    if not options.steps:
        perplexities(path, options.tokens)


def time_steps(path: Path, read_gb_s: float, gflop_s: float) -> None:
    """Prints the median time of steps of several shapes."""
    runner, _, _ = make_runner(engine_config(max_pages=16384), path)
    if not isinstance(runner, PackedCpuRunner):
        print("this machine or model has no packed decoder; steps run in torch")
    weight_bytes, flops = costs(runner)
    for rows, new, length in SHAPES:
        batch = Batch(1 << 20)
        for i in range(rows):
            seq = Sequence(CacheNamespace(), np.random.default_rng(i).integers(0, 1000, length).tolist())
            seq.pages.extend(np.arange(i * length, (i + 1) * length, dtype=np.int32))
            batch.add(Request(None, seq, 0, length - 1), length - new, new)
        times = []
        for _ in range(30 if new == 1 else 6):
            start = time.perf_counter()
            runner.logits(runner.forward(batch), {})
            times.append(time.perf_counter() - start)
        median = float(np.median(times))
        read_bytes = weight_bytes + rows * length * runner.page_bytes
        limit = max(read_bytes / read_gb_s / 1e9, rows * new * flops / gflop_s / 1e9)
        print(
            f"{rows:3} rows of {new:3} tokens after {length - new:4}: {median * 1e3:7.2f} ms, "
            f"{rows * new / median:6.0f} tok/s, {limit / median:4.0%} of the limit",
            flush=True,
        )


def costs(runner: LoadedRunner) -> tuple[int, int]:
    """Returns the bytes of the weights (bfloat16 ones if they are not packed) and the FLOPs of a token's products."""
    config = runner.config
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layers = config.num_layers * config.hidden_size * (heads + 3 * config.intermediate_size)
    if not isinstance(runner, PackedCpuRunner):
        return 2 * (layers + config.vocab_size * config.hidden_size), 2 * layers
    weights = runner.model.weights
    parts = [weight for layer in weights.layers for weight in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    return sum(part.data.size for part in [*parts, weights.head]), 2 * layers


def perplexities(path: Path, count: int) -> None:
    """Prints each format's perplexity, and its divergence from float32."""
    import torch

    text = "\n\n".join(topics[name] for name in sorted(topics) if len(topics[name]) > 4000)
    exact: torch.Tensor | None = None
    for name, settings in FORMATS:
        runner, _, _ = make_runner(engine_config(max_pages=WINDOW, max_batch_tokens=WINDOW, **settings), path)
        tokens = load_tokenizer(path, vocab_size=runner.config.vocab_size).encode_plain(text[: 8 * count])[:count]
        predicted = torch.cat([logprobs(runner, tokens[i : i + WINDOW]) for i in range(0, len(tokens), WINDOW)])
        chosen = predicted.gather(1, targets(tokens))
        exact = predicted if exact is None else exact
        divergence = (exact.exp() * (exact - predicted)).sum(-1).mean().item()
        agree = (exact.argmax(-1) == predicted.argmax(-1)).float().mean().item()
        print(
            f"{name:10} perplexity {math.exp(-chosen.mean().item()):7.4f}, from float32: "
            f"divergence {divergence:.5f} nats, the same first choice {agree:.2%}",
            flush=True,
        )


def targets(tokens: list[int]) -> torch.Tensor:
    """Returns [n, 1]: the token after each position, except the last of each window."""
    import torch

    windows = [tokens[i : i + WINDOW] for i in range(0, len(tokens), WINDOW)]
    return torch.tensor([token for window in windows for token in window[1:]])[:, None]


def logprobs(runner: LoadedRunner, tokens: list[int]) -> torch.Tensor:
    """Returns the log probabilities [len(tokens) - 1, V] of the token after each token of a text."""
    import torch

    seq = Sequence(CacheNamespace(), tokens)
    seq.pages.extend(np.arange(len(tokens), dtype=np.int32))
    batch = Batch(WINDOW)
    batch.add(Request(None, seq, 0, 0), 0, len(tokens))
    return torch.as_tensor(runner.logits(runner.forward(batch), {}))[:-1].log_softmax(-1)


if __name__ == "__main__":
    main()
