"""Chunks of the vocabulary, and the arithmetic on logits that several kernels share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_CHUNKS = 64
WEIGHT_SCALE = tl.constexpr(2.0**40)  # the weight of a row's most likely token
NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


def chunk_size(vocab: int) -> int:
    """Returns the tokens per chunk: a power of two, at least 4,096, for at most MAX_CHUNKS chunks.

    It depends only on the vocabulary, so that a row's float sums do not depend on other rows.
    """
    return max(4096, int(triton.next_power_of_2(triton.cdiv(vocab, MAX_CHUNKS))))


def check_logits(logits: torch.Tensor) -> tuple[int, int]:
    """Returns (rows, vocab) of logits [B, V]. ValueError unless the last axis is contiguous and at most 2^22."""
    if logits.dim() != 2 or logits.stride(1) != 1 or not 1 <= logits.shape[1] <= 1 << 22:
        raise ValueError(f"expected logits [B, V], V contiguous and at most 2^22, not {tuple(logits.shape)}")
    return logits.shape[0], logits.shape[1]


@triton.jit
def order_key(x):
    """Returns an int32 that orders as the float32 x does. `from_order_key` is its inverse."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_order_key(key):
    """The float32 whose order_key (int32) is `key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def inverse_temperature(temperature):
    """Returns log2(e) / temperature, finite for any temperature."""
    return tl.minimum(1.4426950408889634 / temperature, 1e38)


@triton.jit
def log2_ratio_to_max(x, max_logit, inverse):
    """Returns log2 of a token's probability over the largest one: 0 down to -inf. `max_logit` must be finite."""
    return tl.minimum((x - max_logit) * inverse, 0.0)


@triton.jit
def integer_weight(power):
    """Returns a token's integer weight (int64) from its `log2_ratio_to_max`."""
    return (tl.exp2(power) * WEIGHT_SCALE).to(tl.int64)
