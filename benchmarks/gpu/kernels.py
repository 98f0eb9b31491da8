"""How fast the Triton kernels other than attention are on this GPU, against what its memory and matrix units can do.

    python benchmarks/gpu/kernels.py [--only WORD] [--json FILE]

Each operator is first held against its reference, then captured in a CUDA graph (which fails if it waits for the
device) and replayed; times are medians by CUDA events, with the L2 cache overwritten in between. `share` is of this
GPU's own copy bandwidth, or of its bfloat16 matrix rate, both measured first.

Knows: the kernels and their references. Must not know: engines, models.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from plait.kernels import quantized, reference_fused, reference_matmul, reference_sampling
from plait.kernels.sampling_inputs import LogitShaping, RowMasks, SamplingInputs

REPEATS = 30
FLUSH_BYTES = 256 << 20  # several times an H200's L2


@dataclass(frozen=True)
class Case:
    """`amount`: bytes moved at least (unit "B") or floating point operations (unit "FLOP") of one call."""

    name: str
    call: Callable[[], Any]
    expected: Callable[[], Any]
    amount: float
    unit: str
    tolerance: float = 2e-2  # of the largest value


@dataclass(frozen=True)
class Result:
    name: str
    microseconds: float
    rate: float  # GB/s or TFLOP/s
    unit: str
    share: float
    worst_error: float
    ok: bool


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def row_cases() -> Iterator[Case]:
    from plait.kernels.triton import activation, norm

    for rows in (1, 64, 8192):
        x, residual, weight = randn(rows, 4096), randn(rows, 4096), randn(4096)
        out = torch.empty_like(x)
        yield Case(
            f"residual + RMSNorm, {rows} x 4096",
            lambda x=x, r=residual, w=weight, o=out: norm.add_rms_norm(x, r, w, 1e-5, out=o),
            # the call has already added x to the residual
            lambda r=residual, w=weight: reference_fused.rms_norm(r, w, 1e-5),
            rows * 4096 * 8,
            "B",
        )
        gate_up = randn(rows, 2 * 14336)
        gated = torch.empty_like(gate_up[:, :14336])
        yield Case(
            f"SwiGLU, {rows} x 14336",
            lambda g=gate_up, o=gated: activation.silu_and_multiply(g, o),
            lambda g=gate_up: reference_fused.silu_and_multiply(g),
            rows * 14336 * 6,
            "B",
        )


def sampling_rows(rows: int, **fields: float) -> SamplingInputs:
    filled = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, **fields}
    columns = [
        torch.full((rows,), filled[name], dtype=torch.int32 if name == "top_k" else torch.float32, device="cuda")
        for name in ("temperature", "top_k", "top_p", "min_p")
    ]
    return SamplingInputs(*columns, torch.arange(rows, device="cuda"), torch.arange(rows, device="cuda"))


def sampling_cases() -> Iterator[Case]:
    from plait.kernels.triton import logprobs, sampling

    kinds: dict[str, dict[str, float]] = {
        "greedy": {"temperature": 0.0},
        "plain": {},
        "top-p 0.9": {"top_p": 0.9},
        "top-k 50, top-p 0.9, min-p 0.05": {"top_k": 50, "top_p": 0.9, "min_p": 0.05},
        "a flat nucleus": {"top_p": 0.9, "temperature": 4.0},
    }
    for vocab, rows in ((128_256, 1), (128_256, 64), (128_256, 256), (262_144, 64)):
        logits = randn(rows, vocab) * 3
        words = torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), device="cuda").int()
        shaping = LogitShaping(RowMasks(words, torch.arange(rows, device="cuda").int()))
        work = sampling.SamplingWorkspace.allocate(rows, vocab, logits.device)
        for kind, fields in kinds.items():
            inputs, out = sampling_rows(rows, **fields), torch.empty(rows, dtype=torch.int32, device="cuda")
            yield Case(
                f"sampling, {kind}, masked, {rows} x {vocab}",
                lambda g=logits, i=inputs, s=shaping, o=out, w=work: sampling.sample(g, i, s, o, w),
                lambda g=logits, i=inputs, s=shaping: reference_sampling.sample(g, i, s),
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


def quantized_cases() -> Iterator[Case]:
    from plait.kernels.triton import quantized_matmul

    for outs, channels in ((4096, 4096), (28672, 4096), (4096, 14336)):
        dense = randn(outs, channels, dtype=torch.float32)
        four = {group: quantized.quantize_int4(dense, group) for group in (32, 128)}
        eight = quantized.quantize_int8(dense)
        for rows in (1, 16, 64, 4096):
            x = randn(rows, channels)
            small = rows <= 64
            for group, weight in four.items():
                yield Case(
                    f"int4 group {group}, {rows} x {channels} -> {outs}",
                    lambda x=x, w=weight: quantized_matmul.int4_matmul(x, w),
                    lambda x=x, w=weight: reference_matmul.int4_matmul(x, w),
                    outs * channels * (0.5 + 2 / group) if small else 2.0 * rows * outs * channels,
                    "B" if small else "FLOP",
                )
            yield Case(
                f"int8, {rows} x {channels} -> {outs}",
                lambda x=x, w=eight: quantized_matmul.int8_matmul(x, w),
                lambda x=x, w=eight: reference_matmul.int8_matmul(x, w),
                outs * channels if small else 2.0 * rows * outs * channels,
                "B" if small else "FLOP",
            )


def expert_cases() -> Iterator[Case]:
    from plait.kernels.triton import grouped_matmul as grouped

    for experts, top_k, hidden, inner in ((128, 8, 2048, 768), (8, 2, 4096, 14336)):
        weights = randn(experts, 2 * inner, hidden)
        for tokens in (1, 64, 4096):
            ids = torch.rand(tokens, experts, device="cuda").topk(top_k).indices.int().contiguous()
            block = grouped.routing_block(ids.numel(), experts)
            x = randn(tokens, hidden)
            routing = grouped.route(ids, experts, block)
            used = len(set(ids.flatten().tolist()))
            few = tokens <= 64
            yield Case(
                f"grouped product, {tokens} tokens, {top_k} of {experts} experts, {hidden} -> {2 * inner}",
                lambda x=x, w=weights, r=routing, k=top_k: grouped.grouped_matmul(x, w, r, k),
                lambda x=x, w=weights, r=routing, k=top_k: reference_matmul.grouped_matmul(x, w, r, k),
                used * 4.0 * inner * hidden if few else 4.0 * ids.numel() * inner * hidden,
                "B" if few else "FLOP",
            )
            yield Case(
                f"routing, {tokens} tokens, {top_k} of {experts} experts",
                lambda i=ids, e=experts, b=block: grouped.route(i, e, b).block_experts,
                lambda i=ids, e=experts, b=block: reference_matmul.route(i, e, b).block_experts,
                ids.numel() * 8,
                "B",
                tolerance=0.0,
            )


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """The call as a graph, compiled and warmed up before."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def median_seconds(run: Callable[[], Any], flush: torch.Tensor) -> float:
    times = []
    for _ in range(REPEATS):
        flush.zero_()
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        run()
        ended.record()
        ended.synchronize()
        times.append(begun.elapsed_time(ended) / 1e3)
    return statistics.median(times)


