"""The account of a draft model: whether its guesses pay on this machine, by times that are measured while it runs.

The unit is a decode step without drafts beside as many rows. An accepted token of the draft model earns the row's part
of a step; its forward passes, and what its draft tokens lengthen the steps by, are charged. Every decode step adds
ALLOWANCE, for trials. With nothing left the draft model rests, so that it never costs much more than the allowance.
"""

from __future__ import annotations

import numpy as np

from plait.runtime.drafts.proposer import SHARED_DECAY, AcceptanceRates

ALLOWANCE = 0.01  # of each decode step, for trials
FIRST_BALANCE = 5.0  # steps
MAX_BALANCE = 50.0  # so that what it earned on one kind of text is not lost on another
REOPEN_BALANCE = 2.0  # at which a draft model that rests is tried again
PRIOR_RATE, PRIOR_WEIGHT = 0.6, 2.0  # of its guesses that are expected to be right before any is counted
TIME_DECAY = 0.8  # of the measured times, at each new one
PASS_ROW_COST = 0.1  # supposed: what another row adds to a pass of the draft model, relative to a pass of one row
ROW_COST_DECAY = 0.9  # of what drafts cost, at each step with a draft
ROW_COST_FADE = 0.998  # the same, at each step without one, so that drafts that seemed too dear are tried again
ROW_COST_WEIGHT = 1.0  # supposed decode tokens that the supposed cost counts for
MAX_KEPT_ROWS = 1 << 16  # rows of a step whose times are read again
MAX_TRIAL_SHARE = 0.25  # of the balance that a trial may cost
FIRST_PAUSE, MAX_PAUSE = 4, 64  # steps between two trials where guesses do not seem to pay; each trial doubles it


