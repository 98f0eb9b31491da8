"""Frequencies of rotary position embeddings (arXiv:2104.09864) and the scaling methods for longer contexts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from plait.runtime.errors import CorruptModel
from plait.runtime.models.value_checks import MAX_VALUES, checked_float, checked_int


@dataclass(frozen=True)
class RopeScaling:
    """A scaling of the rotary frequencies. `kind` is one of:

    - `linear` (arXiv:2306.15595): all frequencies are divided by `factor`.
    - `llama3` (arXiv:2407.21783): long wavelengths are divided by `factor`, short ones are kept, those between are
      interpolated.
    - `divisors`: frequency i is divided by `divisors[i]`, one per rotary pair. GGUF stores llama3 in this form.
    - `yarn` (arXiv:2309.00071): pairs with more than `beta_fast` rotations over the original context are kept, those
      with fewer than `beta_slow` are divided by `factor`, with a linear ramp between.
    - `longrope` (arXiv:2402.13753): frequencies are divided by `divisors`, or by `long_divisors` if the context is
      longer than the original one.

    `attention_factor` multiplies cosine and sine (YaRN, LongRoPE).
    """

    kind: Literal["linear", "llama3", "divisors", "yarn", "longrope"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 8192
    divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0


def rope_inverse_frequencies(
    theta: float, dims: int, scaling: RopeScaling | None, context_length: int
) -> tuple[float, ...]:
    """Radians per position of each rotary pair, [dims / 2].

    LongRoPE has two sets of divisors. The choice depends on `context_length`, the longest text that the runtime
    accepts, and not on the length of each text: otherwise the cached KV of a prefix would not fit a longer text.
    """
    plain = [theta ** (-2 * i / dims) for i in range(dims // 2)]
    if scaling is None:
        return tuple(plain)
    if scaling.kind == "linear":
        return tuple(frequency / scaling.factor for frequency in plain)
    if scaling.kind == "llama3":
        return tuple(_llama3(frequency, scaling) for frequency in plain)
    if scaling.kind == "yarn":
        return _yarn(plain, theta, dims, scaling)
    long = scaling.kind == "longrope" and context_length > scaling.original_context_length
    divisors = scaling.long_divisors if long else scaling.divisors
    return tuple(frequency / divisor for frequency, divisor in zip(plain, divisors, strict=True))


def yarn_attention_factor(factor: float) -> float:
    """The factor of cosine and sine in YaRN (arXiv:2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0


def longrope_attention_factor(factor: float, original_context_length: int) -> float:
    """The factor of cosine and sine in LongRoPE; `factor` is the new context length over the original one."""
    if factor <= 1 or original_context_length <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original_context_length))


def check_rope_scaling(scaling: RopeScaling, dims: int) -> None:
    """Raises CorruptModel for values out of range. `dims` is the number of rotary dimensions of a head."""
    checked_float("rope scaling factor", scaling.factor, 0.0, 1e6)
    checked_float("rope scaling magnitude", scaling.attention_factor, 0.0, 1e6)
    if scaling.kind in ("llama3", "yarn", "longrope"):
        checked_int("original_context_length", scaling.original_context_length, MAX_VALUES["context_length"])
    if scaling.kind == "llama3":
        _check_below("low_freq_factor", scaling.low_freq_factor, "high_freq_factor", scaling.high_freq_factor)
    if scaling.kind == "yarn":
        _check_below("beta_slow", scaling.beta_slow, "beta_fast", scaling.beta_fast)
    if scaling.kind in ("divisors", "longrope"):
        _check_divisors(scaling.divisors, dims)
    if scaling.kind == "longrope":
        _check_divisors(scaling.long_divisors, dims)


def _check_below(low_name: str, low: float, high_name: str, high: float) -> None:
    if not checked_float(low_name, low, 0.0, 1e6) < checked_float(high_name, high, 0.0, 1e6):
        raise CorruptModel(f"rope scaling: {low_name} {low:g} is not below {high_name} {high:g}")


def _check_divisors(divisors: Sequence[float], dims: int) -> None:
    if len(divisors) != dims // 2:
        raise CorruptModel(f"{len(divisors)} rope divisors for {dims} rotary dimensions")
    for divisor in divisors:
        checked_float("rope divisor", divisor, 0.0, 1e6)


def _llama3(frequency: float, scaling: RopeScaling) -> float:
    rotations = scaling.original_context_length * frequency / (2 * math.pi)  # over the original context
    if rotations < scaling.low_freq_factor:
        return frequency / scaling.factor
    if rotations > scaling.high_freq_factor:
        return frequency
    step = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - step) * frequency / scaling.factor + step * frequency


def _yarn(plain: Sequence[float], theta: float, dims: int, scaling: RopeScaling) -> tuple[float, ...]:
    def pair_with_rotations(rotations: float) -> float:  # over the original context
        return dims * math.log(scaling.original_context_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair_with_rotations(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_with_rotations(scaling.beta_slow)), dims - 1)
    width = max(last - first, 0.001)
    ramp = [min(max((i - first) / width, 0.0), 1.0) for i in range(len(plain))]  # 0: kept, 1: divided by factor
    return tuple(
        frequency * (1 - share) + frequency / scaling.factor * share
        for frequency, share in zip(plain, ramp, strict=True)
    )


def partial_rotary_permutation(rotary: int, size: int) -> list[int]:
    """The source index of each dimension of a head: rotary pair i goes to i and i + size / 2, the rest after the pairs.

    >>> partial_rotary_permutation(4, 8)
    [0, 1, 4, 5, 2, 3, 6, 7]
    """
    half, unrotated = rotary // 2, list(range(rotary, size))
    middle = len(unrotated) // 2
    return [*range(half), *unrotated[:middle], *range(half, rotary), *unrotated[middle:]]
