"""Draws one token per row: greedy, temperature, top-k, top-p, min-p, seeded, without sorting the vocabulary.

    shape      [chunks, rows]  bends the logits, finds the peaks                                      (mask.py)
    weigh      [chunks, rows]  sums whole-number weights; counts tokens in 256 bins of likelihood
    cut        [rows]          the bin below which nothing can be kept, and where each chunk's survivors go
    collect    [chunks, rows]  writes the survivors, in order of token id
    choose     [rows]          finds the exact edges among them and the token

Weights are integers, so sums come out the same in any order and any split: a token depends on its row alone.
A row with more than CANDIDATES survivors (a flat nucleus) is searched where it stands, which is slower.
Knows: numbers in arrays. Must not know: requests. The rule itself is in reference_sampling's header.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from plait.kernels.sampling_inputs import UNSHAPED, LogitShaping, SamplingInputs
from plait.kernels.triton.chunks import (
    check_logits,
    chunk_size,
    inverse_temperature,
    order_key,
    relative_power,
    weight_of,
)
from plait.kernels.triton.mask import launch_shape, row_peak
from plait.kernels.triton.weight_search import crossing, draw_word, kept_weight, share, weight_at

CANDIDATES = 4096
BINS = 256
BINS_PER_POWER = tl.constexpr(BINS / 40)  # bins reach down to 2^-40, the smallest weight
BLOCK = 1024  # tokens that `choose` looks at together
PIVOTS = 8


@dataclass(frozen=True)
class SamplingWorkspace:
    """Scratch memory of `sample` for up to B rows of V tokens; S chunks. A captured graph keeps one."""

    shaped: torch.Tensor  # [B, V] float32
    peaks: torch.Tensor  # [B, S] float32
    best: torch.Tensor  # [B, S] int32
    totals: torch.Tensor  # [B, S] int64
    bins: torch.Tensor  # [B, S, BINS] int32
    starts: torch.Tensor  # [B, S] int32
    summary: torch.Tensor  # [B, 3] int32: survivors, cut, tokens of any weight
    values: torch.Tensor  # [B, CANDIDATES] float32
    ids: torch.Tensor  # [B, CANDIDATES] int32

    @classmethod
    def allocate(cls, rows: int, vocab: int, device: torch.device) -> SamplingWorkspace:
        """4 V + 1,100 S + 32,768 bytes per row."""
        chunks = triton.cdiv(vocab, chunk_size(vocab))

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            shaped=empty(rows, triton.cdiv(vocab, 16) * 16, dtype=torch.float32)[:, :vocab],
            peaks=empty(rows, chunks, dtype=torch.float32),
            best=empty(rows, chunks, dtype=torch.int32),
            totals=empty(rows, chunks, dtype=torch.int64),
            bins=empty(rows, chunks, BINS, dtype=torch.int32),
            starts=empty(rows, chunks, dtype=torch.int32),
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
def _bin_of(power, BINS: tl.constexpr):
    return tl.minimum((-tl.maximum(power, -64.0) * BINS_PER_POWER).to(tl.int32), BINS - 1)


@triton.jit
def _weigh(
    shaped_ptr,
    peaks_ptr,
    totals_ptr,
    bins_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    vocab,
    num_chunks,
    shaped_stride,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BINS: tl.constexpr,
):
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    peak, status = row_peak(peaks_ptr, num_chunks, row, CHUNKS)
    if _is_greedy(temperature, top_k) | (status != 0):
        return
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(shaped_ptr + row * shaped_stride + token, mask=token < vocab, other=float("-inf"))
    power = relative_power(x, peak, inverse_temperature(temperature))
    weight = weight_of(power)
    at = row * num_chunks + chunk
    tl.store(totals_ptr + at, tl.sum(weight, axis=0))
    if _is_filtered(top_k, tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)):
        counts = tl.histogram(_bin_of(power, BINS), BINS, mask=weight > 0)
        tl.store(bins_ptr + at * BINS + tl.arange(0, BINS), counts)


@triton.jit
def _cut(
    totals_ptr,
    peaks_ptr,
    bins_ptr,
    starts_ptr,
    summary_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    num_chunks,
    CHUNKS: tl.constexpr,
    BINS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    top_p, min_p = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    _, status = row_peak(peaks_ptr, num_chunks, row, CHUNKS)
    if _is_greedy(temperature, top_k) | (status != 0):
        return
    if not _is_filtered(top_k, top_p, min_p):
        return
    chunk, place = tl.arange(0, CHUNKS), tl.arange(0, BINS)
    at = row * num_chunks + chunk
    there = chunk < num_chunks
    counts = tl.load(bins_ptr + at[:, None] * BINS + place[None, :], mask=there[:, None], other=0)  # [CHUNKS, BINS]
    whole = tl.sum(counts, axis=0)  # [BINS]
    cut = BINS - 1
    if top_k > 0:
        cut = tl.minimum(cut, tl.sum((tl.cumsum(whole, axis=0) < top_k).to(tl.int32), axis=0))
    if top_p < 1.0:
        # A bin weighs at most its upper edge for each token; what follows the nucleus weighs (1 - top_p) of all.
        total = tl.sum(tl.load(totals_ptr + at, mask=there, other=0), axis=0).to(tl.float32) / 1099511627776.0
        most = whole.to(tl.float32) * tl.exp2(-place.to(tl.float32) / BINS_PER_POWER)
        rest = tl.cumsum(most, axis=0, reverse=True)  # from each bin on
        spare = (1.0 - top_p) * total * 0.9999
        cut = tl.minimum(cut, tl.maximum(tl.sum((rest > spare).to(tl.int32), axis=0) - 1, 0))
    if min_p > 0.0:
        cut = tl.minimum(cut, (-tl.log2(min_p) * BINS_PER_POWER + 0.001).to(tl.int32))
    kept = tl.sum(tl.where(place[None, :] <= cut, counts, 0), axis=1)  # [CHUNKS]
    tl.store(starts_ptr + at, tl.cumsum(kept, axis=0) - kept, mask=there)
    tl.store(summary_ptr + row * 3, tl.sum(kept, axis=0))
    tl.store(summary_ptr + row * 3 + 1, cut)
    tl.store(summary_ptr + row * 3 + 2, tl.sum(whole, axis=0))


@triton.jit
def _collect(
    shaped_ptr,
    peaks_ptr,
    starts_ptr,
    summary_ptr,
    values_ptr,
    ids_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    vocab,
    num_chunks,
    shaped_stride,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BINS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    peak, status = row_peak(peaks_ptr, num_chunks, row, CHUNKS)
    if _is_greedy(temperature, top_k) | (status != 0):
        return
    if not _is_filtered(top_k, tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)):
        return
    if tl.load(summary_ptr + row * 3) > CANDIDATES:
        return
    cut = tl.load(summary_ptr + row * 3 + 1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(shaped_ptr + row * shaped_stride + token, mask=token < vocab, other=float("-inf"))
    power = relative_power(x, peak, inverse_temperature(temperature))
    keep = (_bin_of(power, BINS) <= cut) & (weight_of(power) > 0)
    start = tl.load(starts_ptr + row * num_chunks + chunk)
    to = row * CANDIDATES + start + tl.cumsum(keep.to(tl.int32), axis=0) - 1
    tl.store(values_ptr + to, x, mask=keep)
    tl.store(ids_ptr + to, token, mask=keep)


@triton.jit
def _choose(
    shaped_ptr,
    peaks_ptr,
    best_ptr,
    totals_ptr,
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
    shaped_stride,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    top_p, min_p = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    peak, token = row_peak(peaks_ptr, num_chunks, row, CHUNKS)
    if token == 0:
        chunk = tl.arange(0, CHUNKS)
        there = chunk < num_chunks
        inverse = inverse_temperature(temperature)
        if _is_greedy(temperature, top_k):
            peaks = tl.load(peaks_ptr + row * num_chunks + chunk, mask=there, other=float("-inf"))
            best = tl.load(best_ptr + row * num_chunks + chunk, mask=there, other=0x7FFFFFFF)
            token = tl.min(tl.where(peaks == peak, best, 0x7FFFFFFF), axis=0)
        else:
            word = draw_word(tl.load(seed_ptr + row), tl.load(step_ptr + row))
            totals = tl.load(totals_ptr + row * num_chunks + chunk, mask=there, other=0)
            total = tl.sum(totals, axis=0)
            if _is_filtered(top_k, top_p, min_p):
                source, count = shaped_ptr + row * shaped_stride, vocab
                found = tl.load(summary_ptr + row * 3)
                if found <= CANDIDATES:
                    source, count = values_ptr + row * CANDIDATES, found
                num_weighty = tl.load(summary_ptr + row * 3 + 2)
                kept = kept_weight(source, count, total, num_weighty, peak, inverse, top_k, top_p, min_p, BLOCK, PIVOTS)
                target = share(kept, word)
                key, above = crossing(source, count, peak, inverse, target, False, BLOCK, PIVOTS)
                wanted = (target - above) // weight_at(key, peak, inverse)  # which of the ties
                seen = tl.zeros((), tl.int64)
                place = tl.zeros((), tl.int32)
                for start in range(0, count, BLOCK):
                    at = start + tl.arange(0, BLOCK)
                    x = tl.load(source + at, mask=at < count, other=float("-inf"))
                    match = ((order_key(x) == key) & (at < count)).to(tl.int64)
                    rank = seen + tl.cumsum(match, axis=0) - match
                    place = tl.maximum(place, tl.max(tl.where((match == 1) & (rank == wanted), at, 0), axis=0))
                    seen += tl.sum(match, axis=0)
                token = place
                if found <= CANDIDATES:
                    token = tl.load(ids_ptr + row * CANDIDATES + place)
            else:
                target = share(total, word)
                here = tl.sum((tl.cumsum(totals, axis=0) <= target).to(tl.int32), axis=0)
                running = tl.sum(tl.where(chunk < here, totals, 0), axis=0)
                token = here * CHUNK
                first = here * CHUNK
                for start in range(0, CHUNK, BLOCK):
                    at = first + start + tl.arange(0, BLOCK)
                    x = tl.load(shaped_ptr + row * shaped_stride + at, mask=at < vocab, other=float("-inf"))
                    weight = weight_of(relative_power(x, peak, inverse))
                    passed = (running + tl.cumsum(weight, axis=0)) <= target
                    token += tl.sum(passed.to(tl.int32), axis=0)
                    running += tl.sum(weight, axis=0)
    tl.store(out_ptr + row, token)


def sample(
    logits: torch.Tensor,
    inputs: SamplingInputs,
    shaping: LogitShaping = UNSHAPED,
    out: torch.Tensor | None = None,
    workspace: SamplingWorkspace | None = None,
) -> torch.Tensor:
    """As `reference_sampling.sample`: token ids [B] int32 from logits [B, V] of any float dtype.

    `workspace` for at least B rows of V tokens; without it one is allocated. `workspace.shaped` holds the shaped
    logits afterwards. Raises ValueError where shapes do not fit.
    """
    rows, vocab = check_logits(logits)
    out = torch.empty(rows, dtype=torch.int32, device=logits.device) if out is None else out
    work = workspace or SamplingWorkspace.allocate(rows, vocab, logits.device)
    if len(work.shaped) < rows or work.shaped.shape[1] != vocab:
        raise ValueError(f"the workspace holds {tuple(work.adjusted.shape)}, the logits are {tuple(logits.shape)}")
    if any(len(column) < rows for column in inputs) or len(out) < rows:
        raise ValueError(f"the parameters or the output have fewer than {rows} rows")
    if not rows:
        return out
    chunk = chunk_size(vocab)
    chunks = triton.cdiv(vocab, chunk)
    filters = (inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p)
    stride = work.shaped.stride(0)
    sizes = {"CHUNK": chunk, "CHUNKS": triton.next_power_of_2(chunks)}
    launch_shape(logits, work.shaped, work.peaks, work.best, shaping)
    _weigh[(chunks, rows)](
        work.shaped, work.peaks, work.totals, work.bins, *filters, vocab, chunks, stride,
        BINS=BINS, **sizes, num_warps=8,
    )  # fmt: skip
    _cut[(rows,)](
        work.totals, work.peaks, work.bins, work.starts, work.summary, *filters, chunks,
        CHUNKS=sizes["CHUNKS"], BINS=BINS, num_warps=8,
    )  # fmt: skip
    _collect[(chunks, rows)](
        work.shaped, work.peaks, work.starts, work.summary, work.values, work.ids, *filters, vocab, chunks, stride,
        BINS=BINS, CANDIDATES=CANDIDATES, **sizes, num_warps=16,
    )  # fmt: skip
    _choose[(rows,)](
        work.shaped, work.peaks, work.best, work.totals, work.summary, work.values, work.ids, out,
        *filters, inputs.seed, inputs.step, vocab, chunks, stride,
        CANDIDATES=CANDIDATES, BLOCK=BLOCK, PIVOTS=PIVOTS, **sizes, num_warps=8,
    )  # fmt: skip
    return out
