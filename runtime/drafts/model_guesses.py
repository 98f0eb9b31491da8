"""Guesses of a draft model for one text, and the decision whether to ask it for another.

The draft model's likeliest token is a guess, and its level the step of that token's probability. So the chance that the
model accepts it is learnt from both models together. A guess costs a forward pass of the draft model; it is asked only
where its guesses are expected to save more than that and the row of the model's step cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from plait.runtime.arrays import IntArray
from plait.runtime.drafts.draft_account import DraftAccount
from plait.runtime.drafts.proposer import Guess

NUM_LEVELS = 10  # equal steps of the probability from 0 to 1
MAX_CHAIN = 24  # guesses whose worth is summed


class ModelGuesses:
    """A `Proposer` whose guesses `add_guess` brings. account: of the draft model."""

    prior: ClassVar[tuple[float, ...]] = tuple(0.9 * (level + 0.5) / NUM_LEVELS for level in range(NUM_LEVELS))

    def __init__(self, account: DraftAccount) -> None:
        self._account = account
        self._rate = account.rate.of_text()
        self._guessed: dict[int, Guess] = {}  # by position
        self._num_rows = 1
        self._cost = 0.0  # of a guess in this step, relative to a decode token
        self._speed = 1.0  # of the text, see `TextProposers.speed`
        self._is_trial = False
        self.is_due = False  # whether the draft model may be asked again in this step
        self.asked_cost = 0.0  # of the guesses in this step, relative to a decode token

    def guesses(self, text: IntArray, forced_end: int) -> list[Guess]:
        """See `Proposer`."""
        return [self._guessed[len(text)]] if len(text) in self._guessed else []

    def add_guess(self, position: int, token: int, probability: float) -> None:
        """Takes the token that the draft model finds likeliest at a position."""
        self._guessed[position] = Guess(token, min(NUM_LEVELS - 1, int(NUM_LEVELS * probability)))

    def accept(self, text: IntArray, forced: Sequence[int]) -> None:
        """See `Proposer`."""
        self._guessed.clear()

    def count_asked(self, position: int) -> None:
        """Counts that the draft model was asked. Without a guess, it is asked no more in this step."""
        self.asked_cost += self._cost
        self.is_due = self.is_due and position in self._guessed

    def record(self, position: int, token: int, drafted: int) -> None:
        """Counts the guess of a position, whose token is known now. drafted: the token of the draft there, or -1."""
        guess = self._guessed.get(position)
        if guess is None:
            return
        for rate in (self._rate, self._account.rate):
            rate.record(0, guess.token == token)
        if drafted == guess.token == token:
            self._account.record_accepted(self._num_rows)

    def num_guessed(self, tokens: Sequence[int], start: int) -> int:
        """Returns how many of draft tokens, which begin at position `start`, are guesses of the draft model."""
        return sum(self._guessed.get(start + i, Guess(-1, 0)).token == token for i, token in enumerate(tokens))

    def begin_step(self, num_rows: int, speed: float, token_cost: float, first_token_cost: float) -> None:
        """Decides whether the draft model is asked in a step of so many rows; the costs are those of `Drafter._build`.

        Where its guesses do not seem to pay, one is tried now and then: the texts, and the measured times, may change.
        """
        self.is_due, self.asked_cost, self._num_rows = False, 0.0, num_rows
        cost = None if self._account.is_resting else self._account.guess_cost(num_rows)
        if cost is None:
            return
        self._cost, self._speed = cost, speed
        self._is_trial = _gain(self._rate.rate(0), token_cost + speed * cost) <= first_token_cost
        if not self._is_trial:
            self._account.end_trials()
        elif not self._account.may_try(cost):
            return
        self.is_due = True

    def is_worth_asking(self, probability: float, other_rate: float, token_cost: float) -> bool:
        """Whether to ask at a position. probability: that all before is accepted. other_rate: of another's guess."""
        if not self.is_due:
            return False
        if self._is_trial:
            self.is_due = False
            return True
        gain = probability * self._rate.rate(0) - max(token_cost, probability * other_rate)
        return gain > self._speed * self._cost


def _gain(rate: float, cost: float) -> float:
    """Returns what a chain of guesses saves at its best length, in decode tokens."""
    gain, probability = 0.0, rate
    for _ in range(MAX_CHAIN):
        if probability <= cost:
            break
        gain += probability - cost
        probability *= rate
    return gain
