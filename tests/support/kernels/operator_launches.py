"""Operator calls on `meta` tensors, whose launches `ptx_compile` compiles: shapes of real models, each dtype once.

Sizes whose kernels need no more registers and shared memory than those of another size are omitted. All cases are
compiled for sm_90; for sm_80 each kernel once, and matrix products in each tile that differs in kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from ptx_compile import ARCHITECTURES, Job, record_launches

from plait.kernels.coded_weights import CodedWeight
from plait.kernels.low_rank_table import COLUMNS
from plait.kernels.quantized_weights import Int8Weight
from plait.kernels.sampling_inputs import LogitAdjustments, Penalties, RowBias, RowMasks, SamplingInputs
from plait.kernels.triton import activation, norm
from plait.kernels.triton.linear import coded_matmul, grouped_matmul, low_rank, quantized_linear, quantized_matmul
from plait.kernels.triton.sampling import logit_adjustments, logprobs, sampler


@dataclass(frozen=True)
class Case:
    """A call of an operator."""

    call: Callable[[], object]
    tensor_core: bool = False  # whether its kernels, except those in `plain`, must use tensor cores
    plain: tuple[str, ...] = ()
    chips: tuple[int, ...] = (90,)


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def i32(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int32)


def adjustments(rows: int, vocab: int) -> LogitAdjustments:
    return LogitAdjustments(
        RowMasks(i32(rows, -(-vocab // 32)), i32(rows)),
        RowBias(empty(4, vocab, dtype=F32), i32(rows)),
        Penalties(i32(8, vocab), i32(8, -(-vocab // 32)), i32(rows), *(empty(rows, dtype=F32) for _ in range(3))),
    )


def sampling_inputs(rows: int) -> SamplingInputs:
    floats, long = empty(rows, dtype=F32), empty(rows, dtype=torch.int64)
    return SamplingInputs(floats, i32(rows), floats, floats, long, long)


def sample(rows: int, vocab: int, dtype: torch.dtype, adjusted: bool) -> None:
    extra = {"adjustments": adjustments(rows, vocab)} if adjusted else {}
    sampler.sample(empty(rows, vocab, dtype=dtype), sampling_inputs(rows), **extra)


def int4(out_features: int, in_features: int, group: int, minima: bool = False) -> CodedWeight:
    spans = -(-in_features // 128) * 2
    scales = empty(spans * 64 // group, out_features, dtype=F16)
    packed = empty(spans, out_features, 32, dtype=torch.uint8)
    return CodedWeight(
        packed=packed,
        scales=scales,
        group=group,
        in_features=in_features,
        offset=0 if minima else 8,
        minima=scales if minima else None,
    )


def int8(out_features: int, in_features: int, is_grouped: bool = False) -> Int8Weight:
    scales = empty(in_features // 32, out_features, dtype=F16) if is_grouped else empty(out_features, dtype=F32)
    return Int8Weight(empty(out_features, in_features, dtype=torch.int8), scales)


def linears(rows: int, weight: CodedWeight | Int8Weight) -> None:
    """A linear layer and an embedding lookup, as an engine calls them."""
    channels = weight.in_features if isinstance(weight, CodedWeight) else weight.values.shape[1]
    quantized_linear.linear(empty(rows, channels), weight, None)
    quantized_linear.dequantize_rows(weight, i32(rows), BF16)


def experts(tokens: int, top_k: int, num_experts: int, hidden: int, inner: int, dtype: torch.dtype) -> None:
    """A complete mixture-of-experts layer."""
    ids = i32(tokens, top_k)
    routing = grouped_matmul.sort_by_expert(
        ids, num_experts, grouped_matmul.routing_block_size(ids.numel(), num_experts)
    )
    x = empty(tokens, hidden, dtype=dtype)
    both = grouped_matmul.grouped_matmul(x, empty(num_experts, 2 * inner, hidden, dtype=dtype), routing, top_k)
    gated = activation.silu_and_multiply(both)
    results = grouped_matmul.grouped_matmul(gated, empty(num_experts, hidden, inner, dtype=dtype), routing, 1)
    grouped_matmul.combine_experts(results, empty(tokens, top_k, dtype=F32), ids)


def low_rank_updates(rows: int, channels: int, outs: int, dtype: torch.dtype = BF16) -> None:
    """What 16 slots of adapters add to a product of one step, and to its embeddings."""
    table, groups = empty(16, 130, COLUMNS, dtype=torch.int64), low_rank.group_rows(i32(rows), 16)
    out = empty(rows, outs, dtype=dtype)
    for x in (empty(rows, channels, dtype=dtype), i32(rows)):
        low_rank.add_low_rank(out, x, table, 0, groups, 3072)


NO_PRODUCT = ("_reduce_splits", "_dequantize_coded", "_dequantize_int8", "_quantize_activations")
NO_UPDATE = ("_count_slots", "_place_slots", "_gather")
ROUTING = ("_count_slots", "_place_slots", "_combine", "_gated")

CASES = {
    "norm of rows": Case(lambda: norm.rms_norm(empty(64, 4096), empty(4096), 1e-6)),
    "norm of heads": Case(lambda: norm.rms_norm(empty(64, 48, 128)[:, :32], empty(128), 1e-6)),
    "Gemma's norm of odd rows": Case(lambda: norm.rms_norm(empty(7, 2305, dtype=F16), empty(2305, dtype=F32), 1e-6)),
    "fused norm": Case(lambda: norm.add_rms_norm(empty(64, 4096), empty(64, 4096), empty(4096), 1e-5)),
    "fused norm, widest": Case(
        lambda: norm.add_rms_norm(empty(8, 16384), empty(8, 16384), empty(16384, dtype=F32), 1e-5), chips=ARCHITECTURES
    ),
    "SwiGLU": Case(lambda: activation.silu_and_multiply(empty(64, 2 * 14336))),
    "GELU": Case(lambda: activation.gelu_tanh_and_multiply(empty(64, 2 * 9216, dtype=F16)), chips=ARCHITECTURES),
    "soft cap of Gemma 2's logits": Case(
        lambda: activation.soft_cap_in_place(empty(64, 256_000), 30.0), chips=ARCHITECTURES
    ),
    "sampling of Llama 3's tokens": Case(lambda: sample(64, 128_256, BF16, True)),
    "sampling of Gemma 3's tokens": Case(lambda: sample(64, 262_144, BF16, False), chips=ARCHITECTURES),
    "mask in place": Case(
        lambda: logit_adjustments.launch_adjust_logits(
            empty(64, 151_936, dtype=F32),
            empty(64, 151_936, dtype=F32),
            empty(64, 38, dtype=F32),
            i32(64, 38),
            adjustments(64, 151_936),
        ),
        chips=ARCHITECTURES,
    ),
    "counts": Case(lambda: logit_adjustments.count_tokens(i32(64, 128_256), i32(64), i32(64)), chips=ARCHITECTURES),
    "logprobs of pairs": Case(
        lambda: logprobs.gather_logprobs(empty(64, 128_256), i32(200), i32(200)), chips=ARCHITECTURES
    ),
    "top logprobs": Case(lambda: logprobs.top_logprobs(empty(64, 262_144), 20), chips=ARCHITECTURES),
    "128 top logprobs": Case(lambda: logprobs.top_logprobs(empty(64, 262_144), 128), chips=ARCHITECTURES),
    "int4 with minima and bias, 16 rows": Case(
        lambda: coded_matmul.coded_matmul(
            empty(16, 2048, dtype=F16), int4(6144, 2048, 128, True), empty(6144, dtype=F16)
        ),
        True,
        ("_reduce_splits",),
    ),
    "int4, 48 rows of odd width": Case(
        lambda: coded_matmul.coded_matmul(empty(48, 576), int4(49152, 576, 32)), True, chips=ARCHITECTURES
    ),
    "int8, one row": Case(
        lambda: quantized_matmul.int8_matmul(empty(1, 4096), int8(4096, 4096)), True, ("_reduce_splits",), ARCHITECTURES
    ),
    "int8, many rows": Case(
        lambda: quantized_matmul.int8_matmul(empty(4096, 4096, dtype=F16), int8(28672, 4096)), True, chips=ARCHITECTURES
    ),
    # What `weights=int4` runs: groups of 32 with minima, one row and each larger tile; the output head has 8 bits.
    "int4 of an engine, one row": Case(lambda: linears(1, int4(6144, 4096, 32, True)), True, NO_PRODUCT),
    "int4 of an engine, 24 rows": Case(lambda: linears(24, int4(28672, 4096, 32, True)), True, NO_PRODUCT),
    "int4 of an engine, 64 rows": Case(lambda: linears(64, int4(4096, 14336, 32, True)), True, NO_PRODUCT),
    "int4 of an engine, 256 rows": Case(
        lambda: linears(256, int4(28672, 4096, 32, True)), True, NO_PRODUCT, ARCHITECTURES
    ),
    "int4 of an engine, a prompt": Case(
        lambda: linears(4096, int4(28672, 4096, 32, True)), True, NO_PRODUCT, ARCHITECTURES
    ),
    "int8 of an engine, the head": Case(lambda: linears(64, int8(128_256, 4096)), True, NO_PRODUCT),
    "Q8_0, one row": Case(lambda: linears(1, int8(49152, 576, True)), True, NO_PRODUCT),
    "Q8_0, 256 rows": Case(lambda: linears(256, int8(4096, 4096, True)), True, NO_PRODUCT, ARCHITECTURES),
    "Q8_0, a prompt": Case(lambda: linears(4096, int8(4096, 4096, True)), True, NO_PRODUCT),
    "experts, decode": Case(lambda: experts(64, 8, 128, 2048, 768, BF16), True, ROUTING),
    "experts, mixed": Case(lambda: experts(512, 4, 32, 2880, 2880, BF16), True, ROUTING, ARCHITECTURES),
    "adapters, one row": Case(lambda: low_rank_updates(1, 4096, 6144), True, NO_UPDATE),
    "adapters, 64 rows": Case(lambda: low_rank_updates(64, 4096, 6144), True, NO_UPDATE, ARCHITECTURES),
    "adapters, short channels": Case(lambda: low_rank_updates(64, 576, 49152, F16), True, NO_UPDATE),
    "adapters, 16 slots and a prompt": Case(
        lambda: low_rank_updates(1024, 14336, 4096), True, NO_UPDATE, ARCHITECTURES
    ),
    "experts, prefill": Case(lambda: experts(4096, 2, 8, 4096, 14336, F16), True, ROUTING),
}


def jobs() -> list[Job]:
    """Every kernel that differs, once for each architecture of its cases."""
    compiled: dict[tuple[int, str], Job] = {}
    for name, case in CASES.items():
        for launch in record_launches(case.call):
            wants_tensor_core = case.tensor_core and launch.kernel.__name__ not in case.plain
            for arch in case.chips:
                compiled.setdefault((arch, launch.key()), Job(name, launch, arch, wants_tensor_core))
    return list(compiled.values())
