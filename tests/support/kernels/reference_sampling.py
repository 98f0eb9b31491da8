"""Reference of the Triton sampling kernels: masks, sampling and logprobs in plain torch and Python integers.

Probabilities are integer weights: token i has floor(2^40 * 2^((x_i - max x) * log2(e) / temperature)), with the power
taken in float32. Sums of integers do not depend on their order, so no split of the work changes a token. A draw
multiplies the hash of (seed, step), as a 64-bit fraction, by the weight that the filters keep. It selects the token at
which the running sum first exceeds that target; tokens are in falling order of logits (ties by id) if a filter is
set, else in order of ids.

This is the rule of runtime/sampling/sampler.py with 40-bit weights instead of float64 probabilities. The two differ
where a draw or the edge of a nucleus is within a relative 1e-6 of a border, and tokens with less than 2^-40 of the
largest probability are never sampled.
"""

from __future__ import annotations

import torch

from plait.kernels.sampling_inputs import (
    NO_ADJUSTMENTS,
    NO_TOKEN,
    NOT_FINITE,
    LogitAdjustments,
    Penalties,
    SamplingInputs,
)

LOG2E = 1.4426950408889634
WEIGHT_BITS = 40
HASH_RANGE = 2**64


def adjust_logits(
    logits: torch.Tensor, adjusted: torch.Tensor, status: torch.Tensor, adjustments: LogitAdjustments = NO_ADJUSTMENTS
) -> None:
    """Writes logits [B, V] with penalties, bias and mask (-inf) applied, in this order, to adjusted [B, V] float32.

    Writes to status [B] int32 NOT_FINITE if an original logit is NaN or +inf, NO_TOKEN if every adjusted logit is
    -inf, else 0. `adjusted` may be `logits`.
    """
    wide = logits.float()
    not_finite = (wide.isnan() | (wide == float("inf"))).any(-1)
    masks, bias, penalties = adjustments
    result = torch.where(wide == 0, 0.0, wide)  # no negative zero
    if penalties is not None:
        result = _with_repetition_penalty(result, penalties)
        counts = penalties.counts[penalties.rows.long().clamp(min=0)] * (penalties.rows >= 0)[:, None]
        result = result - (counts * penalties.frequency[:, None] + (counts > 0) * penalties.presence[:, None])
    if bias is not None:
        has_bias = (bias.rows >= 0)[:, None]
        result = torch.where(has_bias, result + bias.values[bias.rows.long().clamp(min=0)], result)
    if masks is not None:
        allowed = _unpack(masks.words, masks.rows, logits.shape[1]) | (masks.rows < 0)[:, None]
        result = torch.where(allowed, result, float("-inf"))
    empty = (result == float("-inf")).all(-1)
    status.copy_(torch.where(not_finite, NOT_FINITE, torch.where(empty, NO_TOKEN, 0)))
    adjusted.copy_(result)


def _with_repetition_penalty(logits: torch.Tensor, penalties: Penalties) -> torch.Tensor:
    """Returns logits [B, V] float32 after the repetition penalty of the prompt's and the output's tokens."""
    is_used = penalties.counts[penalties.rows.long().clamp(min=0)] > 0
    is_used |= _unpack(penalties.prompts, penalties.rows, logits.shape[1])
    penalty = penalties.repetition[:, None]
    penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(is_used & (penalties.rows >= 0)[:, None], penalized, logits)


