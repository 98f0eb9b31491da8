"""Chooses tokens from logits: which rows are sampled, scored, verified or asked for logprobs, and what each is given.

A row's outcome depends on its own logits, parameters, seed and step alone, never on its neighbours: every
operation works along the last axis, and the draw is one uniform number hashed from (seed, step), looked up in
the row's cumulative distribution.

Knows: rows and sampling parameters. Must not know: sessions, pages, models, where logits lie; see `LogitOperations`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from plait.runtime.batch.pooling_request import PoolingRequest
from plait.runtime.batch.request import Batch, GenerationRequest, ScheduledRequest, ScoringRequest
from plait.runtime.executor.runner import Float32Array, Float64Array
from plait.runtime.kv_cache.page_pool import IntArray
from plait.runtime.messages import TokenLogprob
from plait.runtime.sampling_params import SamplingParams

TopLogprobs: TypeAlias = list[tuple[int, float]]

NO_TOKEN = -1  # the mask and the parameters leave no token
NOT_FINITE = -2  # the logits hold NaN or +inf


class TokenMask(NamedTuple):
    """Packed masks `words` [len(rows), ceil(V / 32)] int32 for those of the sampled rows that are in `rows`.

    `allowed_ids`: of the rows that admit few tokens, the token ids, by the row's index among the batch's logits.
    """

    rows: list[int]
    words: IntArray
    allowed_ids: Mapping[int, npt.NDArray[np.int64]]


@dataclass
class SamplerOutput:
    """What a step gave: a token (or NO_TOKEN, NOT_FINITE) per generation; logprobs and states where asked for."""

    tokens: dict[GenerationRequest, int] = field(default_factory=dict)
    logprobs: dict[GenerationRequest, TokenLogprob] = field(default_factory=dict)
    scores: dict[ScoringRequest, dict[tuple[int, int], float]] = field(default_factory=dict)
    top_logprobs: dict[ScoringRequest, dict[int, TopLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[GenerationRequest, list[TokenLogprob]] = field(default_factory=dict)
    verified: dict[GenerationRequest, list[int]] = field(default_factory=dict)  # one more token than there were guesses
    states: dict[PoolingRequest, Float32Array | Float64Array] = field(default_factory=dict)  # see Embedding.take


class DrawState(NamedTuple):
    """What a random choice depends on besides the logits; a Generation has the same."""

    params: SamplingParams
    seed: int
    num_sampled: int


class LogitOperations(Protocol):
    """What is done to logits where they lie: `host_logits.NumpyLogitOperations`, and for a GPU `gpu.logit_operations`.

    Logits are [B, V] float32, a row [V].
    """

    def prepare(self, logits: Any) -> Any:
        """The logits as the others take them."""

    def log_softmax(self, logits: Any) -> Any:
        """Along the last axis, in new memory."""

    def values(self, row: Any, ids: Sequence[int]) -> list[float]:
        """The row's entries at `ids`."""

    def topk(self, row: Any, count: int) -> TopLogprobs:
        """The `count` largest of a row, falling."""

    def apply_penalties_and_bias(self, row: Any, gen: GenerationRequest) -> None:
        """Adds logit_bias and takes the penalties off one row, in place; frequency counts each use, presence any."""

    def apply_mask(self, logits: Any, mask: TokenMask) -> None:
        """Adds -inf where a token is not allowed, in place."""

    def draw_tokens(self, logits: Any, generations: Sequence[GenerationRequest | DrawState]) -> list[int]:
        """One token id per row; NO_TOKEN where every logit is -inf, NOT_FINITE where one is NaN or +inf, which no
        bias, penalty or mask turns into a number."""


