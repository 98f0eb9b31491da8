"""The interface of proposers of draft tokens, and the count of how often their guesses were right.

A proposer guesses the next token of one text; a draft is a chain of guesses. The model verifies all of it in one
forward pass: it chooses a token at each position as it would without a draft, and the draft is accepted up to the first
position where it chose another one. The random number of a position depends on the seed and the step alone, so a guess
x is accepted with the model's probability p(x), and a refused one is replaced by a token of the residual distribution,
p without x. Blockwise verification: Stern et al. 2018, arXiv 1811.03115; rejection sampling: Leviathan et al. 2023,
arXiv 2211.17192.

Guesses are counted at every position that is reached, used or not, so that a proposer that rests is known to have
become better without a trial that costs time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from plait.runtime.arrays import IntArray

if TYPE_CHECKING:
    from plait.runtime.drafts.model_guesses import ModelGuesses

PRIOR_WEIGHT = 8.0  # guesses that the rates of other texts count for at the beginning of a text
TEXT_DECAY = 0.9  # factor on the counts of one text at each guess
SHARED_DECAY = 0.99  # the same, of all texts of a namespace


class Guess(NamedTuple):
    """A token that may follow. `level`: how sure the proposer is, an index of its `prior`."""

    token: int
    level: int


class Proposer(Protocol):
    """Guesses the next tokens of one text.

    `prior`: the share of guesses of each level that is expected to be right before any is counted.
    """

    prior: ClassVar[tuple[float, ...]]

    def guesses(self, text: IntArray, forced_end: int) -> list[Guess]:
        """Returns tokens that may follow text [n] int32; [] if it has no guess.

        Text before `forced_end` was not sampled: it is the prompt, or ends with tokens that a constraint forced. The
        end of the text may be guesses itself, which the next call's text need not contain.
        """

    def accept(self, text: IntArray, forced: Sequence[int]) -> None:
        """Is told the text [n] int32 without guesses: the last one with tokens behind it. forced: the positions in it
        whose tokens a constraint forced, rising.
        """


class AcceptanceRates:
    """The share of right guesses of each level. It begins with `rates`; recent guesses count more.

    weight: the guesses that `rates` count for. is_mixed: whether the rates of a text are mixed with these, of all
    texts. shared: those of all texts that the rates of a text are mixed with.
    """

    def __init__(
        self,
        rates: Sequence[float],
        decay: float,
        weight: float = PRIOR_WEIGHT,
        is_mixed: bool = False,
        shared: AcceptanceRates | None = None,
    ) -> None:
        self._decay, self._weight, self._is_mixed, self._shared = decay, weight, is_mixed, shared
        self._right = [rate * weight for rate in rates]
        self._total = [weight] * len(rates)

    def of_text(self) -> AcceptanceRates:
        """Returns the rates of a new text, which begin with these."""
        return AcceptanceRates(self.rates(), TEXT_DECAY, self._weight, shared=self if self._is_mixed else None)

    def rate(self, level: int) -> float:
        """Returns how likely the next guess of a level is right: the share that were, and one more as in all texts.

        Rates that are not mixed count one more as wrong: of several guesses the one with the highest rate is taken,
        and that one is overestimated most often. The counts of one text are of its last ten guesses or so, which alone
        cannot tell 0.9 from 1.0, and chains of likely guesses are long or short by that difference.
        """
        others = 0.0 if self._shared is None else self._shared._right[level] / self._shared._total[level]
        return (self._right[level] + others) / (self._total[level] + 1)

    def rates(self) -> list[float]:
        """Returns the rate of each level."""
        return [right / total for right, total in zip(self._right, self._total, strict=True)]

    def record(self, level: int, is_right: bool) -> None:
        """Counts one guess."""
        self._right[level] = self._decay * self._right[level] + is_right
        self._total[level] = self._decay * self._total[level] + 1


class RatedGuess(NamedTuple):
    """A guess, the rates of its proposer in this text and in all texts, and its rate in this text."""

    token: int
    level: int
    rates: AcceptanceRates
    shared_rates: AcceptanceRates
    rate: float


class TextProposers:
    """The proposers of one text with their rates.

    `proposers`: each with the rates of all texts, with which the text's own begin. `model`: the one among them that
    guesses by a draft model, if there is one.
    """

    def __init__(
        self, proposers: Sequence[tuple[Proposer, AcceptanceRates]], model: ModelGuesses | None = None
    ) -> None:
        self.model = model
        self._proposers = [(proposer, shared.of_text(), shared) for proposer, shared in proposers]
        self._open: list[tuple[int, list[RatedGuess], int]] = []  # (position, its guesses, token of the draft or -1)
        self.cooldown = 0  # steps until it is due again
        self.draft_cost = 0.0  # of the last step, if it had a draft, relative to a step without one
        self._num_sampled, self._recent_tokens, self._recent_cost = 0, 1.0, 1.0

    def is_due(self) -> bool:
        """Whether to draft in this step. Called once a step; counts down the cooldown."""
        if not self.cooldown:
            return True
        self.cooldown -= 1
        return False

    def speed(self, num_sampled: int) -> float:
        """Returns how many tokens the text lately got at the cost of one step without a draft. Called once a draft.

        A token that a longer draft would add saves 1 / speed of a step only, because the next steps have drafts too.
        num_sampled: the tokens sampled so far; each step without a draft samples one.
        """
        num_new = num_sampled - self._num_sampled
        self._num_sampled, cost, self.draft_cost = num_sampled, self.draft_cost or num_new, 0.0
        self._recent_tokens = TEXT_DECAY * self._recent_tokens + num_new
        self._recent_cost = TEXT_DECAY * self._recent_cost + cost
        return max(1.0, self._recent_tokens / self._recent_cost)

    def guesses(self, text: IntArray, forced_end: int) -> list[RatedGuess]:
        """Returns the guesses of all proposers, the one that is most often right first; see `Proposer.guesses`."""
        rated = [
            RatedGuess(token, level, rates, shared, rates.rate(level))
            for proposer, rates, shared in self._proposers
            for token, level in proposer.guesses(text, forced_end)
        ]
        rated.sort(key=lambda guess: -guess.rate)
        return rated

    def remember(self, position: int, guesses: list[RatedGuess], drafted: int = -1) -> None:
        """Keeps the guesses of a position until its token is known. drafted: the one that the draft took."""
        self._open.append((position, guesses, drafted))

    def accept(self, text: IntArray, forced: Sequence[int]) -> None:
        """Counts the guesses at the positions up to the first where a draft was refused; see `Proposer.accept`."""
        for position, guesses, drafted in self._open:
            if position >= len(text):
                break
            token = int(text[position])
            for guess in guesses:
                guess.rates.record(guess.level, guess.token == token)
                guess.shared_rates.record(guess.level, guess.token == token)
            if self.model is not None:
                self.model.record(position, token, drafted)
            if drafted != token:
                break
        self._open.clear()
        for proposer, _, _ in self._proposers:
            proposer.accept(text, forced)
