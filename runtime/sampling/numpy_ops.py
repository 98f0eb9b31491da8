"""Logit operations on the host, in NumPy.

Sums are taken one row at a time, so that a row's bits do not depend on the other rows of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from plait.runtime.arrays import Float32Array, Float64Array
from plait.runtime.batch.request import GenerationRequest
from plait.runtime.sampling.logit_ops import (
    MASK_BYTE_BIAS,
    TOP_P_FIRST_PASS,
    DrawState,
    TokenMask,
    TopLogprobs,
    failed_token,
    hash_uniform,
    is_kept,
    is_typical,
    output_counts_after,
)

TokenIds = npt.NDArray[np.int64]

DRAW_BLOCK = 512  # tokens whose weights are summed before the draw is located inside one block
MIN_TEMPERATURE = 1e-30  # smaller temperatures also leave only the most likely token


class NumpyLogitOperations:
    """Implements `LogitOperations`. Takes arrays, or tensors, which are copied to the host."""

    def prepare(self, logits: Any) -> Float32Array:
        """See `LogitOperations`."""
        array: Float32Array = logits if isinstance(logits, np.ndarray) else logits.cpu().numpy()
        return array

    def log_softmax(self, logits: Float32Array) -> Float32Array:
        """See `LogitOperations`. Rows with NaN or +inf become NaN."""
        with np.errstate(invalid="ignore"):
            shifted = logits - logits.max(axis=-1, keepdims=True)
            logprobs: Float32Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        return logprobs

    def values(self, row: Float32Array, ids: Sequence[int]) -> list[float]:
        """See `LogitOperations`."""
        values: list[float] = row[list(ids)].tolist()
        return values

    def topk(self, row: Float32Array, count: int) -> TopLogprobs:
        """See `LogitOperations`."""
        ids = largest_ids(row, min(count, len(row)))
        return list(zip(ids.tolist(), row[ids].tolist(), strict=True))

    def apply_penalties_and_bias(
        self, row: Float32Array, request: GenerationRequest, ahead: Sequence[int] = ()
    ) -> None:
        """See `LogitOperations`."""
        params = request.params
        if request.seen_tokens is not None:
            ids = request.seen_tokens.ids(ahead)
            logits, penalty = row[ids], row.dtype.type(params.repetition_penalty)
            row[ids] = np.where(logits > 0, logits / penalty, logits * penalty)
        if output_counts := output_counts_after(request, ahead):
            counts = np.array(list(output_counts.values()), row.dtype)
            row[list(output_counts)] -= counts * params.frequency_penalty + params.presence_penalty
        if params.logit_bias:
            row[list(params.logit_bias)] += np.array(list(params.logit_bias.values()), row.dtype)

    def apply_mask(self, logits: Float32Array, mask: TokenMask) -> None:
        """See `LogitOperations`. The table lookup costs the same at any density of the mask."""
        for row, words in zip(mask.rows, mask.words, strict=True):
            logits[row] += MASK_BYTE_BIAS.take(words.view(np.uint8), axis=0).reshape(-1)[: logits.shape[1]]

    def probabilities(self, row: Float32Array, draw: GenerationRequest | DrawState) -> Float32Array | None:
        """See `LogitOperations`."""
        peak = float(row.max())
        if not math.isfinite(peak):
            return None
        if draw.params.is_filtered:
            ids, kept_weights = _filtered_weights(row, peak, draw)
            weights = np.zeros_like(row)
            weights[ids] = kept_weights
        else:
            weights = _weights(row, peak, draw)
        weights *= np.float32(1 / weights.sum(dtype=np.float64))
        return weights

    def draw_tokens(self, logits: Float32Array, draws: Sequence[GenerationRequest | DrawState]) -> list[int]:
        """See `LogitOperations`."""
        peaks, tokens = row_argmax(logits)
        for row, (peak, draw) in enumerate(zip(peaks, draws, strict=True)):
            if not math.isfinite(peak):
                tokens[row] = failed_token(peak)
            elif not draw.params.is_greedy:
                sample = _sample_filtered if draw.params.is_filtered else _sample_all
                tokens[row] = sample(logits[row], peak, draw)
        return tokens


def row_argmax(logits: Float32Array) -> tuple[list[float], list[int]]:
    """The largest value of each row of logits [B, V], NaN if there is one, and the first token that has it."""
    if not logits.size:
        return [], []
    best = logits.argmax(axis=-1)
    return np.take_along_axis(logits, best[:, None], axis=-1)[:, 0].tolist(), best.tolist()


def _sample_all(row: Float32Array, peak: float, draw: GenerationRequest | DrawState) -> int:
    """Samples from one row [V] without filters: first a block of tokens, then a token of the block."""
    weights = _weights(row, peak, draw)
    cumulative = block_sums(weights).cumsum()
    target = hash_uniform(draw.seed, draw.num_sampled) * cumulative[-1]
    block = first_above(cumulative, target)
    sum_before = cumulative[block - 1] if block else 0.0
    in_block = weights[block * DRAW_BLOCK : (block + 1) * DRAW_BLOCK].cumsum(dtype=np.float64)
    return block * DRAW_BLOCK + first_above(in_block, target - sum_before)


def _sample_filtered(row: Float32Array, peak: float, draw: GenerationRequest | DrawState) -> int:
    """Samples from one row [V] with filters; ties are ordered by token id."""
    ids, weights = _filtered_weights(row, peak, draw)
    cumulative = weights.cumsum()
    return int(ids[first_above(cumulative, hash_uniform(draw.seed, draw.num_sampled) * cumulative[-1])])


def _filtered_weights(
    row: Float32Array, peak: float, draw: GenerationRequest | DrawState
) -> tuple[TokenIds, Float64Array]:
    """The likeliest tokens of one row [V], falling, and their weights: 0 where a filter leaves them out."""
    params, all_weights = draw.params, _weights(row, peak, draw)
    ids = largest_ids(row, min(len(row), TOP_P_FIRST_PASS if params.top_k < 0 else max(params.top_k, 1)))
    weights: Float64Array = all_weights[ids].astype(np.float64)
    total = float((weights if params.top_k > 0 else all_weights).sum(dtype=np.float64))
    if params.top_k < 0 and len(ids) < len(row) and weights.sum() < params.top_p * total:
        ids = largest_ids(row, len(row))
        weights = all_weights[ids].astype(np.float64)
    kept = is_kept(weights, weights.cumsum() - weights, total, params)
    if not kept.any():
        return ids[:1], np.ones(1)
    weights = np.where(kept, weights, 0.0)
    return ids, weights if params.typical_p == 1.0 else np.where(is_typical(weights, params.typical_p), weights, 0.0)


def _weights(row: Float32Array, peak: float, draw: GenerationRequest | DrawState) -> Float32Array:
    """Each token's probability relative to the most likely one. The peak is at 0, so no temperature overflows."""
    weights: Float32Array = row - np.float32(peak)  # the only new memory: a row is large enough to cost page faults
    with np.errstate(over="ignore"):
        if draw.params.temperature != 1.0:
            weights /= np.float32(max(draw.params.temperature, MIN_TEMPERATURE))
        np.exp(weights, out=weights)
    return weights