def measured_limits(flush: torch.Tensor) -> dict[str, float]:
    """This GPU's bytes per second of a copy, read and written, and bfloat16 FLOP/s of a large product."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = median_seconds(lambda: target.copy_(source), flush)
    a, b = randn(8192, 8192), randn(8192, 8192)
    torch.matmul(a, b)
    product = median_seconds(lambda: torch.matmul(a, b), flush)
    return {"B": 2 * source.numel() / copy, "FLOP": 2 * 8192**3 / product}


def worst_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest value; for whole numbers the share that differ beyond one in 500."""
    if not found.is_floating_point():
        return max(0.0, float((found != expected).double().mean()) - 0.002)
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-9))


def measure(case: Case, limits: dict[str, float], flush: torch.Tensor) -> Result:
    error = worst_error(case.call(), case.expected())
    seconds = median_seconds(captured(case.call).replay, flush)
    rate = case.amount / seconds
    scale, unit = (1e9, "GB/s") if case.unit == "B" else (1e12, "TFLOP/s")
    ok = error <= case.tolerance
    return Result(case.name, seconds * 1e6, rate / scale, unit, rate / limits[case.unit], error, ok)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="only cases whose name holds this")
    parser.add_argument("--json", type=Path, help="also write one JSON line per case to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here; these figures need one")
    torch.manual_seed(0)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    limits = measured_limits(flush)
    print(
        f"{torch.cuda.get_device_name()}: copy {limits['B'] / 1e9:.0f} GB/s, bf16 {limits['FLOP'] / 1e12:.0f} TFLOP/s"
    )
    lines, wrong = [], 0
    for cases in (row_cases, sampling_cases, quantized_cases, expert_cases):
        for case in cases():
            if arguments.only not in case.name:
                continue
            result = measure(case, limits, flush)
            wrong += not result.ok
            lines.append(json.dumps(asdict(result)))
            print(
                f"{result.name:72} {result.microseconds:9.1f} us {result.rate:9.1f} {result.unit:8}"
                f"{result.share:6.0%}  error {result.worst_error:.1e} {'' if result.ok else 'WRONG'}",
                flush=True,
            )
    print("\n".join(lines))
    if arguments.json:
        arguments.json.write_text("\n".join(lines) + "\n")
    if wrong:
        raise SystemExit(f"{wrong} operators do not give what their reference gives")


if __name__ == "__main__":
    main()
