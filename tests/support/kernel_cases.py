"""Calls on `meta` tensors whose launches `triton_compile` compiles: the shapes of real models, each dtype once.

Knows: the Triton operators other than attention. Must not know: how they are compiled.
"""

from __future__ import annotations

import torch
from triton_compile import Case

from plait.kernels.sampling_inputs import LogitShaping, Penalties, RowBias, RowMasks, SamplingInputs
from plait.kernels.triton import activation, logprobs, mask, norm, sampling

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def i32(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int32)


def shaping(rows: int, vocab: int) -> LogitShaping:
    return LogitShaping(
        RowMasks(i32(rows, -(-vocab // 32)), i32(rows)),
        RowBias(empty(4, vocab, dtype=F32), i32(rows)),
        Penalties(i32(8, vocab), i32(rows), empty(rows, dtype=F32), empty(rows, dtype=F32)),
    )


def sampling_inputs(rows: int) -> SamplingInputs:
    floats, long = empty(rows, dtype=F32), empty(rows, dtype=torch.int64)
    return SamplingInputs(floats, i32(rows), floats, floats, long, long)


def sample(rows: int, vocab: int, dtype: torch.dtype, shaped: bool) -> None:
    extra = {"shaping": shaping(rows, vocab)} if shaped else {}
    sampling.sample(empty(rows, vocab, dtype=dtype), sampling_inputs(rows), **extra)


CASES = {
    "norm of rows": Case(lambda: norm.rms_norm(empty(64, 4096), empty(4096), 1e-6)),
    "norm of heads": Case(lambda: norm.rms_norm(empty(64, 48, 128)[:, :32], empty(128), 1e-6)),
    "Gemma's norm of odd rows": Case(
        lambda: norm.rms_norm(empty(7, 2305, dtype=F16), empty(2305, dtype=F16), 1e-6, unit_offset=True)
    ),
    "fused norm": Case(lambda: norm.add_rms_norm(empty(64, 4096), empty(64, 4096), empty(4096), 1e-5)),
    "fused norm, widest": Case(
        lambda: norm.add_rms_norm(empty(8, 16384), empty(8, 16384), empty(16384), 1e-5, unit_offset=True)
    ),
    "SwiGLU": Case(lambda: activation.silu_and_multiply(empty(64, 2 * 14336))),
    "GELU": Case(lambda: activation.gelu_tanh_and_multiply(empty(64, 2 * 9216, dtype=F16))),
    "sampling of Llama 3's tokens": Case(lambda: sample(64, 128_256, BF16, True)),
    "sampling of Gemma 3's tokens": Case(lambda: sample(64, 262_144, BF16, False)),
    "mask in place": Case(
        lambda: mask.shape_logits(
            empty(64, 151_936, dtype=F32), empty(64, 151_936, dtype=F32), i32(64), shaping(64, 151_936)
        )
    ),
    "counts": Case(lambda: mask.count_tokens(i32(64, 128_256), i32(64), i32(64))),
    "logprobs of pairs": Case(lambda: logprobs.gather_logprobs(empty(64, 128_256), i32(200), i32(200))),
    "likeliest tokens": Case(lambda: logprobs.top_logprobs(empty(64, 262_144), 20)),
}
