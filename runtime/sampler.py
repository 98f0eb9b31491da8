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

from plait.runtime.messages import TokenLogprob
from plait.runtime.running import Floats, Sums
from plait.runtime.sampling import SamplingParams
from plait.runtime.scheduler.embedding import Embedding
from plait.runtime.scheduler.page_pool import IntArray
from plait.runtime.scheduler.rows import Batch, BatchRow, Generation, Scoring

TopLogprobs: TypeAlias = list[tuple[int, float]]

NO_TOKEN = -1  # the mask and the parameters leave no token
NOT_FINITE = -2  # the logits hold NaN or +inf


class Mask(NamedTuple):
    """Packed masks `words` [len(rows), ceil(V / 32)] int32 for those of the sampled rows that are in `rows`.

    `narrow`: of the rows that admit few tokens, the token ids, by the row's index among the batch's logits.
    """

    rows: list[int]
    words: IntArray
    narrow: Mapping[int, npt.NDArray[np.int64]]


@dataclass
class Sampled:
    """What a step gave: a token (or NO_TOKEN, NOT_FINITE) per generation; logprobs and states where asked for."""

    tokens: dict[Generation, int] = field(default_factory=dict)
    logprobs: dict[Generation, TokenLogprob] = field(default_factory=dict)
    scores: dict[Scoring, dict[tuple[int, int], float]] = field(default_factory=dict)
    tops: dict[Scoring, dict[int, TopLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[Generation, list[TokenLogprob]] = field(default_factory=dict)
    drafted: dict[Generation, list[int]] = field(default_factory=dict)  # one more token than there were guesses
    states: dict[Embedding, Floats | Sums] = field(default_factory=dict)  # see Embedding.take


class Draw(NamedTuple):
    """What a random choice depends on besides the logits; a Generation has the same."""

    params: SamplingParams
    seed: int
    num_sampled: int


class LogitOperations(Protocol):
    """What is done to logits where they lie: `host_logits.HostOperations`, and for a GPU `gpu.logit_operations`.

    Logits are [B, V] float32, a row [V].
    """

    def ready(self, logits: Any) -> Any:
        """The logits as the others take them."""

    def log_softmax(self, logits: Any) -> Any:
        """Along the last axis, in new memory."""

    def values(self, row: Any, ids: Sequence[int]) -> list[float]:
        """The row's entries at `ids`."""

    def largest(self, row: Any, count: int) -> TopLogprobs:
        """The `count` largest of a row, falling."""

    def adjust(self, row: Any, gen: Generation) -> None:
        """Adds logit_bias and takes the penalties off one row, in place; frequency counts each use, presence any."""

    def apply_mask(self, logits: Any, mask: Mask) -> None:
        """Adds -inf where a token is not allowed, in place."""

    def choose(self, logits: Any, generations: Sequence[Generation | Draw]) -> list[int]:
        """One token id per row; NO_TOKEN where every logit is -inf, NOT_FINITE where one is NaN or +inf, which no
        bias, penalty or mask turns into a number."""


class Sampler:
    """See the file's header. Computes on the host unless it is given other operations."""

    def __init__(self, operations: LogitOperations | None = None) -> None:
        if operations is None:
            from plait.runtime.host_logits import HostOperations

            operations = HostOperations()
        self.on = operations

    def sample(self, logits: Any, batch: Batch, mask: Mask | None) -> Sampled:
        """Logits [batch.num_logits, V] float32, in the order of the batch's rows. They may be changed."""
        logits, sampled, at = self.on.ready(logits), Sampled(), 0
        for each in batch.rows:
            if isinstance(each.row, Scoring) and each.num_logits:
                first = each.start + each.count - each.num_logits
                own, targets = logits[at : at + each.num_logits], each.row.targets
                sampled.scores[each.row] = self.score(own, first, targets)
                if each.row.selection.top_logprobs:
                    sampled.tops[each.row] = self.likeliest(own, first, targets, each.row.selection.top_logprobs)
            elif isinstance(each.row, Generation) and each.num_draft:
                sampled.drafted[each.row] = self._verify(logits[at : at + each.num_logits], each.row)
            elif isinstance(each.row, Generation) and each.num_logits - each.is_sampled > 0:
                sampled.prompt_logprobs[each.row] = self._prompt_logprobs(logits[at : at + each.num_logits], each)
            at += each.num_logits
        places = batch.sampled
        if places:
            rows = logits if len(places) == len(logits) else logits[[at for at, _ in places]]
            self._sample_generations(rows, [gen for _, gen in places], mask, sampled)
        return sampled

    def _verify(self, logits: Any, gen: Generation) -> list[int]:
        """What the model chooses at each position of logits [1 + guesses, V], as if it had come there by itself."""
        if gen.params.is_adjusted:
            for row in logits:
                self.on.adjust(row, gen)
        return self.on.choose(
            logits, [Draw(gen.params, gen.seed, gen.num_sampled + offset) for offset in range(len(logits))]
        )

    def _sample_generations(
        self, logits: Any, generations: list[Generation], mask: Mask | None, sampled: Sampled
    ) -> None:
        wants = [i for i, gen in enumerate(generations) if gen.params.logprobs]
        raw = self.on.log_softmax(logits[wants]) if wants else None  # before anything bends them
        for i, gen in enumerate(generations):
            if gen.params.is_adjusted:
                self.on.adjust(logits[i], gen)
        if mask is not None:
            self.on.apply_mask(logits, mask)
        tokens = self.on.choose(logits, generations)
        sampled.tokens |= zip(generations, tokens, strict=True)
        if raw is not None:
            for logprobs, i in zip(raw, wants, strict=True):
                if tokens[i] >= 0:
                    top = generations[i].params.top_logprobs
                    sampled.logprobs[generations[i]] = self._token_logprob(logprobs, tokens[i], top)

    def score(self, logits: Any, first: int, targets: Mapping[int, Sequence[int]]) -> dict[tuple[int, int], float]:
        """{(position, token): logprob} for the targets at positions [first, first + len(logits)). logits [n, V]."""
        found: dict[tuple[int, int], float] = {}
        for offset in range(len(logits)):
            wanted = targets.get(first + offset)
            if wanted:
                values = self.on.values(self.on.log_softmax(logits[offset]), wanted)
                for token, value in zip(wanted, values, strict=True):
                    found[first + offset, token] = value
        return found

    def likeliest(
        self, logits: Any, first: int, positions: Mapping[int, object], num_top: int
    ) -> dict[int, TopLogprobs]:
        """{position: its `num_top` likeliest tokens, with logprobs}. logits [n, V] of positions from `first` on."""
        return {
            first + offset: self.on.largest(self.on.log_softmax(logits[offset]), num_top)
            for offset in range(len(logits))
            if first + offset in positions
        }

    def _prompt_logprobs(self, logits: Any, each: BatchRow) -> list[TokenLogprob]:
        """Those of the tokens that follow the positions of logits [n, V], as far as the row's text goes."""
        assert isinstance(each.row, Generation)
        end = each.start + each.count
        tokens = each.row.seq.tokens.view()[end - len(logits) + 1 : end + 1].tolist()
        top = each.row.params.top_logprobs
        return [
            self._token_logprob(self.on.log_softmax(row), token, top)
            for row, token in zip(logits, tokens, strict=False)
        ]

    def _token_logprob(self, logprobs: Any, token: int, num_top: int) -> TokenLogprob:
        """The token's entry of logprobs [V], and the `num_top` largest."""
        top = self.on.largest(logprobs, num_top) if num_top else []
        return TokenLogprob(token, self.on.values(logprobs, [token])[0], top)


def take_likeliest(highest: list[float], tokens: list[int], batch: Batch) -> Sampled:
    """What `Sampler.sample` gives for a batch that asks for the likeliest: `tokens` and their logits, in its order."""
    chosen = tokens
    if not all(map(math.isfinite, highest)):
        chosen = [
            token if math.isfinite(peak) else NO_TOKEN if peak == -math.inf else NOT_FINITE
            for peak, token in zip(highest, tokens, strict=True)
        ]
    sampled, at = Sampled(), 0
    for each in batch.rows:
        row = each.row
        if not isinstance(row, Generation):
            continue
        if each.num_draft:
            sampled.drafted[row] = chosen[at : at + each.num_logits]
        elif each.is_sampled:
            sampled.tokens[row] = chosen[at]
        at += each.num_logits
    return sampled


def uniform(seed: int, step: int) -> float:
    """A number in [0, 1) hashed from (seed, step): two rounds of splitmix64's mixer (Steele et al. 2014)."""
    word = (seed * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & (2**64 - 1)
    for _ in range(2):
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        word ^= word >> 31
    return (word >> 11) / 2.0**53


def is_filtered(gen: Generation | Draw) -> bool:
    """Whether a draw looks at the order of the tokens."""
    return gen.params.top_k > 0 or gen.params.top_p < 1.0 or gen.params.min_p > 0.0