class DraftAccount:
    """Counts for one pair of models. guess_s: seconds that a guess takes; catch_up_s: a token of a text that it reads.

    Both are first measured when the draft model is loaded, and then at each forward pass.
    `to_bytes` and `from_bytes` keep the account for a later start of the same models on the same machine.
    """

    def __init__(self, guess_s: float, catch_up_s: float) -> None:
        self.catch_up_s = catch_up_s
        self.balance, self.is_resting = FIRST_BALANCE, False
        self.rate = AcceptanceRates((PRIOR_RATE,), SHARED_DECAY, PRIOR_WEIGHT, is_mixed=True)  # of all texts
        self._pass_s = {1: guess_s}  # texts -> of a pass that guesses one token of each
        self._step_s: dict[int, float] = {}  # rows -> of a step that decodes one token of each
        self._row_costs: dict[int, tuple[float, float]] = {}  # rows -> what drafts cost, and were supposed to
        self._pause, self._steps_left, self._is_trial = FIRST_PAUSE, 0, False
        self._spent_s = 0.0  # in forward passes of the draft model, since the last step

    def guess_cost(self, num_rows: int) -> float | None:
        """Returns the cost of a guess relative to a decode token beside so many rows; None while it is not known."""
        step_s = self._step_s.get(num_rows)
        return None if step_s is None else self._pass_seconds(num_rows) / step_s

    def row_cost_factor(self, num_rows: int) -> float:
        """Returns how much more than supposed draft tokens lengthen a step of so many rows, as measured lately."""
        measured, supposed = self._row_costs.get(num_rows, (0.0, 0.0))
        return (ROW_COST_WEIGHT + measured) / (ROW_COST_WEIGHT + supposed)

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
        """Counts a forward pass of the draft model: `num_tokens` of `num_rows` texts.

        A pass was interrupted, and counts as less, if it took more than twice as long as usual.
        """
        is_guess, usual_s = num_tokens <= 2 * num_rows, self._pass_seconds(num_rows)
        seconds = min(seconds, 2 * (usual_s if is_guess else max(usual_s, num_tokens * self.catch_up_s)))
        self._spent_s += seconds
        if is_guess:
            known_s = self._pass_s.get(num_rows, seconds)
            self._pass_s[num_rows] = TIME_DECAY * known_s + (1 - TIME_DECAY) * seconds
        else:
            self.catch_up_s = TIME_DECAY * self.catch_up_s + (1 - TIME_DECAY) * seconds / num_tokens

    def record_step(
        self, num_rows: int, num_tokens: int, num_drafted: int, num_guessed: int, supposed: float, seconds: float
    ) -> None:
        """Counts a step of the model: its rows, tokens and draft tokens, and how many of those are of the draft model.

        supposed: what the draft tokens were supposed to lengthen the step by, in decode tokens. A step was interrupted,
        and counts as less, if it took more than twice as long as usual, or with drafts more than a step for each draft
        token and two.
        """
        step_s, spent_s, self._spent_s = self._step_s.get(num_rows), self._spent_s, 0.0
        if num_tokens == num_rows:
            new_s = seconds if step_s is None else TIME_DECAY * step_s + (1 - TIME_DECAY) * min(seconds, 2 * step_s)
            step_s = self._step_s[num_rows] = new_s
            self._add_row_cost(num_rows, ROW_COST_FADE, 0.0, 0.0)
        if step_s is None:
            return
        is_decode = num_tokens - num_drafted == num_rows
        if num_drafted:
            token_s = step_s / num_rows
            longer_s = supposed * self.row_cost_factor(num_rows) * token_s
            if is_decode:
                longer_s = min(max(0.0, seconds - step_s), (num_drafted + 1) * step_s)
                self._add_row_cost(num_rows, ROW_COST_DECAY, longer_s / token_s, supposed)
            spent_s += longer_s * num_guessed / num_drafted
        self._add((ALLOWANCE if is_decode else 0.0) - spent_s / step_s)

    def record_accepted(self, num_rows: int) -> None:
        """Counts an accepted token of the draft model in a step of so many rows."""
        self._add(1 / num_rows)

    def to_bytes(self) -> bytes:
        """Returns what was measured and learnt, as float64 numbers: five, and five for each number of rows."""
        numbers = [self.catch_up_s, self.balance, self.is_resting, self._pause, self.rate.rates()[0]]
        for rows in sorted({*self._pass_s, *self._step_s}):
            numbers += [rows, self._pass_s.get(rows, 0.0), self._step_s.get(rows, 0.0)]
            numbers += self._row_costs.get(rows, (0.0, 0.0))
        return np.array(numbers, np.float64).tobytes()

    @classmethod
    def from_bytes(cls, content: bytes) -> DraftAccount | None:
        """Returns the account of `to_bytes`; None if the content is no account's."""
        if len(content) % 40 or len(content) < 80:
            return None
        numbers = np.frombuffer(content, np.float64)
        catch_up_s, balance, is_resting, pause, rate = numbers[:5].tolist()
        table = {int(rows): times for rows, *times in numbers[5:].reshape(-1, 5).tolist() if 0 < rows < MAX_KEPT_ROWS}
        positive = np.isfinite(numbers).all() and (np.delete(numbers, 1) >= 0).all() and 1 in table
        if not positive or not table[1][0] or rate > 1 or not FIRST_PAUSE <= pause <= MAX_PAUSE:
            return None
        account = cls(table[1][0], catch_up_s)
        account.balance, account.is_resting, account._pause = min(MAX_BALANCE, balance), bool(is_resting), int(pause)
        account.rate = AcceptanceRates((rate,), SHARED_DECAY, PRIOR_WEIGHT, is_mixed=True)
        for rows, (pass_s, step_s, *costs) in table.items():
            account._pass_s |= {rows: pass_s} if pass_s else {}
            account._step_s |= {rows: step_s} if step_s else {}
            account._row_costs[rows] = costs[0], costs[1]
        return account

    def _pass_seconds(self, num_rows: int) -> float:
        """Returns how long a pass takes that guesses for so many texts."""
        return self._pass_s.get(num_rows) or self._pass_s[1] * (1 + PASS_ROW_COST * (num_rows - 1))

    def _add_row_cost(self, num_rows: int, decay: float, measured: float, supposed: float) -> None:
        before = self._row_costs.get(num_rows, (0.0, 0.0))
        self._row_costs[num_rows] = decay * before[0] + measured, decay * before[1] + supposed

    def _add(self, steps: float) -> None:
        self.balance = min(MAX_BALANCE, self.balance + steps)
        self.is_resting = self.balance <= (REOPEN_BALANCE if self.is_resting else 0.0)