def block_sums(weights: Float32Array | Float64Array) -> Float64Array:
    """The sums of weights [V] over blocks of DRAW_BLOCK tokens, the last of which may be shorter."""
    num_in_blocks = len(weights) - len(weights) % DRAW_BLOCK
    sums: Float64Array = weights[:num_in_blocks].reshape(-1, DRAW_BLOCK).sum(axis=1, dtype=np.float64)
    return np.append(sums, weights[num_in_blocks:].sum(dtype=np.float64))


def first_above(cumulative: Float64Array, target: float) -> int:
    """The first index where cumulative weights [N] exceed `target`; never one of weight 0, whatever the rounding."""
    return min(int(cumulative.searchsorted(target, side="right")), int(cumulative.searchsorted(cumulative[-1])))


def largest_ids(row: Float32Array | Float64Array, count: int) -> TokenIds:
    """The ids of the `count` largest values of row [V], falling, equal values by token id."""
    if count < len(row):
        floor = np.partition(row, len(row) - count)[len(row) - count]
        above = np.flatnonzero(row > floor)
        ids = np.concatenate([above, np.flatnonzero(row == floor)[: count - len(above)]])
    else:
        ids = np.arange(len(row))
    order: TokenIds = ids[np.argsort(-row[ids], kind="stable")]
    return order
