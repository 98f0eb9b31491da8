"""Measures the Triton kernels other than attention against the GPU's copy bandwidth and matrix rate.

    python benchmarks/gpu/kernels.py [--only WORD] [--dry]

Each operator is captured in a CUDA graph and replayed (tests/gpu and tests/kernels/triton compare it with its
reference). Times are medians by CUDA events, with the L2 cache overwritten in between. `share` is the fraction of this
GPU's copy bandwidth, or of its bfloat16 matrix rate, both measured first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import machine
import torch
from machine import DEVICE, DRY, DTYPE

from plait.kernels import quantized_weights
from plait.kernels.coded_weights import weight_from_gguf
from plait.kernels.gguf_dequantize import GGUF_BLOCK_SHAPES
from plait.kernels.sampling_inputs import LogitAdjustments, RowMasks, SamplingInputs

FLUSH_BYTES = 1 if DRY else 256 << 20  # several times an H200's L2
FEW = 64  # tokens up to which a product is bound by its weights
Case = tuple[str, Callable[[], Any], float, float]  # name, call, bytes moved at least, floating point operations


def randn(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def row_cases() -> Iterator[Case]:
    from plait.kernels.triton import activation, norm

    width, inner = (64, 96) if DRY else (4096, 14336)
    for rows in (1, 3) if DRY else (1, 64, 8192):
        x, gate_up = randn(rows, width), randn(rows, 2 * inner)
        call = partial(norm.add_rms_norm, x, randn(rows, width), randn(width), 1e-5, out=torch.empty_like(x))
        yield f"residual + RMSNorm, {rows} x {width}", call, rows * width * 8, 0.0
        call = partial(activation.silu_and_multiply, gate_up, torch.empty_like(gate_up[:, :inner]))
        yield f"SwiGLU, {rows} x {inner}", call, rows * inner * 6, 0.0


def sampling_cases() -> Iterator[Case]:
    from plait.kernels.triton.sampling import logprobs, sampler

    kinds = {  # temperature, top_k, top_p, min_p
        "greedy": (0.0, -1, 1.0, 0.0),
        "plain": (1.0, -1, 1.0, 0.0),
        "top-k 50, top-p 0.9, min-p 0.05": (1.0, 50, 0.9, 0.05),
        "a flat nucleus": (4.0, -1, 0.9, 0.0),
    }
    for vocab, rows in ((500, 2),) if DRY else ((128_256, 1), (128_256, 64), (128_256, 256), (262_144, 64)):
        logits, indices = randn(rows, vocab) * 3, torch.arange(rows, device=DEVICE)
        words = torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), device=DEVICE).int()
        adjustments = LogitAdjustments(RowMasks(words, indices.int()))
        work, out = sampler.SamplingWorkspace.allocate(rows, vocab, logits.device), torch.empty_like(indices).int()
        for kind, (temperature, top_k, top_p, min_p) in kinds.items():
            t, p, m = (torch.full((rows,), value, device=DEVICE) for value in (temperature, top_p, min_p))
            k = torch.full((rows,), top_k, dtype=torch.int32, device=DEVICE)
            call = partial(sampler.sample, logits, SamplingInputs(t, k, p, m, indices, indices), adjustments, out, work)
            yield f"sampling, {kind}, masked, {rows} x {vocab}", call, rows * vocab * 2.125, 0.0
        yield f"top 20 logprobs, {rows} x {vocab}", partial(logprobs.top_logprobs, logits, 20), rows * vocab * 2, 0.0


def random_gguf_weight(name: str, outs: int, channels: int) -> Any:
    """Blocks of random bytes, but with a scale (and minimum) of 2^-12 in every block."""
    values, size = GGUF_BLOCK_SHAPES[name]
    blocks = torch.randint(0, 256, (outs * channels // values, size), dtype=torch.uint8, device=DEVICE)
    first, last = (0, 4) if name == "Q4_K" else (208, 210)
    blocks[:, first:last:2], blocks[:, first + 1 : last : 2] = 0x00, 0x0C
    return weight_from_gguf(blocks, name, (outs, channels))


def quantized_cases() -> Iterator[Case]:
    from plait.kernels.triton.linear import quantized_linear

    for outs, channels in ((64, 256),) if DRY else ((4096, 4096), (28672, 4096), (4096, 14336)):
        dense = randn(outs, channels, dtype=torch.float32)
        weights = {f"int4 group {group}": quantized_weights.quantize_int4(dense, group) for group in (32, 128)}
        weights |= {name: random_gguf_weight(name, outs, channels) for name in ("Q4_K", "Q6_K")}
        weights["int8"] = quantized_weights.quantize_int8(dense)
        for rows in (1, 20) if DRY else (1, 16, 64, 4096):
            x, flop = randn(rows, channels), 2.0 * rows * outs * channels
            for kind, weight in weights.items():
                size = sum(part.nbytes for part in vars(weight).values() if isinstance(part, torch.Tensor))
                call = partial(quantized_linear.linear, x, weight)
                yield f"{kind}, {rows} x {channels} -> {outs}", call, size if rows <= FEW else 0.0, flop


def expert_cases() -> Iterator[Case]:
    from plait.kernels.triton.linear import grouped_matmul as grouped

    for experts, top_k, hidden, inner in ((4, 2, 64, 32),) if DRY else ((128, 8, 2048, 768), (8, 2, 4096, 14336)):
        weights = randn(experts, 2 * inner, hidden)
        for tokens in (1, 5) if DRY else (1, 64, 4096):
            ids = torch.rand(tokens, experts, device=DEVICE).topk(top_k).indices.int().contiguous()
            name = f"{tokens} tokens, {top_k} of {experts} experts"
            route = partial(grouped.sort_by_expert, ids, experts, grouped.routing_block_size(ids.numel(), experts))
            call = partial(grouped.grouped_matmul, randn(tokens, hidden), weights, route(), top_k)
            size, flop = len(ids.unique()) * 4.0 * inner * hidden, 4.0 * ids.numel() * inner * hidden
            yield f"grouped product, {name}, {hidden} -> {2 * inner}", call, size if tokens <= FEW else 0.0, flop
            yield f"routing, {name}", route, ids.numel() * 8, 0.0


def main() -> None:
    arguments = machine.options(__doc__, only="")
    machine.require()
    torch.manual_seed(0)
    limits = machine.limits()
    flush, failures = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=DEVICE), 0
    for name, call, size, flop in chain(row_cases(), sampling_cases(), quantized_cases(), expert_cases()):
        if arguments.only in name:
            try:
                seconds = machine.seconds_of(machine.captured(call), flush.zero_)
            except Exception as failure:  # the other kernels may work
                machine.report_failure(name, failure)
                failures += 1
                continue
            least = size / limits.copy if size else flop / limits.bf16
            machine.report(name, least / seconds, "share", us=seconds * 1e6)
    if failures:
        raise SystemExit(f"{failures} operators failed")


if __name__ == "__main__":
    main()
