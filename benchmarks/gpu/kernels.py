"""Measures the Triton kernels other than attention against the GPU's copy bandwidth and matrix rate.

    python benchmarks/gpu/kernels.py [--only WORD]

Each operator is first compared with its reference, then captured in a CUDA graph (which fails if the operator waits
for the device) and replayed. Times are medians by CUDA events, with the L2 cache overwritten in between. `share` is the
fraction of this GPU's copy bandwidth, or of its bfloat16 matrix rate, both measured first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import machine
import reference_experts
import reference_float32
import reference_matmul as matmul
import reference_sampling
import torch
from machine import DEVICE, DRY, DTYPE

from plait.kernels import quantized_weights
from plait.kernels.coded_weights import CodedWeight, weight_from_gguf
from plait.kernels.gguf_dequantize import GGUF_BLOCK_SHAPES
from plait.kernels.reference import ops
from plait.kernels.sampling_inputs import LogitAdjustments, RowMasks, SamplingInputs

FLUSH_BYTES = 1 if DRY else 256 << 20  # several times an H200's L2


@dataclass(frozen=True)
class Case:
    """`amount`: bytes moved at least (unit "B") or floating point operations (unit "FLOP") of one call."""

    name: str
    call: Callable[[], Any]
    expected: Callable[[], Any]
    amount: float
    unit: str
    tolerance: float = 2e-2  # of the largest value


def randn(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def row_cases() -> Iterator[Case]:
    from plait.kernels.triton import activation, norm

    width, inner = (64, 96) if DRY else (4096, 14336)
    for rows in (1, 3) if DRY else (1, 64, 8192):
        x, residual, weight = randn(rows, width), randn(rows, width), randn(width)
        out = torch.empty_like(x)
        yield Case(
            f"residual + RMSNorm, {rows} x {width}",
            lambda x=x, r=residual, w=weight, o=out: norm.add_rms_norm(x, r, w, 1e-5, out=o),
            # the call has already added x to the residual
            lambda r=residual, w=weight: ops.rms_norm(r, w, 1e-5),
            rows * width * 8,
            "B",
        )
        gate_up = randn(rows, 2 * inner)
        gated = torch.empty_like(gate_up[:, :inner])
        yield Case(
            f"SwiGLU, {rows} x {inner}",
            lambda g=gate_up, o=gated: activation.silu_and_multiply(g, o),
            lambda g=gate_up: reference_float32.silu_and_multiply(g),
            rows * inner * 6,
            "B",
        )


def sampling_rows(rows: int, **fields: float) -> SamplingInputs:
    filled = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, **fields}
    columns = {
        name: torch.full((rows,), value, dtype=torch.int32 if name == "top_k" else torch.float32, device=DEVICE)
        for name, value in filled.items()
    }
    indices = torch.arange(rows, device=DEVICE)
    return SamplingInputs(**columns, seed=indices, step=indices)


def sampling_cases() -> Iterator[Case]:
    from plait.kernels.triton.sampling import logprobs, sampler

    kinds: dict[str, dict[str, float]] = {
        "greedy": {"temperature": 0.0},
        "plain": {},
        "top-p 0.9": {"top_p": 0.9},
        "top-k 50, top-p 0.9, min-p 0.05": {"top_k": 50, "top_p": 0.9, "min_p": 0.05},
        "a flat nucleus": {"top_p": 0.9, "temperature": 4.0},
    }
    for vocab, rows in ((500, 2),) if DRY else ((128_256, 1), (128_256, 64), (128_256, 256), (262_144, 64)):
        logits = randn(rows, vocab) * 3
        words = torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), device=DEVICE).int()
        adjustments = LogitAdjustments(RowMasks(words, torch.arange(rows, device=DEVICE).int()))
        work = sampler.SamplingWorkspace.allocate(rows, vocab, logits.device)
        for kind, fields in kinds.items():
            inputs, out = sampling_rows(rows, **fields), torch.empty(rows, dtype=torch.int32, device=DEVICE)
            yield Case(
                f"sampling, {kind}, masked, {rows} x {vocab}",
                lambda g=logits, i=inputs, s=adjustments, o=out, w=work: sampler.sample(g, i, s, o, w),
                lambda g=logits, i=inputs, s=adjustments: reference_sampling.sample(g, i, s),
                rows * vocab * 2.125,
                "B",
                tolerance=0.0,
            )
        yield Case(
            f"top 20 logprobs, {rows} x {vocab}",
            lambda g=logits: logprobs.top_logprobs(g, 20)[0],
            lambda g=logits: reference_sampling.top_logprobs(g, 20)[0],
            rows * vocab * 2,
            "B",
            tolerance=1e-4,
        )


def random_gguf_weight(name: str, outs: int, channels: int) -> CodedWeight:
    """Blocks of random bytes, but with a scale (and minimum) of 2^-12 in every block."""
    values, size = GGUF_BLOCK_SHAPES[name]
    blocks = torch.randint(0, 256, (outs * channels // values, size), dtype=torch.uint8, device=DEVICE)
    first, last = (0, 4) if name == "Q4_K" else (208, 210)
    blocks[:, first:last:2], blocks[:, first + 1 : last : 2] = 0x00, 0x0C
    return weight_from_gguf(blocks, name, (outs, channels))


def quantized_cases() -> Iterator[Case]:
    from plait.kernels.triton.linear import coded_matmul, quantized_linear, quantized_matmul

    for outs, channels in ((64, 256),) if DRY else ((4096, 4096), (28672, 4096), (4096, 14336)):
        dense = randn(outs, channels, dtype=torch.float32)
        four = {group: quantized_weights.quantize_int4(dense, group) for group in (32, 128)}
        eight = quantized_weights.quantize_int8(dense)
        k_formats = {name: random_gguf_weight(name, outs, channels) for name in ("Q4_K", "Q6_K")}
        for rows in (1, 20) if DRY else (1, 16, 64, 4096):
            x = randn(rows, channels)
            small = rows <= 64
            for group, weight in four.items():
                yield Case(
                    f"int4 group {group}, {rows} x {channels} -> {outs}",
                    lambda x=x, w=weight: coded_matmul.coded_matmul(x, w),
                    lambda x=x, w=weight: matmul.coded_matmul(x, w),
                    outs * channels * (0.5 + 2 / group) if small else 2.0 * rows * outs * channels,
                    "B" if small else "FLOP",
                )
            for name, weight in k_formats.items():
                yield Case(
                    f"{name}, {rows} x {channels} -> {outs}",
                    lambda x=x, w=weight: quantized_linear.linear(x, w),
                    lambda x=x, w=weight: matmul.coded_matmul(x, w),
                    sum(t.nbytes for t in vars(weight).values() if isinstance(t, torch.Tensor))
                    if small
                    else 2.0 * rows * outs * channels,
                    "B" if small else "FLOP",
                )
            yield Case(
                f"int8, {rows} x {channels} -> {outs}",
                lambda x=x, w=eight: quantized_matmul.int8_matmul(x, w),
                lambda x=x, w=eight: matmul.int8_matmul(x, w),
                outs * channels if small else 2.0 * rows * outs * channels,
                "B" if small else "FLOP",
            )


def expert_cases() -> Iterator[Case]:
    from plait.kernels.triton.linear import grouped_matmul as grouped

    for experts, top_k, hidden, inner in ((4, 2, 64, 32),) if DRY else ((128, 8, 2048, 768), (8, 2, 4096, 14336)):
        weights = randn(experts, 2 * inner, hidden)
        for tokens in (1, 5) if DRY else (1, 64, 4096):
            ids = torch.rand(tokens, experts, device=DEVICE).topk(top_k).indices.int().contiguous()
            block = grouped.routing_block_size(ids.numel(), experts)
            x = randn(tokens, hidden)
            routing = grouped.sort_by_expert(ids, experts, block)
            used = len(set(ids.flatten().tolist()))
            few = tokens <= 64
            yield Case(
                f"grouped product, {tokens} tokens, {top_k} of {experts} experts, {hidden} -> {2 * inner}",
                lambda x=x, w=weights, r=routing, k=top_k: grouped.grouped_matmul(x, w, r, k),
                lambda x=x, w=weights, r=routing, k=top_k: reference_experts.grouped_matmul(x, w, r, k),
                used * 4.0 * inner * hidden if few else 4.0 * ids.numel() * inner * hidden,
                "B" if few else "FLOP",
            )
            yield Case(
                f"routing, {tokens} tokens, {top_k} of {experts} experts",
                lambda i=ids, e=experts, b=block: grouped.sort_by_expert(i, e, b).block_experts,
                lambda i=ids, e=experts, b=block: reference_experts.sort_by_expert(i, e, b).block_experts,
                ids.numel() * 8,
                "B",
                tolerance=0.0,
            )


def worst_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest value; for whole numbers the share that differ beyond one in 500."""
    if not found.is_floating_point():
        return max(0.0, float((found != expected).double().mean()) - 0.002)
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-9))


