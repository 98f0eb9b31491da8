"""`BeamSearch`: which beams a search extends and which texts it keeps. Knows no sessions and no calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from plait.runtime.sampling_params import SamplingParams
    from plait.runtime.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class BeamHypothesis:
    """A text that a beam search found. `logprob`: the sum over its tokens. `score`: logprob / num_tokens **
    length_penalty. `num_tokens` counts the token that ended it. `finish_reason` "length" is max_tokens."""

    text: str
    logprob: float
    score: float
    num_tokens: int
    finish_reason: Literal["stop", "length"]


class Candidate(NamedTuple):
    """Beam number `beam`, extended by a token. `logprob`: the sum over all its tokens."""

    beam: int
    token: int
    logprob: float


class _Kept(NamedTuple):
    hypothesis: BeamHypothesis
    tokens: tuple[int, ...] | None  # None: a stop string cut the text


class BeamSearch:
    """The state of one search: `width` beams of tokens with their logprobs, and the best finished texts."""

    def __init__(self, width: int, params: SamplingParams, length_penalty: float, tokenizer: Tokenizer) -> None:
        self._width, self._max_tokens, self._penalty = width, params.max_tokens, length_penalty
        self._stop, self._tokenizer = params.stop, tokenizer
        self._end_tokens = {*tokenizer.eos_ids, *params.stop_token_ids}
        self._beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
        self._kept: list[_Kept] = []

    @property
    def is_over(self) -> bool:
        """Whether no beam is left, or none can reach the score of the worst text that is kept."""
        if not self._beams:
            return True
        if len(self._kept) < self._width:
            return False
        length = self._max_tokens if self._penalty > 0 else max(1, len(self._beams[0][0]))
        best_possible = max(self._score(logprob, length) for _, logprob in self._beams)
        return best_possible <= self._kept[-1].hypothesis.score

    def extend(self, likeliest: Sequence[Sequence[tuple[int, float]]]) -> list[Candidate]:
        """Takes the likeliest tokens after each beam, as (token, logprob). Returns the next beams."""
        candidates = [
            Candidate(beam, token, self._beams[beam][1] + logprob)
            for beam, tokens in enumerate(likeliest)
            for token, logprob in tokens
        ]
        candidates.sort(key=lambda candidate: -candidate.logprob)  # stable: ties keep the order of beams and tokens
        is_last = len(self._beams[0][0]) + 1 == self._max_tokens
        going_on: list[Candidate] = []
        for rank, candidate in enumerate(candidates[: 2 * self._width]):
            tokens = (*self._beams[candidate.beam][0], candidate.token)
            text, reason, is_cut = self._text_of(tokens)
            if reason == "length" and not is_last:
                going_on.append(candidate)
            elif rank < self._width:
                self._keep(tokens, candidate.logprob, text, reason, is_cut)
        chosen = going_on[: self._width]
        self._beams = [((*self._beams[beam][0], token), logprob) for beam, token, logprob in chosen]
        return chosen

    def hypotheses(self) -> list[BeamHypothesis]:
        """Returns the texts that are kept, best first."""
        return [kept.hypothesis for kept in self._kept]

    def tokens_of_best(self) -> list[int] | None:
        """Returns the tokens of the best text, without the one that ended it; None if a stop string cut it."""
        tokens = self._kept[0].tokens
        return None if tokens is None else list(tokens)

    def _score(self, logprob: float, num_tokens: int) -> float:
        return logprob / math.pow(num_tokens, self._penalty)

    def _text_of(self, tokens: tuple[int, ...]) -> tuple[str, Literal["stop", "length"], bool]:
        """Returns the text of a beam, "stop" if its last token ends it, and whether a stop string cut it."""
        if tokens[-1] in self._end_tokens:
            return self._tokenizer.decode(tokens[:-1]), "stop", False
        text = self._tokenizer.decode(tokens)
        ends = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        return (text[: min(ends)], "stop", True) if ends else (text, "length", False)

    def _keep(
        self, tokens: tuple[int, ...], logprob: float, text: str, reason: Literal["stop", "length"], is_cut: bool
    ) -> None:
        score = self._score(logprob, len(tokens))
        hypothesis = BeamHypothesis(text, logprob, score, len(tokens), reason)
        own = None if is_cut else tokens[:-1] if reason == "stop" else tokens
        self._kept.append(_Kept(hypothesis, own))
        self._kept.sort(key=lambda kept: -kept.hypothesis.score)  # stable
        del self._kept[self._width :]