def _unpack(words: torch.Tensor, rows: torch.Tensor, vocab: int) -> torch.Tensor:
    """Returns the bits [B, V] bool of words[rows], packed as in `RowMasks`; those of row 0 for a negative row."""
    tokens = torch.arange(vocab, device=words.device)
    return ((words[rows.long().clamp(min=0)][:, tokens // 32] >> (tokens % 32)) & 1).bool()


def count_tokens(counts: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    """Adds one to counts[rows[b], tokens[b]] int32 for each b where neither is negative. In place."""
    real = (rows >= 0) & (tokens >= 0)
    ones = torch.ones(int(real.sum()), dtype=counts.dtype, device=counts.device)
    counts.index_put_((rows[real].long(), tokens[real].long()), ones, accumulate=True)


def hash_seed_step(seed: int, step: int) -> int:
    """Hashes (seed, step) to 64 bits by two rounds of splitmix64 (Steele et al. 2014); clears the lowest 11 bits."""
    word = (seed * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) % HASH_RANGE
    for _ in range(2):
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) % HASH_RANGE
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) % HASH_RANGE
        word ^= word >> 31
    return word >> 11 << 11


def sample(
    logits: torch.Tensor,
    inputs: SamplingInputs,
    adjustments: LogitAdjustments = NO_ADJUSTMENTS,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Samples token ids [B] int32 from logits [B, V], NO_TOKEN or NOT_FINITE included; see the file's header.

    Top-k keeps the k largest logits, top-p the largest of those that together reach its share of their weight, min-p
    those with at least that fraction of the largest probability.
    """
    adjusted = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    status = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    adjust_logits(logits, adjusted, status, adjustments)
    columns = [column.tolist() for column in inputs]
    tokens = [
        status_here or _sample_row(row, *(column[i] for column in columns))
        for i, (row, status_here) in enumerate(zip(adjusted, status.tolist(), strict=True))
    ]
    token_ids = torch.tensor(tokens, dtype=torch.int32, device=logits.device)
    return token_ids if out is None else out.copy_(token_ids)


def integer_weights(row: torch.Tensor, temperature: float) -> torch.Tensor:
    """Returns the integer weights [V] int64 of one row of finite or -inf logits [V] float32."""
    inverse = (LOG2E / torch.tensor(temperature, dtype=torch.float32)).clamp(max=1e38)
    return (torch.exp2((row - row.max()) * inverse) * 2.0**WEIGHT_BITS).long()


def _sample_row(
    row: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, step: int
) -> int:
    if temperature <= 0 or top_k == 1:
        return int((row == row.max()).nonzero()[0])
    weight = integer_weights(row, temperature)
    if top_k <= 0 and top_p >= 1 and min_p <= 0:
        return _first_above(weight.cumsum(0), (int(weight.sum()) * hash_seed_step(seed, step)) // HASH_RANGE)
    order = torch.sort(row, descending=True, stable=True).indices
    ordered = weight[order]
    running = ordered.cumsum(0)
    kept = int(running[-1] if top_k <= 0 else running[min(top_k, len(row)) - 1])
    if top_p < 1:
        limit = -((-kept * int(top_p * 2.0**63)) // 2**63)  # rounded up
        kept = int(running[_first_above(running, limit - 1)])
    if min_p > 0:
        likely = weight.double() >= min_p * 2.0**WEIGHT_BITS
        kept = min(kept, int(weight[likely].sum()))
    return int(order[_first_above(running, (kept * hash_seed_step(seed, step)) // HASH_RANGE)])


def _first_above(running: torch.Tensor, target: int) -> int:
    """Returns the first index at which the running sum [V] exceeds the target."""
    return int((running <= target).sum())


def gather_logprobs(logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Returns log_softmax(logits [B, V])[rows[i], tokens[i]], float32 [N]; NaN for a negative row or token."""
    real = (rows >= 0) & (tokens >= 0)
    logprobs = torch.log_softmax(logits.float(), -1)[rows.clamp(min=0).long(), tokens.clamp(min=0).long()]
    return torch.where(real, logprobs, float("nan"))


def top_logprobs(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the `count` largest of log_softmax(logits [B, V]), falling, ties by id: float32 and int32 ids [B, count].

    Missing tokens, if V < count, are -inf with id -1.
    """
    order = torch.sort(logits.float(), dim=-1, descending=True, stable=True).indices[:, :count]
    values = torch.log_softmax(logits.float(), -1).gather(1, order)
    missing = count - order.shape[1]
    values = torch.nn.functional.pad(values, (0, missing), value=float("-inf"))
    return values, torch.nn.functional.pad(order.int(), (0, missing), value=-1)
