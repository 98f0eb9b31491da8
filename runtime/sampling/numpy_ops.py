"""What the sampler does to logits on the host, in numpy: `sampler.LogitOperations`.

A row at a time wherever sums are taken, so that its bits do not depend on the other rows.

Knows: arrays, sampling parameters. Must not know: torch, rows of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from plait.runtime.batch.request import GenerationRequest
from plait.runtime.sampling.filters import keep_mask
from plait.runtime.sampling.sampler import (
    NO_TOKEN,
    NOT_FINITE,
    DrawState,
    TokenMask,
    TopLogprobs,
    has_filters,
    hash_uniform,
)

Float32Array = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

TOP_P_FIRST_PASS = 1024  # top-p looks this far down the sorted tokens before it sorts them all
DRAW_BLOCK = 512  # tokens whose weights are added up before one of them is looked for
MIN_TEMPERATURE = 1e-30  # a temperature below this one leaves the likeliest token alone, too

# bias of the 8 tokens behind each possible mask byte: a table look-up costs the same at any density
_ALLOWED = (np.arange(256)[:, None] >> np.arange(8)) & 1  # [256, 8]
MASK_BYTE_BIAS = np.where(_ALLOWED == 1, np.float32(0.0), np.float32(-np.inf))


class NumpyLogitOperations:
    """See `LogitOperations`, which says what each does; logits are arrays, or tensors, which come to the host."""

    def prepare(self, logits: Any) -> Float32Array:
        found: Float32Array = logits if isinstance(logits, np.ndarray) else logits.cpu().numpy()
        return found

    def log_softmax(self, logits: Float32Array) -> Float32Array:
        with np.errstate(invalid="ignore"):  # rows with NaN or infinity come out as NaN
            shifted = logits - logits.max(axis=-1, keepdims=True)
            found: Float32Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        return found

    def values(self, row: Float32Array, ids: Sequence[int]) -> list[float]:
        found: list[float] = row[list(ids)].tolist()
        return found

    def topk(self, row: Float32Array, count: int) -> TopLogprobs:
        ids = _largest(row, min(count, len(row)))
        return list(zip(ids.tolist(), row[ids].tolist(), strict=True))

    def apply_penalties_and_bias(self, row: Float32Array, gen: GenerationRequest) -> None:
        params = gen.params
        if params.logit_bias:
            row[list(params.logit_bias)] += np.array(list(params.logit_bias.values()), row.dtype)
        if gen.output_counts and (params.frequency_penalty or params.presence_penalty):
            counts = np.array(list(gen.output_counts.values()), row.dtype)
            row[list(gen.output_counts)] -= counts * params.frequency_penalty + params.presence_penalty

    def apply_mask(self, logits: Float32Array, mask: TokenMask) -> None:
        for row, words in zip(mask.rows, mask.words, strict=True):
            logits[row] += MASK_BYTE_BIAS.take(words.view(np.uint8), axis=0).reshape(-1)[: logits.shape[1]]

    def draw_tokens(self, logits: Float32Array, generations: Sequence[GenerationRequest | DrawState]) -> list[int]:
        highest, tokens = row_argmax(logits)
        for i, (peak, gen) in enumerate(zip(highest, generations, strict=True)):
            if not math.isfinite(peak):
                tokens[i] = NO_TOKEN if peak == -math.inf else NOT_FINITE
            elif not gen.params.is_greedy:
                drawing = _draw_filtered if has_filters(gen) else _draw_plain
                tokens[i] = drawing(logits[i], peak, gen)
        return tokens


def row_argmax(logits: Float32Array) -> tuple[list[float], list[int]]:
    """The largest of each row of logits [B, V], NaN where there is one, and the first token that has it."""
    if not logits.size:
        return [], []
    best = logits.argmax(axis=-1)
    return np.take_along_axis(logits, best[:, None], axis=-1)[:, 0].tolist(), best.tolist()


def _draw_plain(row: Float32Array, peak: float, gen: GenerationRequest | DrawState) -> int:
    """Draws from one row [V] whose largest entry is `peak`: first one of its blocks, then a token of that."""
    weights = _weights(row, peak, gen)
    whole = len(weights) - len(weights) % DRAW_BLOCK
    in_blocks = weights[:whole].reshape(-1, DRAW_BLOCK).sum(axis=1, dtype=np.float64)
    sums = np.append(in_blocks, weights[whole:].sum(dtype=np.float64)).cumsum()
    wanted = hash_uniform(gen.seed, gen.num_sampled) * sums[-1]
    block = _first_above(sums, wanted)
    before = sums[block - 1] if block else 0.0
    inside = weights[block * DRAW_BLOCK : (block + 1) * DRAW_BLOCK].cumsum(dtype=np.float64)
    return block * DRAW_BLOCK + _first_above(inside, wanted - before)


def _draw_filtered(row: Float32Array, peak: float, gen: GenerationRequest | DrawState) -> int:
    """Draws from one row [V] under top-k, then top-p of what is left, then min-p; ties in order of token id."""
    params, weights = gen.params, _weights(row, peak, gen)
    ids = _largest(row, min(len(row), TOP_P_FIRST_PASS if params.top_k < 0 else max(params.top_k, 1)))
    values: Weights = weights[ids].astype(np.float64)
    total = float((values if params.top_k > 0 else weights).sum(dtype=np.float64))
    if params.top_k < 0 and len(ids) < len(row) and values.sum() < params.top_p * total:
        ids = _largest(row, len(row))
        values = weights[ids].astype(np.float64)
    before = values.cumsum() - values  # the mass of the more likely tokens
    keep = keep_mask(values, before, total, params)
    if not keep.any():
        return int(ids[0])
    sums = np.where(keep, values, 0.0).cumsum()
    return int(ids[_first_above(sums, hash_uniform(gen.seed, gen.num_sampled) * sums[-1])])


def _weights(row: Float32Array, peak: float, gen: GenerationRequest | DrawState) -> Float32Array:
    """What each token's probability is to the likeliest one's; the peak at 0, so that no temperature overflows."""
    with np.errstate(over="ignore"):
        found: Float32Array = np.exp(
            (row - np.float32(peak)) / np.float32(max(gen.params.temperature, MIN_TEMPERATURE))
        )
    return found


def _first_above(sums: Weights, wanted: float) -> int:
    """Where running sums [N] of weights first exceed `wanted`; never at a weight of 0, whatever was rounded."""
    return min(int(sums.searchsorted(wanted, side="right")), int(sums.searchsorted(sums[-1])))


def _largest(row: Float32Array, count: int) -> Ids:
    """The ids of the `count` largest of row [V] in falling order, equal ones by token id."""
    if count < len(row):
        floor = np.partition(row, len(row) - count)[len(row) - count]
        above = np.flatnonzero(row > floor)
        ids = np.concatenate([above, np.flatnonzero(row == floor)[: count - len(above)]])
    else:
        ids = np.arange(len(row))
    order: Ids = ids[np.argsort(-row[ids], kind="stable")]
    return order
