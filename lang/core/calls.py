"""`begin_own_call` turns a call of a program into instructions to its branch's session. Nothing here waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from plait.lang.core.expressions import Gen, GenToolCall, Select
from plait.lang.core.results import GenResult, Samples, SelectResult
from plait.lang.errors import program_error
from plait.lang.source_location import caller_location
from plait.lang.tools.call_format import ToolCallFormat
from plait.lang.typed.value_format import ValueFormat
from plait.runtime.errors import PlaitError

if TYPE_CHECKING:
    from plait.lang.core.branch import Branch
    from plait.runtime.programs.steps import Step


def begin_own_call(branch: Branch, expr: Gen | Select | GenToolCall, following: Sequence[Step] = ()) -> None:
    """Starts a call, and sets its variable. `following`: what the same expression of the program appends next.

    Raises ProgramError, which names the variable, if the call is refused before it starts.
    """
    try:
        match expr:
            case Gen():
                _generate(branch, expr, following)
            case Select():
                _select(branch, expr)
            case GenToolCall():
                from plait.lang.core.tool_use.tool_turns import tool_call_gen

                before, gen = tool_call_gen(branch, expr)
                if before:
                    branch.write(before, control=True)
                _generate(branch, gen)
    except PlaitError as error:
        raise program_error(branch.run.program, expr.name, error, caller_location()) from error


def _generate(branch: Branch, expr: Gen, following: Sequence[Step] = ()) -> None:
    run = branch.run
    params, n = expr.options.merged_over(run.defaults, expr.constraint)
    params = branch.seed_path.params_of_next_gen(params, same_seed=expr.options.keeps_seed(run.defaults))
    asked = params.max_tokens
    if run.budget_tracker is not None:
        params = run.budget_tracker.limit_params(params)
    is_cut_by_budget = params.max_tokens < asked
    if expr.retries or expr.draft_tokens:
        from plait.lang.core.retries.gen_in_steps import begin_gen_in_steps  # lazy: few programs need it

        begin_gen_in_steps(branch, expr, params, n, is_cut_by_budget)
        return
    trailing_text = ""
    if expr.constraint is not None and not params.min_tokens and run.client.takes_following_text:
        trailing_text = branch.trailing_text(following, run.client.tokenizer)
    samples: list[GenResult] = []
    for call in branch.start_gen(expr.name, params, expr.constraint, n, trailing_text):
        sample = _result_type(expr.value_format)(run, expr.name, call, expr.value_format)
        sample.branch_id = run.new_branch_id(branch.branch_id) if samples else branch.branch_id
        sample.is_cut_by_budget = is_cut_by_budget
        run.add(sample)
        samples.append(sample)
    for sample in samples:
        sample.siblings = tuple(samples)
    branch.add(expr.name, samples[0] if n == 1 else Samples(samples))


def _result_type(value_format: ValueFormat | None) -> type[GenResult]:
    if isinstance(value_format, ToolCallFormat) and value_format.form is not None and value_format.form.marks:
        from plait.lang.core.tool_use.tool_turns import MarkedCall

        return MarkedCall
    return GenResult


def _select(branch: Branch, expr: Select) -> None:
    run = branch.run
    timeout_s = expr.timeout_s if expr.timeout_s is not None else run.defaults.fields.get("timeout_s")
    if run.budget_tracker is not None:
        timeout_s = run.budget_tracker.limit_timeout(timeout_s)
    draw = expr.options.merged_over(run.defaults)[0] if expr.method == "exact" else None
    same_seed = expr.options.keeps_seed(run.defaults)
    call = branch.start_select(expr.name, expr.choices, expr.method, timeout_s, draw, same_seed)
    call_segment = SelectResult(run, expr.name, call, expr.value_format)
    call_segment.branch_id = branch.branch_id
    run.add(call_segment)
    branch.add(expr.name, call_segment)