def measured(case: Case, limits: dict[str, float], flush: torch.Tensor, unit: str = "share") -> float | None:
    """Prints the share of a limit that a case reaches. Returns its microseconds; None if it failed or is wrong."""
    try:
        error = worst_error(case.call(), case.expected())
        seconds = machine.seconds_of(machine.captured(case.call), flush.zero_)
    except Exception as failure:  # the other kernels may work
        machine.report_failure(case.name, failure)
        return None
    is_right, share = error <= case.tolerance, case.amount / seconds / limits[case.unit]
    machine.report(case.name, share, unit, ok=is_right, error=error, us=seconds * 1e6)
    return seconds * 1e6 if is_right else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="only cases whose name holds this")
    parser.add_argument("--dry", action="store_true", help="small, once, without a GPU")
    machine.add_limits_option(parser)
    arguments = parser.parse_args()
    machine.require()
    torch.manual_seed(0)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=DEVICE)
    limits = {"B": machine.limits().copy, "FLOP": machine.limits().bf16}
    wrong = 0
    for cases in (row_cases, sampling_cases, quantized_cases, expert_cases):
        for case in cases():
            if arguments.only in case.name:
                wrong += measured(case, limits, flush) is None
    if wrong:
        raise SystemExit(f"{wrong} operators failed or differ from their reference")


if __name__ == "__main__":
    main()
