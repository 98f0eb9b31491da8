"""The account of a draft model: whether its guesses pay on this machine, by times that are measured while it runs.

The unit is a decode step without drafts beside as many rows. An accepted token of the draft model earns the row's part
of a step; its forward passes, and what its draft tokens lengthen the steps by, are charged. Every decode step adds
ALLOWANCE, for trials. With nothing left the draft model rests, so that it never costs much more than the allowance.
"""

from __future__ import annotations

from plait.runtime.drafts.proposer import SHARED_DECAY, AcceptanceRates

ALLOWANCE = 0.01  # of each decode step, for trials
FIRST_BALANCE = 10.0  # steps
MAX_BALANCE = 50.0  # so that what it earned on one kind of text is not lost on another
REOPEN_BALANCE = 5.0  # at which a draft model that rests is tried again
PRIOR_RATE = 0.6  # of its guesses that are expected to be right before any is counted
TIME_DECAY = 0.8  # of the measured times, at each new one
MAX_TRIAL_SHARE = 0.25  # of the balance that a trial may cost
FIRST_PAUSE, MAX_PAUSE = 4, 1024  # steps between two trials where guesses do not seem to pay; each trial doubles it


class DraftAccount:
    """Counts for one pair of models. guess_s: seconds that a guess takes; catch_up_s: a token of a text that it reads.

    Both are first measured when the draft model is loaded, and then at each forward pass.
    """

    def __init__(self, guess_s: float, catch_up_s: float) -> None:
        self.guess_s, self.catch_up_s = guess_s, catch_up_s
        self.balance, self.is_resting = FIRST_BALANCE, False
        self.rate = AcceptanceRates((PRIOR_RATE,), SHARED_DECAY)  # of all texts
        self._step_s: dict[int, float] = {}  # rows -> of a step that decodes one token of each
        self._pause, self._steps_left, self._is_trial = FIRST_PAUSE, 0, False
        self._spent_s = 0.0  # in forward passes of the draft model, since the last step

    def guess_cost(self, num_rows: int) -> float | None:
        """Returns the cost of a guess relative to a decode token beside so many rows; None while it is not known."""
        step_s = self._step_s.get(num_rows)
        return None if step_s is None else self.guess_s * num_rows / step_s

    def begin_step(self) -> None:
        """Begins a step in which texts may be drafted."""
        self._steps_left = max(0, self._steps_left - 1)
        if self._is_trial:
            self._steps_left, self._pause, self._is_trial = self._pause, min(MAX_PAUSE, 2 * self._pause), False

    def may_try(self, cost: float) -> bool:
        """Whether a guess of this cost may be tried in this step although it is not expected to pay.

        The texts of a step try together, so that they share a forward pass.
        """
        may_try = not self._steps_left and cost <= MAX_TRIAL_SHARE * self.balance
        self._is_trial |= may_try
        return may_try

    def end_trials(self) -> None:
        """Is told that guesses are expected to pay; later trials begin with short pauses again."""
        self._pause = FIRST_PAUSE

    def may_catch_up(self, num_rows: int, num_tokens: int) -> bool:
        """Whether there is enough left to compute so many tokens of a text that the draft model has not read."""
        return num_tokens * self.catch_up_s <= self.balance * self._step_s[num_rows]

    def record_forward(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Counts a forward pass of the draft model: `num_tokens` of `num_rows` texts."""
        self._spent_s += seconds
        if num_tokens <= 2 * num_rows:
            self.guess_s = TIME_DECAY * self.guess_s + (1 - TIME_DECAY) * seconds / num_rows
        else:
            self.catch_up_s = TIME_DECAY * self.catch_up_s + (1 - TIME_DECAY) * seconds / num_tokens

    def record_step(self, num_rows: int, num_tokens: int, num_drafted: int, num_guessed: int, seconds: float) -> None:
        """Counts a step of the model: its rows, tokens and draft tokens, and how many of those are of the draft model.

        A step was interrupted, and counts as less, if it took more than twice as long as usual, or with drafts more
        than a step for each draft token and two.
        """
        step_s, spent_s, self._spent_s = self._step_s.get(num_rows), self._spent_s, 0.0
        if num_tokens == num_rows:
            new_s = seconds if step_s is None else TIME_DECAY * step_s + (1 - TIME_DECAY) * min(seconds, 2 * step_s)
            step_s = self._step_s[num_rows] = new_s
        if step_s is None:
            return
        if num_guessed:
            longer_s = min(max(0.0, seconds - step_s), (num_drafted + 1) * step_s)
            spent_s += longer_s * num_guessed / num_drafted
        self._add((ALLOWANCE if num_tokens - num_drafted == num_rows else 0.0) - spent_s / step_s)

    def record_accepted(self, num_rows: int) -> None:
        """Counts an accepted token of the draft model in a step of so many rows."""
        self._add(1 / num_rows)

    def _add(self, steps: float) -> None:
        self.balance = min(MAX_BALANCE, self.balance + steps)
        self.is_resting = self.balance <= (REOPEN_BALANCE if self.is_resting else 0.0)
