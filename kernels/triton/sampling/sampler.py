"""Samples one token per row: greedy, temperature, top-k, top-p, min-p, seeded, without sorting the vocabulary.

    _adjust_logits_kernel  [chunks, rows]  adjusts the logits, finds the maximum of each chunk (logit_adjustments.py)
    _sum_weights           [chunks, rows]  sums integer weights, counts the tokens in each of 256 bins of likelihood
    _find_cutoff           [rows]          finds the last bin with candidates, and where each chunk's candidates begin
    _gather_candidates     [chunks, rows]  writes the candidates, in order of token id
    _pick_token            [rows]          finds the exact thresholds among the candidates, and the token

Candidates are the tokens that the filters may keep. Weights are integers, so that sums do not depend on order or split,
and a token depends on its row alone. If a row has more than CANDIDATES candidates (a flat distribution), all its tokens
are searched instead, which is slower. `reference_sampling` explains the sampling rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from plait.kernels.sampling_inputs import NO_ADJUSTMENTS, LogitAdjustments, SamplingInputs
from plait.kernels.triton.sampling.logit_adjustments import launch_adjust_logits, row_max_and_status
from plait.kernels.triton.sampling.threshold_search import (
    draw_target,
    filtered_weight,
    find_threshold,
    hash_seed_step,
    weight_of_key,
)
from plait.kernels.triton.sampling.vocab_chunks import (
    check_logits,
    chunk_size,
    integer_weight,
    inverse_temperature,
    log2_ratio_to_max,
    order_key,
)

CANDIDATES = 4096
NUM_BINS = 256
BINS_PER_OCTAVE = tl.constexpr(NUM_BINS / 40)  # bins reach down to 2^-40, the smallest weight
BLOCK = 1024  # tokens that `_pick_token` reads at a time
PIVOTS = 8  # thresholds that one pass of `find_threshold` tries


@dataclass(frozen=True)
class SamplingWorkspace:
    """Scratch memory of `sample` for up to B rows of V tokens in S chunks. Each captured CUDA graph owns one."""

    adjusted: torch.Tensor  # [B, V] float32
    chunk_max: torch.Tensor  # [B, S] float32
    chunk_argmax: torch.Tensor  # [B, S] int32
    chunk_weights: torch.Tensor  # [B, S] int64
    likelihood_bins: torch.Tensor  # [B, S, BINS] int32
    candidate_starts: torch.Tensor  # [B, S] int32
    summary: (
        torch.Tensor
    )  # [B, 3] int32: number of candidates, last bin with candidates, number of tokens with nonzero weight
    values: torch.Tensor  # [B, CANDIDATES] float32, adjusted logits
    ids: torch.Tensor  # [B, CANDIDATES] int32

    @classmethod
    def allocate(cls, rows: int, vocab: int, device: torch.device) -> SamplingWorkspace:
        """Allocates about 4 V + 1,100 S + 32,768 bytes per row."""
        chunks = triton.cdiv(vocab, chunk_size(vocab))

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            adjusted=empty(rows, triton.cdiv(vocab, 16) * 16, dtype=torch.float32)[:, :vocab],
            chunk_max=empty(rows, chunks, dtype=torch.float32),
            chunk_argmax=empty(rows, chunks, dtype=torch.int32),
            chunk_weights=empty(rows, chunks, dtype=torch.int64),
            likelihood_bins=empty(rows, chunks, NUM_BINS, dtype=torch.int32),
            candidate_starts=empty(rows, chunks, dtype=torch.int32),
            summary=empty(rows, 3, dtype=torch.int32),
            values=empty(rows, CANDIDATES, dtype=torch.float32),
            ids=empty(rows, CANDIDATES, dtype=torch.int32),
        )


@triton.jit
def _is_greedy(temperature, top_k):
    return (temperature <= 0.0) | (top_k == 1)


@triton.jit
def _is_filtered(top_k, top_p, min_p):
    return (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)


@triton.jit
def _bin_of(power, NUM_BINS: tl.constexpr):
    return tl.minimum((-tl.maximum(power, -64.0) * BINS_PER_OCTAVE).to(tl.int32), NUM_BINS - 1)


@triton.jit
def _sum_weights(
    adjusted_ptr,
    chunk_max_ptr,
    chunk_weights_ptr,
    likelihood_bins_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    vocab,
    num_chunks,
    adjusted_stride,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    NUM_BINS: tl.constexpr,
):
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    max_logit, status = row_max_and_status(chunk_max_ptr, num_chunks, row, CHUNKS)
    if _is_greedy(temperature, top_k) | (status != 0):
        return
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(adjusted_ptr + row * adjusted_stride + token, mask=token < vocab, other=float("-inf"))
    power = log2_ratio_to_max(x, max_logit, inverse_temperature(temperature))
    weight = integer_weight(power)
    entry = row * num_chunks + chunk
    tl.store(chunk_weights_ptr + entry, tl.sum(weight, axis=0))
    if _is_filtered(top_k, tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)):
        counts = tl.histogram(_bin_of(power, NUM_BINS), NUM_BINS, mask=weight > 0)
        tl.store(likelihood_bins_ptr + entry * NUM_BINS + tl.arange(0, NUM_BINS), counts)


@triton.jit
def _find_cutoff(
    chunk_weights_ptr,
    chunk_max_ptr,
    likelihood_bins_ptr,
    candidate_starts_ptr,
    summary_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    num_chunks,
    CHUNKS: tl.constexpr,
    NUM_BINS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    top_p, min_p = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    _, status = row_max_and_status(chunk_max_ptr, num_chunks, row, CHUNKS)
    if _is_greedy(temperature, top_k) | (status != 0):
        return
    if not _is_filtered(top_k, top_p, min_p):
        return
    chunk, bin_index = tl.arange(0, CHUNKS), tl.arange(0, NUM_BINS)
    entry = row * num_chunks + chunk
    is_chunk = chunk < num_chunks
    bins_ptr = likelihood_bins_ptr + entry[:, None] * NUM_BINS + bin_index[None, :]
    counts = tl.load(bins_ptr, mask=is_chunk[:, None], other=0)  # [CHUNKS, BINS]
    row_counts = tl.sum(counts, axis=0)  # [BINS]
    num_nonzero = tl.sum(row_counts, axis=0)
    has_top_k = (top_k > 0) & (top_k < num_nonzero)
    last_bin = NUM_BINS - 1
    if has_top_k:
        last_bin = tl.minimum(last_bin, tl.sum((tl.cumsum(row_counts, axis=0) < top_k).to(tl.int32), axis=0))
    if (top_p < 1.0) & (not has_top_k):
        # Each token of a bin weighs at most the bin's upper edge. The tokens outside the nucleus weigh at most
        # (1 - top_p) of the total.
        total = tl.sum(tl.load(chunk_weights_ptr + entry, mask=is_chunk, other=0), axis=0)
        total = total.to(tl.float32) / 1099511627776.0  # the largest weight is 2^40
        upper_bounds = row_counts.to(tl.float32) * tl.exp2(-bin_index.to(tl.float32) / BINS_PER_OCTAVE)
        tail = tl.cumsum(upper_bounds, axis=0, reverse=True)  # the sum from each bin to the last
        excluded = (1.0 - top_p) * total * 0.9999
        last_bin = tl.minimum(last_bin, tl.maximum(tl.sum((tail > excluded).to(tl.int32), axis=0) - 1, 0))
    if (min_p > 0.0) & ((top_p >= 1.0) | (not has_top_k)):  # top-p needs the weight of all tokens that top-k keeps
        last_bin = tl.minimum(last_bin, (-tl.log2(min_p) * BINS_PER_OCTAVE + 0.001).to(tl.int32))
    num_candidates = tl.sum(tl.where(bin_index[None, :] <= last_bin, counts, 0), axis=1)  # [CHUNKS]
    tl.store(candidate_starts_ptr + entry, tl.cumsum(num_candidates, axis=0) - num_candidates, mask=is_chunk)
    tl.store(summary_ptr + row * 3, tl.sum(num_candidates, axis=0))
    tl.store(summary_ptr + row * 3 + 1, last_bin)
    tl.store(summary_ptr + row * 3 + 2, num_nonzero)


@triton.jit
def _gather_candidates(
    adjusted_ptr,
    chunk_max_ptr,
    candidate_starts_ptr,
    summary_ptr,
    values_ptr,
    ids_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    vocab,
    num_chunks,
    adjusted_stride,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    NUM_BINS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    max_logit, status = row_max_and_status(chunk_max_ptr, num_chunks, row, CHUNKS)
    if _is_greedy(temperature, top_k) | (status != 0):
        return
    if not _is_filtered(top_k, tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)):
        return
    if tl.load(summary_ptr + row * 3) > CANDIDATES:
        return
    last_bin = tl.load(summary_ptr + row * 3 + 1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(adjusted_ptr + row * adjusted_stride + token, mask=token < vocab, other=float("-inf"))
    power = log2_ratio_to_max(x, max_logit, inverse_temperature(temperature))
    keep = (_bin_of(power, NUM_BINS) <= last_bin) & (integer_weight(power) > 0)
    start = tl.load(candidate_starts_ptr + row * num_chunks + chunk)
    index = row * CANDIDATES + start + tl.cumsum(keep.to(tl.int32), axis=0) - 1
    tl.store(values_ptr + index, x, mask=keep)
    tl.store(ids_ptr + index, token, mask=keep)


@triton.jit
def _first_argmax(chunk_max_ptr, chunk_argmax_ptr, row, num_chunks, max_logit, CHUNKS: tl.constexpr):
    """Returns the first token with the largest logit."""
    chunk = tl.arange(0, CHUNKS)
    is_chunk = chunk < num_chunks
    chunk_max = tl.load(chunk_max_ptr + row * num_chunks + chunk, mask=is_chunk, other=float("-inf"))
    chunk_argmax = tl.load(chunk_argmax_ptr + row * num_chunks + chunk, mask=is_chunk, other=0x7FFFFFFF)
    return tl.min(tl.where(chunk_max == max_logit, chunk_argmax, 0x7FFFFFFF), axis=0)


@triton.jit
def _draw_by_threshold(source, count, max_logit, inverse, target, BLOCK: tl.constexpr, PIVOTS: tl.constexpr):
    """Returns the index in `source` of the token where the weights, added from the largest logit, exceed `target`."""
    key, above = find_threshold(source, count, max_logit, inverse, target, False, BLOCK, PIVOTS)
    tie_rank = (target - above) // weight_of_key(key, max_logit, inverse)  # which of the tokens with this logit
    num_ties = tl.zeros((), tl.int64)
    index = tl.zeros((), tl.int32)
    for start in range(0, count, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        x = tl.load(source + offsets, mask=offsets < count, other=float("-inf"))
        is_tie = ((order_key(x) == key) & (offsets < count)).to(tl.int64)
        rank = num_ties + tl.cumsum(is_tie, axis=0) - is_tie
        index = tl.maximum(index, tl.max(tl.where((is_tie == 1) & (rank == tie_rank), offsets, 0), axis=0))
        num_ties += tl.sum(is_tie, axis=0)
    return index


@triton.jit
def _draw_in_order(
    row_ptr,
    chunk_weights,
    max_logit,
    inverse,
    hash_bits,
    vocab,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Returns a token drawn from all tokens: where the weights, added in order of token id, exceed the target."""
    target = draw_target(tl.sum(chunk_weights, axis=0), hash_bits)
    drawn_chunk = tl.sum((tl.cumsum(chunk_weights, axis=0) <= target).to(tl.int32), axis=0)
    weight_before = tl.sum(tl.where(tl.arange(0, CHUNKS) < drawn_chunk, chunk_weights, 0), axis=0)
    token = drawn_chunk * CHUNK
    first = drawn_chunk * CHUNK
    for start in range(0, CHUNK, BLOCK):
        offsets = first + start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + offsets, mask=offsets < vocab, other=float("-inf"))
        weight = integer_weight(log2_ratio_to_max(x, max_logit, inverse))
        is_before = (weight_before + tl.cumsum(weight, axis=0)) <= target
        token += tl.sum(is_before.to(tl.int32), axis=0)
        weight_before += tl.sum(weight, axis=0)
    return token