class Sampler:
    """See the file's header. Computes on the host unless it is given other operations."""

    def __init__(self, operations: LogitOperations | None = None) -> None:
        if operations is None:
            from plait.runtime.sampling.numpy_ops import NumpyLogitOperations

            operations = NumpyLogitOperations()
        self.ops = operations

    def sample(self, logits: Any, batch: Batch, mask: TokenMask | None) -> SamplerOutput:
        """Logits [batch.num_logits, V] float32, in the order of the batch's rows. They may be changed."""
        logits, sampled, at = self.ops.prepare(logits), SamplerOutput(), 0
        for each in batch.rows:
            if isinstance(each.request, ScoringRequest) and each.num_logits:
                first = each.start + each.count - each.num_logits
                own, targets = logits[at : at + each.num_logits], each.request.targets
                sampled.scores[each.request] = self.target_logprobs(own, first, targets)
                if each.request.selection.top_logprobs:
                    sampled.top_logprobs[each.request] = self.top_logprobs_at(
                        own, first, targets, each.request.selection.top_logprobs
                    )
            elif isinstance(each.request, GenerationRequest) and each.num_draft_tokens:
                sampled.verified[each.request] = self._verify_draft(logits[at : at + each.num_logits], each.request)
            elif isinstance(each.request, GenerationRequest) and each.num_logits - each.is_sampled > 0:
                sampled.prompt_logprobs[each.request] = self._prompt_logprobs(logits[at : at + each.num_logits], each)
            at += each.num_logits
        places = batch.sampled_requests
        if places:
            rows = logits if len(places) == len(logits) else logits[[at for at, _ in places]]
            self._sample_generations(rows, [gen for _, gen in places], mask, sampled)
        return sampled

    def _verify_draft(self, logits: Any, gen: GenerationRequest) -> list[int]:
        """What the model chooses at each position of logits [1 + guesses, V], as if it had come there by itself."""
        if gen.params.has_penalties_or_bias:
            for row in logits:
                self.ops.apply_penalties_and_bias(row, gen)
        return self.ops.draw_tokens(
            logits, [DrawState(gen.params, gen.seed, gen.num_sampled + offset) for offset in range(len(logits))]
        )

    def _sample_generations(
        self, logits: Any, generations: list[GenerationRequest], mask: TokenMask | None, sampled: SamplerOutput
    ) -> None:
        wants = [i for i, gen in enumerate(generations) if gen.params.logprobs]
        raw = self.ops.log_softmax(logits[wants]) if wants else None  # before anything bends them
        for i, gen in enumerate(generations):
            if gen.params.has_penalties_or_bias:
                self.ops.apply_penalties_and_bias(logits[i], gen)
        if mask is not None:
            self.ops.apply_mask(logits, mask)
        tokens = self.ops.draw_tokens(logits, generations)
        sampled.tokens |= zip(generations, tokens, strict=True)
        if raw is not None:
            for logprobs, i in zip(raw, wants, strict=True):
                if tokens[i] >= 0:
                    top = generations[i].params.top_logprobs
                    sampled.logprobs[generations[i]] = self._token_logprob(logprobs, tokens[i], top)

    def target_logprobs(
        self, logits: Any, first: int, targets: Mapping[int, Sequence[int]]
    ) -> dict[tuple[int, int], float]:
        """{(position, token): logprob} for the targets at positions [first, first + len(logits)). logits [n, V]."""
        found: dict[tuple[int, int], float] = {}
        for offset in range(len(logits)):
            wanted = targets.get(first + offset)
            if wanted:
                values = self.ops.values(self.ops.log_softmax(logits[offset]), wanted)
                for token, value in zip(wanted, values, strict=True):
                    found[first + offset, token] = value
        return found

    def top_logprobs_at(
        self, logits: Any, first: int, positions: Mapping[int, object], num_top: int
    ) -> dict[int, TopLogprobs]:
        """{position: its `num_top` likeliest tokens, with logprobs}. logits [n, V] of positions from `first` on."""
        return {
            first + offset: self.ops.topk(self.ops.log_softmax(logits[offset]), num_top)
            for offset in range(len(logits))
            if first + offset in positions
        }

    def _prompt_logprobs(self, logits: Any, each: ScheduledRequest) -> list[TokenLogprob]:
        """Those of the tokens that follow the positions of logits [n, V], as far as the row's text goes."""
        assert isinstance(each.request, GenerationRequest)
        end = each.start + each.count
        tokens = each.request.seq.tokens.view()[end - len(logits) + 1 : end + 1].tolist()
        top = each.request.params.top_logprobs
        return [
            self._token_logprob(self.ops.log_softmax(row), token, top)
            for row, token in zip(logits, tokens, strict=False)
        ]

    def _token_logprob(self, logprobs: Any, token: int, num_top: int) -> TokenLogprob:
        """The token's entry of logprobs [V], and the `num_top` largest."""
        top = self.ops.topk(logprobs, num_top) if num_top else []
        return TokenLogprob(token, self.ops.values(logprobs, [token])[0], top)


def argmax_output(highest: list[float], tokens: list[int], batch: Batch) -> SamplerOutput:
    """What `Sampler.sample` gives for a batch that asks for the likeliest: `tokens` and their logits, in its order."""
    chosen = tokens
    if not all(map(math.isfinite, highest)):
        chosen = [
            token if math.isfinite(peak) else NO_TOKEN if peak == -math.inf else NOT_FINITE
            for peak, token in zip(highest, tokens, strict=True)
        ]
    sampled, at = SamplerOutput(), 0
    for each in batch.rows:
        row = each.request
        if not isinstance(row, GenerationRequest):
            continue
        if each.num_draft_tokens:
            sampled.verified[row] = chosen[at : at + each.num_logits]
        elif each.is_sampled:
            sampled.tokens[row] = chosen[at]
        at += each.num_logits
    return sampled


def hash_uniform(seed: int, step: int) -> float:
    """A number in [0, 1) hashed from (seed, step): two rounds of splitmix64's mixer (Steele et al. 2014)."""
    word = (seed * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & (2**64 - 1)
    for _ in range(2):
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        word ^= word >> 31
    return (word >> 11) / 2.0**53


def has_filters(gen: GenerationRequest | DrawState) -> bool:
    """Whether a draw looks at the order of the tokens."""
    return gen.params.is_filtered
