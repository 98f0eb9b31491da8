"""Logprobs of given tokens and of the most likely ones, without storing the log_softmax.

One pass over the logits computes each chunk's maximum and sum (Milakov and Gimelshein 2018) and, for the most likely
tokens, its largest logits; a second kernel merges the chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plait.kernels.triton.sampling.vocab_chunks import check_logits, chunk_size, from_order_key, order_key

MAX_TOP = 128
EMPTY_SLOT = tl.constexpr(-(2**63))


@triton.jit
def _partial(logits_ptr, chunk_max_ptr, sums_ptr, vocab, num_chunks, stride, CHUNK: tl.constexpr):
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    max_logit = tl.max(x, axis=0)
    shift = tl.where(max_logit == float("-inf"), 0.0, max_logit)  # a chunk of -inf sums to 0
    tl.store(chunk_max_ptr + row * num_chunks + chunk, max_logit)
    tl.store(sums_ptr + row * num_chunks + chunk, tl.sum(tl.exp2((x - shift) * 1.4426950408889634), axis=0))


@triton.jit
def _log_sum(chunk_max_ptr, sums_ptr, num_chunks, row, CHUNKS: tl.constexpr):
    """Returns log(sum(exp(row))) from the chunks' maxima and sums."""
    chunk = tl.arange(0, CHUNKS)
    there = chunk < num_chunks
    chunk_max = tl.load(chunk_max_ptr + row * num_chunks + chunk, mask=there, other=float("-inf"))
    sums = tl.load(sums_ptr + row * num_chunks + chunk, mask=there, other=0.0)
    max_logit = tl.max(chunk_max, axis=0)
    total = tl.sum(sums * tl.exp2((chunk_max - max_logit) * 1.4426950408889634), axis=0)
    return max_logit + tl.log2(total) * 0.6931471805599453


@triton.jit
def _gather(
    logits_ptr, chunk_max_ptr, sums_ptr, rows_ptr, tokens_ptr, out_ptr, num_chunks, stride, CHUNKS: tl.constexpr
):
    row, token = tl.load(rows_ptr + tl.program_id(0)).to(tl.int64), tl.load(tokens_ptr + tl.program_id(0))
    value = float("nan")
    if (row >= 0) & (token >= 0):
        x = tl.load(logits_ptr + row * stride + token).to(tl.float32)
        value = x - _log_sum(chunk_max_ptr, sums_ptr, num_chunks, row, CHUNKS)
    tl.store(out_ptr + tl.program_id(0), value)


@triton.jit
def _chunk_top(logits_ptr, packed_ptr, vocab, num_chunks, stride, count, CHUNK: tl.constexpr, SLOTS: tl.constexpr):
    """Packs each of a chunk's `count` largest tokens in one int64: the logit's order key, then the id, inverted."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(x == 0.0, 0.0, x)
    packed = (order_key(x).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
    packed = tl.where(token < vocab, packed, EMPTY_SLOT)
    to = packed_ptr + (row * num_chunks + chunk) * SLOTS
    for i in range(count):
        largest = tl.max(packed, axis=0)
        tl.store(to + i, largest)
        packed = tl.where(packed == largest, EMPTY_SLOT, packed)


@triton.jit
def _merge_top(
    packed_ptr,
    chunk_max_ptr,
    sums_ptr,
    values_ptr,
    ids_ptr,
    num_chunks,
    count,
    CHUNKS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    log_sum = _log_sum(chunk_max_ptr, sums_ptr, num_chunks, row, CHUNKS)
    at = tl.arange(0, CHUNKS * SLOTS)
    real = (at < num_chunks * SLOTS) & (at % SLOTS < count)
    packed = tl.load(packed_ptr + row * num_chunks * SLOTS + at, mask=real, other=EMPTY_SLOT)
    for i in range(count):
        largest = tl.max(packed, axis=0)
        missing = largest == EMPTY_SLOT
        logprob = from_order_key((largest >> 32).to(tl.int32)) - log_sum
        token = 0x7FFFFFFF - (largest & 0x7FFFFFFF).to(tl.int32)
        tl.store(values_ptr + row * count + i, tl.where(missing, float("-inf"), logprob))
        tl.store(ids_ptr + row * count + i, tl.where(missing, -1, token))
        packed = tl.where(packed == largest, EMPTY_SLOT, packed)


def _partials(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, vocab = check_logits(logits)
    chunk = chunk_size(vocab)
    chunks = triton.cdiv(vocab, chunk)
    chunk_max = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(chunk_max)
    _partial[(chunks, rows)](logits, chunk_max, sums, vocab, chunks, logits.stride(0), CHUNK=chunk, num_warps=8)
    return chunk_max, sums


def gather_logprobs(logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """As `reference_sampling.gather_logprobs`; rows and tokens [N] int32."""
    if rows.shape != tokens.shape or rows.dim() != 1:
        raise ValueError(f"rows {tuple(rows.shape)} and tokens {tuple(tokens.shape)} must be one list of pairs")
    out = torch.empty(len(rows), dtype=torch.float32, device=logits.device)
    if not len(rows) or not len(logits):
        return out.fill_(float("nan"))
    chunk_max, sums = _partials(logits)
    chunks = chunk_max.shape[1]
    _gather[(len(rows),)](
        logits, chunk_max, sums, rows, tokens, out, chunks, logits.stride(0),
        CHUNKS=triton.next_power_of_2(chunks), num_warps=1,
    )  # fmt: skip
    return out


def top_logprobs(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference_sampling.top_logprobs`, for 1 to MAX_TOP tokens; else ValueError."""
    if not 1 <= count <= MAX_TOP:
        raise ValueError(f"top_logprobs gives 1 to {MAX_TOP} tokens, not {count}")
    rows, vocab = check_logits(logits)
    values = torch.empty((rows, count), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, count), dtype=torch.int32, device=logits.device)
    if not rows:
        return values, ids
    chunk_max, sums = _partials(logits)
    chunks, slots = chunk_max.shape[1], triton.next_power_of_2(count)
    packed = torch.empty((rows, chunks, slots), dtype=torch.int64, device=logits.device)
    sizes = {"SLOTS": slots, "num_warps": 4}
    chunk = chunk_size(vocab)
    _chunk_top[(chunks, rows)](logits, packed, vocab, chunks, logits.stride(0), count, CHUNK=chunk, **sizes)
    joined = triton.next_power_of_2(chunks)
    _merge_top[(rows,)](packed, chunk_max, sums, values, ids, chunks, count, CHUNKS=joined, **sizes)
    return values, ids