@triton.jit
def _pick_token(
    adjusted_ptr,
    chunk_max_ptr,
    chunk_argmax_ptr,
    chunk_weights_ptr,
    summary_ptr,
    values_ptr,
    ids_ptr,
    out_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    step_ptr,
    vocab,
    num_chunks,
    adjusted_stride,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    top_p, min_p = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    max_logit, token = row_max_and_status(chunk_max_ptr, num_chunks, row, CHUNKS)
    if token == 0:
        if _is_greedy(temperature, top_k):
            token = _first_argmax(chunk_max_ptr, chunk_argmax_ptr, row, num_chunks, max_logit, CHUNKS)
        else:
            inverse = inverse_temperature(temperature)
            hash_bits = hash_seed_step(tl.load(seed_ptr + row), tl.load(step_ptr + row))
            chunk = tl.arange(0, CHUNKS)
            chunk_weights = tl.load(chunk_weights_ptr + row * num_chunks + chunk, mask=chunk < num_chunks, other=0)
            if _is_filtered(top_k, top_p, min_p):
                source, count = adjusted_ptr + row * adjusted_stride, vocab
                num_candidates = tl.load(summary_ptr + row * 3)
                if num_candidates <= CANDIDATES:
                    source, count = values_ptr + row * CANDIDATES, num_candidates
                total = tl.sum(chunk_weights, axis=0)
                num_nonzero = tl.load(summary_ptr + row * 3 + 2)
                min_weight = (min_p * 1099511627776.0).to(tl.float32)  # the largest weight is 2^40
                kept = filtered_weight(
                    source, count, total, num_nonzero, max_logit, inverse, top_k, top_p, min_weight, BLOCK, PIVOTS
                )
                token = _draw_by_threshold(
                    source, count, max_logit, inverse, draw_target(kept, hash_bits), BLOCK, PIVOTS
                )
                if num_candidates <= CANDIDATES:
                    token = tl.load(ids_ptr + row * CANDIDATES + token)
            else:
                token = _draw_in_order(
                    adjusted_ptr + row * adjusted_stride, chunk_weights, max_logit, inverse, hash_bits, vocab,
                    CHUNK, CHUNKS, BLOCK,
                )  # fmt: skip
    tl.store(out_ptr + row, token)


def sample(
    logits: torch.Tensor,
    inputs: SamplingInputs,
    adjustments: LogitAdjustments = NO_ADJUSTMENTS,
    out: torch.Tensor | None = None,
    workspace: SamplingWorkspace | None = None,
) -> torch.Tensor:
    """Like `reference_sampling.sample`: returns token ids [B] int32 for logits [B, V] of any float dtype.

    `workspace` is for at least B rows of V tokens; by default one is allocated. Afterwards `workspace.adjusted` holds
    the adjusted logits. Raises ValueError if shapes do not fit.
    """
    rows, vocab = check_logits(logits)
    out = torch.empty(rows, dtype=torch.int32, device=logits.device) if out is None else out
    work = workspace or SamplingWorkspace.allocate(rows, vocab, logits.device)
    if len(work.adjusted) < rows or work.adjusted.shape[1] != vocab:
        raise ValueError(f"the workspace holds {tuple(work.adjusted.shape)}, the logits are {tuple(logits.shape)}")
    if any(len(column) < rows for column in inputs) or len(out) < rows:
        raise ValueError(f"the parameters or the output have fewer than {rows} rows")
    if not rows:
        return out
    chunk = chunk_size(vocab)
    chunks = triton.cdiv(vocab, chunk)
    filters = (inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p)
    stride = work.adjusted.stride(0)
    sizes = {"CHUNK": chunk, "CHUNKS": triton.next_power_of_2(chunks)}
    launch_adjust_logits(logits, work.adjusted, work.chunk_max, work.chunk_argmax, adjustments)
    _sum_weights[(chunks, rows)](
        work.adjusted, work.chunk_max, work.chunk_weights, work.likelihood_bins, *filters, vocab, chunks, stride,
        NUM_BINS=NUM_BINS, **sizes, num_warps=8,
    )  # fmt: skip
    _find_cutoff[(rows,)](
        work.chunk_weights, work.chunk_max, work.likelihood_bins, work.candidate_starts, work.summary, *filters, chunks,
        CHUNKS=sizes["CHUNKS"], NUM_BINS=NUM_BINS, num_warps=8,
    )  # fmt: skip
    _gather_candidates[(chunks, rows)](
        work.adjusted, work.chunk_max, work.candidate_starts, work.summary, work.values, work.ids, *filters,
        vocab, chunks, stride, NUM_BINS=NUM_BINS, CANDIDATES=CANDIDATES, **sizes, num_warps=16,
    )  # fmt: skip
    _pick_token[(rows,)](
        work.adjusted, work.chunk_max, work.chunk_argmax, work.chunk_weights, work.summary, work.values, work.ids, out,
        *filters, inputs.seed, inputs.step, vocab, chunks, stride,
        CANDIDATES=CANDIDATES, BLOCK=BLOCK, PIVOTS=PIVOTS, **sizes, num_warps=8,
    )  # fmt: skip
    return out
