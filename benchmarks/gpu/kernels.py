"""Measures the Triton kernels other than attention against the GPU's copy bandwidth and matrix rate.

    python benchmarks/gpu/kernels.py [--only WORD]

Each operator is first compared with its reference, then captured in a CUDA graph (which fails if the operator waits
for the device) and replayed. Times are medians by CUDA events, with the L2 cache overwritten in between. `share` is the
fraction of this GPU's copy bandwidth, or of its bfloat16 matrix rate, both measured first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import machine
import reference_experts
import reference_float32
import reference_matmul as matmul
import reference_sampling
import torch
from machine import DEVICE, DRY, DTYPE

from plait.kernels import quantized_weights
from plait.kernels.coded_weights import weight_from_gguf
from plait.kernels.gguf_dequantize import GGUF_BLOCK_SHAPES
from plait.kernels.reference import ops
from plait.kernels.sampling_inputs import LogitAdjustments, RowMasks, SamplingInputs

FLUSH_BYTES = 1 if DRY else 256 << 20  # several times an H200's L2
FEW = 64  # tokens up to which a product is bound by its weights


class Case(NamedTuple):
    """`amount`: bytes moved at least (unit "B") or floating point operations (unit "FLOP") of one call."""

    name: str
    call: Callable[[], Any]
    expected: Callable[[], Any]
    amount: float
    unit: str = "B"
    tolerance: float = 2e-2  # of the largest value


def product(name: str, call: Any, expected: Any, tokens: int, weight_bytes: float, flop: float) -> Case:
    """A case of a product, bound by the bytes of its weights or by its operations."""
    return Case(name, call, expected, *((weight_bytes, "B") if tokens <= FEW else (flop, "FLOP")))


def randn(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def row_cases() -> Iterator[Case]:
    from plait.kernels.triton import activation, norm

    width, inner = (64, 96) if DRY else (4096, 14336)
    for rows in (1, 3) if DRY else (1, 64, 8192):
        x, residual, weight, gate_up = randn(rows, width), randn(rows, width), randn(width), randn(rows, 2 * inner)
        call = partial(norm.add_rms_norm, x, residual, weight, 1e-5, out=torch.empty_like(x))
        expected = partial(ops.rms_norm, residual, weight, 1e-5)  # the call has already added x to the residual
        yield Case(f"residual + RMSNorm, {rows} x {width}", call, expected, rows * width * 8)
        call = partial(activation.silu_and_multiply, gate_up, torch.empty_like(gate_up[:, :inner]))
        expected = partial(reference_float32.silu_and_multiply, gate_up)
        yield Case(f"SwiGLU, {rows} x {inner}", call, expected, rows * inner * 6)


def sampling_rows(rows: int, **fields: float) -> SamplingInputs:
    columns = {
        name: torch.full((rows,), value, dtype=torch.int32 if name == "top_k" else torch.float32, device=DEVICE)
        for name, value in ({"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0} | fields).items()
    }
    indices = torch.arange(rows, device=DEVICE)
    return SamplingInputs(**columns, seed=indices, step=indices)


def sampling_cases() -> Iterator[Case]:
    from plait.kernels.triton.sampling import logprobs, sampler

    kinds: dict[str, dict[str, float]] = {
        "greedy": {"temperature": 0.0},
        "plain": {},
        "top-k 50, top-p 0.9, min-p 0.05": {"top_k": 50, "top_p": 0.9, "min_p": 0.05},
        "a flat nucleus": {"top_p": 0.9, "temperature": 4.0},
    }
    for vocab, rows in ((500, 2),) if DRY else ((128_256, 1), (128_256, 64), (128_256, 256), (262_144, 64)):
        logits, indices = randn(rows, vocab) * 3, torch.arange(rows, device=DEVICE)
        words = torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), device=DEVICE).int()
        adjustments = LogitAdjustments(RowMasks(words, indices.int()))
        work, out = sampler.SamplingWorkspace.allocate(rows, vocab, logits.device), torch.empty_like(indices).int()
        for kind, fields in kinds.items():
            given = logits, sampling_rows(rows, **fields), adjustments
            call, expected = partial(sampler.sample, *given, out, work), partial(reference_sampling.sample, *given)
            yield Case(f"sampling, {kind}, masked, {rows} x {vocab}", call, expected, rows * vocab * 2.125, "B", 0.0)
        ours, reference = (
            partial(lambda top, given: top(given, 20)[0], module.top_logprobs, logits)
            for module in (logprobs, reference_sampling)
        )
        yield Case(f"top 20 logprobs, {rows} x {vocab}", ours, reference, rows * vocab * 2, "B", 1e-4)


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
                reference = matmul.int8_matmul if kind == "int8" else matmul.coded_matmul
                calls = (partial(each, x, weight) for each in (quantized_linear.linear, reference))
                yield product(f"{kind}, {rows} x {channels} -> {outs}", *calls, rows, size, flop)


def expert_cases() -> Iterator[Case]:
    from plait.kernels.triton.linear import grouped_matmul as grouped

    for experts, top_k, hidden, inner in ((4, 2, 64, 32),) if DRY else ((128, 8, 2048, 768), (8, 2, 4096, 14336)):
        weights = randn(experts, 2 * inner, hidden)
        for tokens in (1, 5) if DRY else (1, 64, 4096):
            ids = torch.rand(tokens, experts, device=DEVICE).topk(top_k).indices.int().contiguous()
            name = f"{tokens} tokens, {top_k} of {experts} experts"
            route = ids, experts, grouped.routing_block_size(ids.numel(), experts)
            given = randn(tokens, hidden), weights, grouped.sort_by_expert(*route), top_k
            calls = (partial(module.grouped_matmul, *given) for module in (grouped, reference_experts))
            size, flop = len(ids.unique()) * 4.0 * inner * hidden, 4.0 * ids.numel() * inner * hidden
            yield product(f"grouped product, {name}, {hidden} -> {2 * inner}", *calls, tokens, size, flop)
            calls = (
                partial(lambda sort, *given: sort(*given).block_experts, module.sort_by_expert, *route)
                for module in (grouped, reference_experts)
            )
            yield Case(f"routing, {name}", *calls, ids.numel() * 8, "B", 0.0)


def worst_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest value; for whole numbers the share that differ beyond one in 500."""
    if not found.is_floating_point():
        return max(0.0, float((found != expected).double().mean()) - 0.002)
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-9))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="only cases whose name holds this")
    parser.add_argument("--dry", action="store_true", help="small, once, without a GPU")
    machine.add_limits_option(parser)
    arguments = parser.parse_args()
    machine.require()
    torch.manual_seed(0)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=DEVICE)
    limits, wrong = {"B": machine.limits().copy, "FLOP": machine.limits().bf16}, 0
    for cases in (row_cases, sampling_cases, quantized_cases, expert_cases):
        for case in cases():
            if arguments.only not in case.name:
                continue
            try:
                error = worst_error(case.call(), case.expected())
                seconds = machine.seconds_of(machine.captured(case.call), flush.zero_)
            except Exception as failure:  # the other kernels may work
                machine.report_failure(case.name, failure)
                wrong += 1
                continue
            is_right, share = error <= case.tolerance, case.amount / seconds / limits[case.unit]
            machine.report(case.name, share, "share", ok=is_right, error=error, us=seconds * 1e6)
            wrong += not is_right
    if wrong:
        raise SystemExit(f"{wrong} operators failed or differ from their reference")


if __name__ == "__main__":
    main()
