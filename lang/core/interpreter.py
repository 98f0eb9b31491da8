"""`execute(expr, branch)`: turns an expression into instructions to the branch's session. Nothing here waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from plait.constrained.specs import Reasoning
from plait.lang.core.expressions import (
    Concat,
    Expr,
    Gen,
    GenToolCall,
    RoleBegin,
    RoleEnd,
    Select,
    SystemWithTools,
    Text,
)
from plait.lang.core.results import GenResult, Samples, SelectResult
from plait.lang.derived.captures import CapturedText, GenWithCaptures, variables_of
from plait.lang.derived.reasoning import REASONING_SUFFIX, ReasoningPart, SeparateReasoning
from plait.lang.errors import program_error
from plait.lang.source_location import caller_location
from plait.lang.tools.call_format import ToolCallFormat
from plait.lang.typed.value_format import ValueFormat
from plait.runtime.client.following_text import following_text
from plait.runtime.errors import InputError, PlaitError

if TYPE_CHECKING:
    from plait.lang.core.branch import Branch
    from plait.runtime.sampling_params import SamplingParams


def execute(expr: Expr, branch: Branch, behind: Sequence[Expr] = ()) -> None:
    """Appends `expr` to `branch`. `behind`: what the same expression of the program appends next.

    Raises ProgramError, which names the variable, if a call is refused before it starts.
    """
    match expr:
        case Text():
            branch.write(expr.text)
        case Concat():
            for index, part in enumerate(expr.parts):
                execute(part, branch, expr.parts[index + 1 :])
        case Gen() | Select() | GenToolCall():
            _begin_call(branch, expr, behind)
        case SeparateReasoning(gen, tags):
            execute(gen, branch)
            output = branch.variables[str(gen.name)]
            branch.set(str(gen.name), ReasoningPart(output, tags, 1))
            branch.set(f"{gen.name}{REASONING_SUFFIX}", ReasoningPart(output, tags, 0))
        case GenWithCaptures(gen, spec, names):
            execute(gen, branch, behind)
            name = variables_of(gen)[:1]
            value = branch.variables[name[0]] if name else branch.segments[-1]
            for group in names:
                branch.set(group, CapturedText(value, spec, group))
        case SystemWithTools():
            from plait.lang.tools.tool_turns import write_system_turn  # lazy, here and below: few programs have tools

            write_system_turn(branch, expr.tools, lambda: execute(expr.content, branch))
        case RoleBegin():
            if behind and isinstance(behind[0], GenToolCall) and behind[0].choice != "none":
                from plait.lang.tools.tool_turns import begin_call_turn

                begin_call_turn(branch, expr.role)
            else:
                branch.begin_turn(expr.role)
        case RoleEnd():
            branch.end_turn(expr.role)
        case _:
            raise InputError(f"{type(expr).__name__} is not an expression that plait can run")


def _begin_call(branch: Branch, expr: Gen | Select | GenToolCall, behind: Sequence[Expr]) -> None:
    try:
        match expr:
            case Gen():
                _generate(branch, expr, behind)
            case Select():
                _select(branch, expr)
            case GenToolCall():
                from plait.lang.tools.tool_turns import tool_call_gen

                before, gen = tool_call_gen(branch, expr)
                if before:
                    branch.write(before, control=True)
                _generate(branch, gen)
    except PlaitError as error:
        raise program_error(branch.run.program, expr.name, error, caller_location()) from error


def _generate(branch: Branch, expr: Gen, behind: Sequence[Expr] = ()) -> None:
    run, session = branch.run, branch.session()
    params, n = expr.options.merged_over(run.defaults)
    params = branch.seed_path.params_of_next_gen(params, same_seed=expr.options.keeps_seed(run.defaults))
    if expr.constraint is None or isinstance(expr.constraint, Reasoning):
        params = _without_defaults_of_constrained_gens(params, expr.options.fields)
    asked = params.max_tokens
    if run.budget_tracker is not None:
        params = run.budget_tracker.limit_params(params)
    is_cut_by_budget = params.max_tokens < asked
    if expr.retries or expr.draft_tokens:
        _generate_in_steps(branch, expr, params, n, is_cut_by_budget)
        return
    followed_by = ""
    if expr.constraint is not None and not params.min_tokens:
        followed_by = _text_behind(behind, branch)
    sample_sessions = session.fork(n - 1) if n > 1 else []  # sample 0 is made by the branch's own session
    samples: list[GenResult] = []
    for index, sample_session in enumerate((session, *sample_sessions)):
        sample_session.set_next_call_name(expr.name)
        call = sample_session.generate(params.for_sample(index), expr.constraint, followed_by)
        sample = _result_type(expr.value_format)(run, expr.name, call, expr.value_format)
        sample.lane = branch.lane if index == 0 else run.new_lane(branch.lane)
        sample.is_cut_by_budget = is_cut_by_budget
        run.add(sample)
        samples.append(sample)
    for sample_session in sample_sessions:
        sample_session.close()
    for sample in samples:
        sample.siblings = tuple(samples)
    branch.add(expr.name, samples[0] if n == 1 else Samples(samples))
    branch.expect_known(followed_by)


def _result_type(value_format: ValueFormat | None) -> type[GenResult]:
    if isinstance(value_format, ToolCallFormat) and value_format.form is not None and value_format.form.marks:
        from plait.lang.tools.marked_call import MarkedCall

        return MarkedCall
    return GenResult


def _without_defaults_of_constrained_gens(params: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    """Returns `params` without `exact` and `particles` of the run's defaults. `given`: the fields of the gen itself."""
    neutral: dict[str, Any] = {"exact": False, "particles": None}
    return msgspec.structs.replace(params, **{name: neutral[name] for name in neutral if name not in given})


