"""Applies penalties, bias and the packed mask to logits in one pass, which also finds each chunk's maximum.

The maximum of a chunk that contains NaN or +inf is stored as NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plait.kernels.sampling_inputs import LogitAdjustments, Penalties, RowBias, RowMasks
from plait.kernels.triton.sampling.vocab_chunks import NEGATIVE_INFINITY, check_logits, chunk_size


@triton.jit
def _adjust_logits_kernel(
    logits_ptr,
    adjusted_ptr,
    chunk_max_ptr,  # [B, S] float32
    chunk_argmax_ptr,  # [B, S] int32
    words_ptr,
    mask_rows_ptr,
    bias_ptr,
    bias_rows_ptr,
    counts_ptr,
    prompts_ptr,
    count_rows_ptr,
    frequency_ptr,
    presence_ptr,
    repetition_ptr,
    vocab,
    num_chunks,
    logits_stride,
    adjusted_stride,
    words_stride,
    bias_stride,
    counts_stride,
    prompts_stride,
    HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    word = chunk * (CHUNK // 32) + tl.arange(0, CHUNK // 32)  # one packed word holds 32 tokens
    token = word[:, None] * 32 + tl.arange(0, 32)[None, :]  # [CHUNK / 32, 32]
    inside = token < vocab
    raw = tl.load(logits_ptr + row * logits_stride + token, mask=inside, other=NEGATIVE_INFINITY).to(tl.float32)
    not_finite = tl.max(tl.max(((raw != raw) | (raw == float("inf"))).to(tl.int32), axis=1), axis=0)
    x = tl.where(raw == 0.0, 0.0, raw)  # no negative zero, which order_key would not treat as equal to zero
    if HAS_PENALTIES:
        place = tl.load(count_rows_ptr + row).to(tl.int64)
        if place >= 0:
            count = tl.load(counts_ptr + place * counts_stride + token, mask=inside, other=0)
            prompt = tl.load(prompts_ptr + place * prompts_stride + word, mask=word * 32 < vocab, other=0)
            in_prompt = (prompt[:, None] >> tl.arange(0, 32)[None, :]) & 1
            penalty = tl.load(repetition_ptr + row)
            penalized = tl.where(x > 0, tl.div_rn(x, penalty), x * penalty)
            x = tl.where((count > 0) | (in_prompt != 0), penalized, x)
            used = tl.where(count > 0, tl.load(presence_ptr + row), 0.0)
            x -= count.to(tl.float32) * tl.load(frequency_ptr + row) + used
    if HAS_BIAS:
        place = tl.load(bias_rows_ptr + row).to(tl.int64)
        if place >= 0:
            x += tl.load(bias_ptr + place * bias_stride + token, mask=inside, other=0.0)
    if HAS_MASK:
        place = tl.load(mask_rows_ptr + row).to(tl.int64)
        if place >= 0:
            bits = tl.load(words_ptr + place * words_stride + word, mask=word * 32 < vocab, other=0)
            allowed = (bits[:, None] >> tl.arange(0, 32)[None, :]) & 1
            x = tl.where(allowed != 0, x, NEGATIVE_INFINITY)
    tl.store(adjusted_ptr + row * adjusted_stride + token, x, mask=inside)
    max_logit = tl.max(tl.max(x, axis=1), axis=0)
    chunk_argmax = tl.min(tl.min(tl.where(x == max_logit, token, 0x7FFFFFFF), axis=1), axis=0)
    tl.store(chunk_max_ptr + row * num_chunks + chunk, tl.where(not_finite != 0, float("nan"), max_logit))
    tl.store(chunk_argmax_ptr + row * num_chunks + chunk, chunk_argmax)


@triton.jit
def row_max_and_status(chunk_max_ptr, num_chunks, row, CHUNKS: tl.constexpr):
    """Returns a row's maximum and status from its chunks' maxima [B, S]: 0, NO_TOKEN (-1) or NOT_FINITE (-2)."""
    chunk = tl.arange(0, CHUNKS)
    chunk_max = tl.load(chunk_max_ptr + row * num_chunks + chunk, mask=chunk < num_chunks, other=NEGATIVE_INFINITY)
    not_finite = tl.max((chunk_max != chunk_max).to(tl.int32), axis=0)
    max_logit = tl.max(tl.where(chunk_max != chunk_max, NEGATIVE_INFINITY, chunk_max), axis=0)
    return max_logit, tl.where(not_finite != 0, -2, tl.where(max_logit == NEGATIVE_INFINITY, -1, 0))


@triton.jit
def _count_tokens(counts_ptr, rows_ptr, tokens_ptr, counts_stride):
    row, token = tl.load(rows_ptr + tl.program_id(0)).to(tl.int64), tl.load(tokens_ptr + tl.program_id(0))
    if (row >= 0) & (token >= 0):
        tl.atomic_add(counts_ptr + row * counts_stride + token, 1)


def launch_adjust_logits(
    logits: torch.Tensor,
    adjusted: torch.Tensor,
    chunk_max: torch.Tensor,
    chunk_argmax: torch.Tensor,
    adjustments: LogitAdjustments,
) -> None:
    """Writes adjusted logits [B, V] float32, and the chunks' maxima and argmax tokens [B, S]."""
    rows, vocab = check_logits(logits)
    masks, bias, penalties = adjustments
    if masks is not None and masks.words.shape[1] * 32 < vocab:
        raise ValueError(f"{masks.words.shape[1]} words per mask do not hold {vocab} tokens")
    chunk = chunk_size(vocab)
    num_chunks = triton.cdiv(vocab, chunk)
    _adjust_logits_kernel[(num_chunks, rows)](
        logits,
        adjusted,
        chunk_max,
        chunk_argmax,
        *(masks or (None,) * len(RowMasks._fields)),
        *(bias or (None,) * len(RowBias._fields)),
        *(penalties or (None,) * len(Penalties._fields)),
        vocab,
        num_chunks,
        logits.stride(0),
        adjusted.stride(0),
        masks.words.stride(0) if masks else 0,
        bias.values.stride(0) if bias else 0,
        penalties.counts.stride(0) if penalties else 0,
        penalties.prompts.stride(0) if penalties else 0,
        HAS_MASK=masks is not None,
        HAS_BIAS=bias is not None,
        HAS_PENALTIES=penalties is not None,
        CHUNK=chunk,
        num_warps=8,
    )


def count_tokens(counts: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    """As `reference_sampling.count_tokens`."""
    if len(rows):
        _count_tokens[(len(rows),)](counts, rows, tokens, counts.stride(0), num_warps=1)
