"""Masks, sampling and logprobs in plain torch and Python integers: what the Triton kernels are held against.

A row's distribution is over whole numbers. Token i weighs floor(2^40 * 2^((x_i - max x) * log2(e) / temperature)),
the power taken in float32. Sums of integers have no order, so no split of the work can change a token. The
draw is the 64-bit product of (seed, step)'s hash with the kept weight, and picks the token at which the running
sum, in falling order of logits (ties by id) or in order of ids where nothing is filtered, first exceeds it.
This is runtime.sampler's rule with 40-bit weights in place of float64 probabilities: the two differ where a draw
or a nucleus' edge falls within a relative 1e-6 of a border, and tokens less likely than 2^-40 of the likeliest
are never drawn.
Knows: torch. Must not know: requests.
"""

from __future__ import annotations

import torch

from plait.kernels.sampling_inputs import NO_ADJUSTMENTS, NO_TOKEN, NOT_FINITE, LogitAdjustments, SamplingInputs

LOG2E = 1.4426950408889634
WEIGHT_BITS = 40
HASH_RANGE = 2**64


def adjust_logits(
    logits: torch.Tensor, adjusted: torch.Tensor, status: torch.Tensor, adjustments: LogitAdjustments = NO_ADJUSTMENTS
) -> None:
    """Writes logits [B, V], bent as `adjustments` says, to shaped [B, V] float32, and each row's state to status [B].

    Penalties, then bias, then the mask (not allowed: -inf). status int32: 0, NO_TOKEN where every logit ends up
    -inf, NOT_FINITE where a logit was NaN or +inf before anything bent it. `adjusted` may be `logits`.
    """
    wide = logits.float()
    broken = (wide.isnan() | (wide == float("inf"))).any(-1)
    masks, bias, penalties = adjustments
    result = torch.where(wide == 0, 0.0, wide)  # no negative zero
    if penalties is not None:
        counts = penalties.counts[penalties.rows.long().clamp(min=0)] * (penalties.rows >= 0)[:, None]
        result = result - (counts * penalties.frequency[:, None] + (counts > 0) * penalties.presence[:, None])
    if bias is not None:
        has = (bias.rows >= 0)[:, None]
        result = torch.where(has, result + bias.values[bias.rows.long().clamp(min=0)], result)
    if masks is not None:
        tokens = torch.arange(logits.shape[1], device=logits.device)
        words = masks.words[masks.rows.long().clamp(min=0)][:, tokens // 32]  # [B, V]
        allowed = ((words >> (tokens % 32)) & 1).bool() | (masks.rows < 0)[:, None]
        result = torch.where(allowed, result, float("-inf"))
    empty = (result == float("-inf")).all(-1)
    status.copy_(torch.where(broken, NOT_FINITE, torch.where(empty, NO_TOKEN, 0)))
    adjusted.copy_(result)


def count_tokens(counts: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    """Adds one to counts[rows[b], tokens[b]] int32 for each b, except where either is negative. In place."""
    real = (rows >= 0) & (tokens >= 0)
    ones = torch.ones(int(real.sum()), dtype=counts.dtype, device=counts.device)
    counts.index_put_((rows[real].long(), tokens[real].long()), ones, accumulate=True)


def hash_seed_step(seed: int, step: int) -> int:
    """64 bits out of (seed, step): two rounds of splitmix64's mixer (Steele et al. 2014), the lowest 11 cleared."""
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
    """Token ids [B] int32 drawn from logits [B, V], or NO_TOKEN or NOT_FINITE; see the file's header.

    Top-k keeps the k largest, top-p the most likely of those until they hold its share of their weight, min-p
    those at least that fraction of the likeliest.
    """
    adjusted = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    status = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    adjust_logits(logits, adjusted, status, adjustments)
    columns = [column.tolist() for column in inputs]
    tokens = [
        status_here or _sample_row(row, *(column[i] for column in columns))
        for i, (row, status_here) in enumerate(zip(adjusted, status.tolist(), strict=True))
    ]
    found = torch.tensor(tokens, dtype=torch.int32, device=logits.device)
    return found if out is None else out.copy_(found)


def integer_weights(row: torch.Tensor, temperature: float) -> torch.Tensor:
    """Integer weights [V] int64 of one row of finite or -inf logits [V] float32; see the file's header."""
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
    """The first place where the running sum [V] exceeds target."""
    return int((running <= target).sum())


def gather_logprobs(logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """log_softmax(logits [B, V])[rows[i], tokens[i]], float32 [N]; NaN where a row or a token is negative."""
    real = (rows >= 0) & (tokens >= 0)
    logprobs = torch.log_softmax(logits.float(), -1)[rows.clamp(min=0).long(), tokens.clamp(min=0).long()]
    return torch.where(real, logprobs, float("nan"))


def top_logprobs(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest of log_softmax(logits [B, V]), falling, ties by id: float32 and int32 ids, [B, count].

    Where there are fewer tokens than `count`, -inf and id -1 follow.
    """
    order = torch.sort(logits.float(), dim=-1, descending=True, stable=True).indices[:, :count]
    values = torch.log_softmax(logits.float(), -1).gather(1, order)
    missing = count - order.shape[1]
    values = torch.nn.functional.pad(values, (0, missing), value=float("-inf"))
    return values, torch.nn.functional.pad(order.int(), (0, missing), value=-1)