def _generate_in_steps(branch: Branch, expr: Gen, params: SamplingParams, n: int, is_cut_by_budget: bool) -> None:
    """Starts a gen of several calls: with a draft before its value, or with retries after it."""
    from plait.lang.retries.drafted_gen import begin_drafted_gen  # lazy: few programs need them
    from plait.lang.retries.retried_gen import begin_retried_gen

    if n > 1:
        option = "retries" if expr.retries else "draft_then_constrain"
        raise InputError(f"{option} cannot be combined with n; use forks, one for each sample")
    begin = begin_drafted_gen if expr.draft_tokens else begin_retried_gen
    begin(branch, expr, params, is_cut_by_budget)


def _text_behind(behind: Sequence[Expr], branch: Branch) -> str:
    """Returns the text that belongs to the constraint of a gen; "" if none does.

    `behind`: what the same expression appends after the gen. Texts and the end of the turn are known. Backends without
    a runtime of plait cannot constrain a value by the text behind it.
    """
    client = branch.run.client
    if not client.takes_following_text:
        return ""
    parts: list[tuple[str, bool]] = []
    for expr in behind:
        if isinstance(expr, Text):
            parts.append((expr.text, False))
            continue
        if isinstance(expr, RoleEnd) and branch.open_turn is not None and branch.open_turn[0] == expr.role:
            parts.append((branch.turn_suffix(expr.role), True))
        break
    return following_text(parts, client.tokenizer)


def _select(branch: Branch, expr: Select) -> None:
    run = branch.run
    timeout_s = expr.timeout_s if expr.timeout_s is not None else run.defaults.fields.get("timeout_s")
    if run.budget_tracker is not None:
        timeout_s = run.budget_tracker.limit_timeout(timeout_s)
    session, seed = branch.session(), None
    session.set_next_call_name(expr.name)
    if expr.method == "exact":
        params, _ = expr.options.merged_over(run.defaults)
        seed = branch.seed_path.params_of_next_gen(params, same_seed=expr.options.keeps_seed(run.defaults)).seed
    call = session.select(expr.choices, expr.method, timeout_s, seed)
    call_segment = SelectResult(run, expr.name, call, expr.value_format)
    call_segment.lane = branch.lane
    run.add(call_segment)
    branch.add(expr.name, call_segment)
