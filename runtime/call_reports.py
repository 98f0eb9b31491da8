"""What a call reports beside its tokens: its cost, logprobs, the scores of choices, and how its value was drawn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """The cost of one call. Always prompt_tokens == cached_tokens + computed_tokens.

    cached_tokens: prompt tokens whose KV was cached, in the radix tree or by the session itself.
    computed_tokens: prompt tokens that the model computed.
    recomputed_tokens: tokens computed a second time after a preemption, because the KV pool was full.
    completion_tokens: tokens sampled or forced. Of these, forced_tokens followed from the grammar without sampling,
        and drafted_tokens were drafts (docs/architecture.md) that the model accepted.
    reasoning_tokens: those before the value of a `Reasoning` constraint, with its tags; part of completion_tokens.
    queue_s, ttft_s, wall_s: seconds until admission, until the first token, and in total.
    compile_s: the part of queue_s spent waiting for the grammar of this call.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    completion_tokens: int = 0
    forced_tokens: int = 0
    queue_s: float = 0.0
    ttft_s: float = 0.0
    wall_s: float = 0.0
    drafted_tokens: int = 0
    compile_s: float = 0.0
    reasoning_tokens: int = 0


MissReason = Literal["new_prefix", "extended", "diverged", "evicted", "outputs"]


class CacheMiss(msgspec.Struct, frozen=True, array_like=True):
    """Where a call's prompt parted from the prefix cache when its first step was scheduled, and why.

    position: number of tokens that were cached; the first computed token has this index.
    reason: "new_prefix": nothing of the prompt is cached. "extended": the cached text ends here. "diverged": the cached
        texts go on with other tokens. "evicted": a text with this token was cached, but its pages were needed.
        "outputs": what follows may be cached, but the call wants its logits or states, at least of the last token.
    """

    position: int
    reason: MissReason


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A token, its logprob, and the most likely tokens at its position with their logprobs."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


LOGPROBS_PER_PART = 128
_encode = msgspec.msgpack.Encoder().encode
_decode_part = msgspec.msgpack.Decoder(list[TokenLogprob]).decode


def encode_logprobs(logprobs: Sequence[TokenLogprob]) -> list[msgspec.Raw]:
    """Returns logprobs in MessagePack, in parts each of which is decoded within a millisecond."""
    starts = range(0, len(logprobs), LOGPROBS_PER_PART)
    return [msgspec.Raw(_encode(logprobs[start : start + LOGPROBS_PER_PART])) for start in starts]


def decode_logprobs(parts: Iterable[bytes | msgspec.Raw]) -> list[TokenLogprob]:
    """Returns the logprobs in some parts, in order."""
    return [entry for part in parts for entry in _decode_part(part)]


class ChoiceScores(msgspec.Struct, frozen=True, array_like=True):
    """The result of a Select: the `index` of the selected choice, and the score of each.

    token_logprobs[i][j]: logprob of token j of choice i.
    top_logprobs[i]: the tokens of choice i with their logprobs and the most likely tokens at their positions, if these
        were requested, in parts for `decode_logprobs`.
    """

    index: int
    scores: list[float]
    token_logprobs: list[list[float]]
    unconditional_logprobs: list[list[float]] | None = None
    top_logprobs: list[list[msgspec.Raw]] | None = None


class ExactInfo(msgspec.Struct, frozen=True, array_like=True):
    """How an `exact` value was drawn.

    logprob: natural logarithm of the value's probability without the constraint, at the call's temperature and filters.
    mass_low, mass_high: bounds of the probability that unconstrained text after this prompt is a valid value, from all
        samples so far.
    model_steps: number of prefixes whose probabilities were computed for this value.
    """

    logprob: float
    mass_low: float
    mass_high: float
    model_steps: int

    @property
    def mass_bounds(self) -> tuple[float, float]:
        """`mass_low` and `mass_high`, neither below the probability of the value itself."""
        value_mass = math.exp(self.logprob)
        return max(self.mass_low, value_mass), max(self.mass_high, value_mass)

    @property
    def log_mass_bounds(self) -> tuple[float, float]:
        """The natural logarithms of `mass_bounds`. They are finite, also where the bounds are too small for a float."""
        low, high = (math.log(mass) if mass else self.logprob for mass in self.mass_bounds)
        return low, high


class ParticlesInfo(msgspec.Struct, frozen=True, array_like=True):
    """How a value was drawn with `SamplingParams.particles`. Logarithms are natural.

    log_weight: of the unbiased estimate Z of the probability that unconstrained text after this prompt is a valid
        value; Z is also the importance weight of the value, see `sampling/particle_filter.py`.
    logprob: of the value without the constraint, at the call's temperature and filters.
    effective_sample_size: (sum w)^2 / (sum w^2) of the weights w of the complete particles.
    resamplings: how often the particles were drawn anew by their weights.
    model_steps: prefixes whose probabilities were computed.
    constraint_checks, masks: single tokens that the constraint checked to draw, and masks of all tokens that it filled
        to draw. To find unlikely prefixes it fills about one more for each prefix, where several are drawn.
    """

    log_weight: float
    logprob: float
    effective_sample_size: float
    resamplings: int
    model_steps: int
    constraint_checks: int
    masks: int

    def report(self) -> dict[str, Any]:
        """Returns the fields by name, with `constrained_logprob`, the value's logprob given that the text is valid, and
        `checks_per_token`, the constraint checks of one prefix."""
        return {
            **msgspec.structs.asdict(self),
            "constrained_logprob": self.logprob - self.log_weight,
            "checks_per_token": self.constraint_checks / max(1, self.model_steps),
        }
