"""`begin_retried_gen`: starts a gen whose value is checked, and asks again in new turns (or lines) after a refused one.

The attempts run on a fork. The program's text goes on with the last answer alone, so a refused one is never part of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from plait.lang.budget import BudgetExceeded
from plait.lang.core.results import GenResult
from plait.lang.errors import Attempt, program_error
from plait.lang.retries.question import question_after
from plait.lang.retries.retried_call import NOT_READ, RetriedCall
from plait.lang.source_location import caller_location
from plait.lang.typed.value_format import RefusedValue
from plait.runtime.errors import DeadlineExceeded, InputError

if TYPE_CHECKING:
    from plait.lang.core.branch import Branch
    from plait.lang.core.expressions import Gen
    from plait.runtime.client.call import Call, CallResult
    from plait.runtime.sampling_params import SamplingParams


class RetriedGen(GenResult):
    """The result of a gen with `retries`. Its value was read when its call ended."""

    call: RetriedCall

    def value(self) -> Any:
        self.result()
        return super().value() if self.call.value is NOT_READ else self.call.value

    def _attempts(self, text: str, refusal: RefusedValue) -> tuple[Attempt, ...]:
        return tuple(self.call.refused) or super()._attempts(text, refusal)


def begin_retried_gen(
    branch: Branch,
    gen: Gen,
    params: SamplingParams,
    announce: Callable[[Any, str | None], None],
    is_cut_by_budget: bool,
) -> None:
    """Starts the first attempt, and appends the text of the last one, which is known later, to the branch.

    `announce(session, name)` gives a session the variable of its next call. Raises what a plain gen raises.
    """
    run, session, value_format = branch.run, branch.session(), gen.value_format
    if value_format is None:
        raise InputError("retries needs a type, which tells whether a value is valid")
    (attempts_session,) = session.fork(1)
    ask = question_after(branch)
    ends_at = None if params.timeout_s is None else time.monotonic() + params.timeout_s

    def start(refused: Sequence[Attempt]) -> Call:
        if refused:
            ask(attempts_session, len(refused), refused[-1].reason)
        announce(attempts_session, gen.name)
        limited = limited_params(params, ends_at, len(refused), branch)
        retried.is_cut_by_budget |= limited.max_tokens < params.max_tokens
        started: Call = attempts_session.generate(limited, gen.constraint)
        return started

    def read(result: CallResult) -> Any:
        return value_format.read_result(result.text, result.finish_reason)

    def on_budget_spent(error: BudgetExceeded) -> None:
        run.fail(program_error(run.program, gen.name, error, place))

    place = caller_location()
    call = RetriedCall(run.client, params.timeout_s, gen.retries + 1, start, read, attempts_session, on_budget_spent)
    retried = RetriedGen(run, gen.name, call, value_format)
    begin_call(branch, gen, call, retried, is_cut_by_budget)


def begin_call(branch: Branch, gen: Gen, call: RetriedCall, result: GenResult, is_cut_by_budget: bool) -> None:
    """Begins a call of several steps, and appends its text, which is known later, to the branch."""
    result.lane, result.is_cut_by_budget = branch.lane, is_cut_by_budget
    branch.run.add(result)  # before the first step, whose tokens count
    call.begin()
    branch.defer_session().append_later((call,), lambda: call.result().text)
    branch.add(gen.name, result)


def limited_params(params: SamplingParams, ends_at: float | None, number: int, branch: Branch) -> SamplingParams:
    """Returns the parameters of attempt `number`: with the time that is left, and within the budget of the run."""
    if ends_at is not None:
        seconds_left = ends_at - time.monotonic()
        if seconds_left <= 0:
            raise DeadlineExceeded("the timeout passed before the gen could be asked again")
        params = msgspec.structs.replace(params, timeout_s=seconds_left)
    if branch.run.budget_tracker is not None:
        params = branch.run.budget_tracker.limit_params(params)
    return params.for_sample(number)
