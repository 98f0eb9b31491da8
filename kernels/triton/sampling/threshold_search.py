"""Finds thresholds in a row of integer weights without sorting it: the k-th token, a share of the weight, a draw.

A threshold is the smallest logit above which the weight (or the number) of the tokens does not exceed a target. The
search range of float32 order keys shrinks ninefold per pass over the tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from plait.kernels.triton.sampling.vocab_chunks import from_order_key, integer_weight, log2_ratio_to_max, order_key


@triton.jit
def hash_seed_step(seed, step):
    """As `reference_sampling.hash_seed_step`, uint64."""
    hash_bits = seed.to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    hash_bits += step.to(tl.uint64, bitcast=True) * 0xD1B54A32D192ED03
    hash_bits += 0x632BE59BD9B4E019
    for _ in tl.static_range(2):
        hash_bits = (hash_bits ^ (hash_bits >> 30)) * 0xBF58476D1CE4E5B9
        hash_bits = (hash_bits ^ (hash_bits >> 27)) * 0x94D049BB133111EB
        hash_bits = hash_bits ^ (hash_bits >> 31)
    return (hash_bits >> 11) << 11


@triton.jit
def draw_target(total, hash_bits):
    """Returns floor(total * hash_bits / 2^64), int64."""
    return tl.umulhi(total.to(tl.uint64, bitcast=True), hash_bits).to(tl.int64, bitcast=True)


@triton.jit
def find_threshold(source, count, max_logit, inverse, target, by_count, BLOCK: tl.constexpr, PIVOTS: tl.constexpr):
    """Returns (key, above): the smallest key above which the weight (or count) is at most target, and that weight."""
    low = tl.full((), -2147483649, tl.int64)  # below every key
    high = order_key(max_logit).to(tl.int64)
    above = tl.full((), 0, tl.int64)
    while high - low > 1:
        step = tl.maximum((high - low) // (PIVOTS + 1), 1)
        pivots = tl.minimum(low + step * (1 + tl.arange(0, PIVOTS)), high)
        heavier = tl.zeros((PIVOTS,), tl.int64)
        for start in range(0, count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(source + at, mask=at < count, other=float("-inf"))
            weight = integer_weight(log2_ratio_to_max(x, max_logit, inverse))
            weight = tl.where(by_count, tl.minimum(weight, 1), weight)
            greater = order_key(x).to(tl.int64)[None, :] > pivots[:, None]  # [PIVOTS, BLOCK]
            heavier += tl.sum(tl.where(greater, weight[None, :], 0), axis=1)
        fits = heavier <= target  # monotonic: false up to some pivot, then true
        above = tl.maximum(tl.max(tl.where(fits & (pivots < high), heavier, -1), axis=0), above)
        low = tl.max(tl.where(fits, low, pivots), axis=0)
        high = tl.min(tl.where(fits, pivots, high), axis=0)
    return high.to(tl.int32), above


@triton.jit
def weight_of_key(key, max_logit, inverse):
    """Returns the weight (int64) of a logit with this order key; 0 for a key below that of -inf, which none has."""
    key = tl.maximum(key, -2139095041)  # order_key(-inf): lower keys are those of NaN
    return integer_weight(log2_ratio_to_max(from_order_key(key), max_logit, inverse))


@triton.jit
def filtered_weight(
    source,
    count,
    total,
    num_nonzero,
    max_logit,
    inverse,
    top_k,
    top_p,
    min_weight,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """Returns the weight of the tokens that remain after top-k, then top-p of those, then the float32 `min_weight`."""
    kept = total
    if (top_k > 0) & (top_k < num_nonzero):
        target = tl.zeros((), tl.int64) + top_k - 1
        key, above = find_threshold(source, count, max_logit, inverse, target, True, BLOCK, PIVOTS)
        kept = tl.zeros((), tl.int64)
        for start in range(0, count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(source + at, mask=at < count, other=float("-inf"))
            kept += tl.sum(
                tl.where(order_key(x) > key, integer_weight(log2_ratio_to_max(x, max_logit, inverse)), 0), axis=0
            )
        kept += (top_k - above) * weight_of_key(key, max_logit, inverse)
    if top_p < 1.0:
        portion = (top_p * 9223372036854775808.0).to(tl.int64).to(tl.uint64, bitcast=True)  # top_p * 2^63, exact
        doubled = (kept * 2).to(tl.uint64, bitcast=True)
        limit = tl.umulhi(doubled, portion).to(tl.int64, bitcast=True) + (doubled * portion != 0).to(tl.int64)
        key, above = find_threshold(source, count, max_logit, inverse, limit - 1, False, BLOCK, PIVOTS)
        weight = tl.maximum(weight_of_key(key, max_logit, inverse), 1)  # min-p may have left less than the nucleus
        kept = above + (limit - above + weight - 1) // weight * weight
    if min_weight > 0.0:
        likely = tl.zeros((), tl.int64)
        for start in range(0, count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(source + at, mask=at < count, other=float("-inf"))
            weight = integer_weight(log2_ratio_to_max(x, max_logit, inverse))
            likely += tl.sum(tl.where(weight.to(tl.float32) >= min_weight, weight, 0), axis=0)
        kept = tl.minimum(kept, likely)
    return kept
