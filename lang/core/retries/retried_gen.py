"""`begin_retried_gen`: starts a gen whose value is checked, and asks again in new turns (or lines) after a refused one.

The attempts run on a fork. The program's text goes on with the last answer alone, so a refused one is never part of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from plait.lang.budget import BudgetExceeded
from plait.lang.core.results import GenResult
from plait.lang.core.retries.question import Ask, question_after
from plait.lang.core.retries.retried_call import NOT_READ, RetriedCall
from plait.lang.errors import Attempt, program_error
from plait.lang.source_location import caller_location
from plait.lang.typed.value_format import RefusedValue
from plait.runtime.errors import InputError

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


def begin_retried_gen(branch: Branch, gen: Gen, params: SamplingParams, is_cut_by_budget: bool) -> None:
    """Starts the first attempt, and appends the text of the last one, which is known later, to the branch.

    Raises what a plain gen raises.
    """
    value_format = gen.value_format
    if value_format is None:
        raise InputError("retries needs a type, which tells whether a value is valid")

    def read(call: RetriedCall, result: CallResult) -> Any:
        return value_format.read_result(result.text, result.finish_reason)

    ask = question_after(branch)
    begin_gen_in_steps(
        branch, gen, (params,) * (gen.retries + 1), is_cut_by_budget, (RetriedCall, RetriedGen), ask, read
    )


def begin_gen_in_steps(
    branch: Branch,
    gen: Gen,
    steps: Sequence[SamplingParams],
    is_cut_by_budget: bool,
    types: tuple[type[RetriedCall], type[GenResult]],
    ask: Ask,
    read: Callable[[RetriedCall, CallResult], Any],
    num_drafts: int = 0,
) -> None:
    """Starts a gen of several calls on a fork, and appends its text, which is known later, to the branch.

    `steps`: the parameters of each call; the first `num_drafts` have no constraint. `types`: of the calls taken as one
    and of its result. `read(call, result)` returns the value of a step, or raises RefusedValue.
    """
    run, place = branch.run, caller_location()
    (session,) = branch.session().fork(1)
    timeout_s = steps[-1].timeout_s
    ends_at = None if timeout_s is None else time.monotonic() + timeout_s

    def start(refused: Sequence[Attempt]) -> Call:
        number = len(refused)
        if refused:
            ask(session, number, refused[-1].reason)
        session.set_next_call_name(gen.name)
        limited = run.limited_params(steps[number], ends_at, "the timeout passed before the gen could be asked again")
        limited, is_draft = limited.for_sample(number), number < num_drafts
        result.is_cut_by_budget |= not is_draft and limited.max_tokens < steps[number].max_tokens
        return session.generate(limited, None if is_draft else gen.constraint)

    def on_budget_spent(error: BudgetExceeded) -> None:
        run.fail(program_error(run.program, gen.name, error, place))

    make_call, make_result = types
    call: RetriedCall = make_call(
        run.client, timeout_s, len(steps), start, lambda answer: read(call, answer), session, on_budget_spent
    )
    result = make_result(run, gen.name, call, gen.value_format)
    result.branch_id, result.is_cut_by_budget = branch.branch_id, is_cut_by_budget
    run.add(result)  # before the first step, whose tokens count
    call.begin()
    branch.defer_session().append_later((call,), lambda: ((call.result().text, False),))
    branch.add(gen.name, result)
