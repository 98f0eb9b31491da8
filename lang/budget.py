"""`Budget`: limits on the tokens and seconds of one program run, forks included.

The rest of the seconds is the timeout of each call, which the runtime enforces; there is no timer or thread here.
Tokens are counted as they are generated, and the rest of them is an upper bound on each call's max_tokens.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from plait.runtime.errors import InputError, PlaitError

if TYPE_CHECKING:
    from plait.runtime.client.call import Call
    from plait.runtime.sampling_params import SamplingParams


class BudgetExceeded(PlaitError):
    """The budget of a program is used up. Its calls were aborted, and new ones are refused. Pass a larger Budget."""


@dataclass(frozen=True)
class Budget:
    """The limits of one run: `tokens` generated (sampled or forced) over all calls, `seconds` from the start of the
    run.

    >>> state = agent.run("...", budget=Budget(tokens=2000, seconds=30))     # doctest: +SKIP
    """

    tokens: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.tokens is None and self.seconds is None:
            raise InputError("a Budget needs tokens, seconds or both")
        if self.tokens is not None and (type(self.tokens) is not int or self.tokens < 1):
            raise InputError(f"tokens of a Budget must be an integer of at least 1, not {self.tokens!r:.80}")
        if self.seconds is not None:
            is_number = isinstance(self.seconds, int | float) and not isinstance(self.seconds, bool)
            if not is_number or not math.isfinite(self.seconds) or self.seconds <= 0:
                raise InputError(f"seconds of a Budget must be a number above 0, not {self.seconds!r:.80}")


def _seconds_text(seconds: float) -> str:
    """
    >>> _seconds_text(0.0123), _seconds_text(1.04)
    ('0.012 s', '1.0 s')
    """
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2g} s"


def checked_budget(where: str, budget: object) -> Budget | None:
    """Returns `budget`. Raises InputError, beginning with `where`, unless it is a Budget or None."""
    if budget is not None and not isinstance(budget, Budget):
        raise InputError(f"{where}: budget takes a Budget(tokens=..., seconds=...), not {budget!r:.80}")
    return budget


class BudgetTracker:
    """Tracks the budget of one run. `on_spent` is called once, from any thread, when the tokens are used up."""

    def __init__(self, budget: Budget, on_spent: Callable[[BudgetExceeded], None]) -> None:
        self._budget = budget
        self._on_spent = on_spent
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._calls: list[Call] = []
        self._by_call: dict[int, int] = {}
        self._tokens = 0
        self._error: BudgetExceeded | None = None

    def limit_params(self, params: SamplingParams) -> SamplingParams:
        """Returns the parameters of a call that starts now. Raises BudgetExceeded if nothing is left."""
        fields: dict[str, int | float] = {}
        if self._budget.tokens is not None:
            tokens_left = self._budget.tokens - self._tokens
            if tokens_left <= 0:
                raise self.exceeded_error()
            fields = {
                "max_tokens": min(params.max_tokens, tokens_left),
                "min_tokens": min(params.min_tokens, tokens_left),
            }
        timeout_s = self.limit_timeout(params.timeout_s)
        return msgspec.structs.replace(params, timeout_s=timeout_s, **fields)

    def limit_timeout(self, timeout_s: float | None) -> float | None:
        """Returns the timeout of a call that starts now, in seconds. Raises BudgetExceeded if no time is left."""
        seconds_left = self.seconds_left()
        if seconds_left is None:
            return timeout_s
        if seconds_left <= 0:
            raise self.exceeded_error()
        return seconds_left if timeout_s is None else min(timeout_s, seconds_left)

    def seconds_left(self) -> float | None:
        """Returns the seconds left (negative if overdrawn), or None for a budget without seconds."""
        if self._budget.seconds is None:
            return None
        return self._budget.seconds - (time.monotonic() - self._started)

    def is_out_of_time(self) -> bool:
        seconds_left = self.seconds_left()
        return seconds_left is not None and seconds_left <= 0

    def count_tokens(self, call: Call) -> None:
        """Counts the tokens of `call`; as they are generated, if the budget limits them."""
        self._calls.append(call)
        if self._budget.tokens is None:
            return

        def count() -> None:
            num_tokens = call.num_tokens
            with self._lock:
                before = self._tokens
                self._tokens += max(0, num_tokens - self._by_call.get(call.call_id, 0))
                self._by_call[call.call_id] = max(num_tokens, self._by_call.get(call.call_id, 0))
                limit = self._budget.tokens or 0
                is_spent = before <= limit < self._tokens
            if is_spent:
                self._on_spent(self.exceeded_error())

        call.add_listener(count)
        count()

    def exceeded_error(self, reason: str = "") -> BudgetExceeded:
        """Returns the error, one object for the whole run. `reason`: why the tokens that are left do not suffice."""
        if self._error is not None:
            return self._error
        limits = [f"{self._budget.tokens} tokens"] if self._budget.tokens is not None else []
        limits += [f"{self._budget.seconds:g} s"] if self._budget.seconds is not None else []
        num_tokens = sum(call.num_tokens for call in list(self._calls))
        used = f"{num_tokens} tokens, {_seconds_text(time.monotonic() - self._started)}"
        self._error = BudgetExceeded(
            f"the budget of {' and '.join(limits)} is spent (used: {used}){reason and ': '}{reason}"
        )
        return self._error
