"""Executes an expression on a strand: each node becomes instructions to the session, and nothing here waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from plait.lang.core.branch import Branch
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
from plait.lang.core.reasoning import REASONING_SUFFIX, ReasoningPart, SeparateReasoning
from plait.lang.core.results import GenResult, Samples, SelectResult
from plait.lang.core.tool_calls import tool_call_gen, write_system_turn
from plait.lang.errors import program_error
from plait.lang.source_location import caller_location
from plait.runtime.errors import InputError, PlaitError

if TYPE_CHECKING:
    from plait.runtime.client.session import Session
    from plait.runtime.sampling_params import SamplingParams


def execute(expr: Expr, branch: Branch) -> None:
    """Appends `expr` to `branch`.

    Raises ProgramError, naming the variable, where a call could not even begin.
    """
    match expr:
        case Text():
            branch.write(expr.text)
        case Concat():
            for part in expr.parts:
                execute(part, branch)
        case Gen() | Select() | GenToolCall():
            _begin_call(branch, expr)
        case SeparateReasoning(gen, tags):
            execute(gen, branch)
            whole = branch.variables[str(gen.name)]
            branch.set(str(gen.name), ReasoningPart(whole, tags, 1))
            branch.set(f"{gen.name}{REASONING_SUFFIX}", ReasoningPart(whole, tags, 0))
        case SystemWithTools():
            write_system_turn(branch, expr.tools, lambda: execute(expr.content, branch))
        case RoleBegin():
            branch.begin_turn(expr.role)
        case RoleEnd():
            branch.end_turn(expr.role)
        case _:
            raise InputError(f"{type(expr).__name__} is no expression that plait can run")


def _begin_call(branch: Branch, expr: Gen | Select | GenToolCall) -> None:
    try:
        match expr:
            case Gen():
                _generate(branch, expr)
            case Select():
                _select(branch, expr)
            case GenToolCall():
                before, gen, after, from_template = tool_call_gen(branch, expr)
                if before:
                    branch.write(before, control=from_template)
                _generate(branch, gen)
                if after:
                    branch.write(after, control=from_template)
    except PlaitError as error:
        raise program_error(branch.run.program, expr.name, error, caller_location()) from error


def _announce_call(session: Session, name: str | None) -> None:
    """Tells a session that wants to know which variable its next call is for; a scheduler need not."""
    told = getattr(session, "set_next_call_name", None)
    if told is not None:
        told(name)


def _generate(branch: Branch, expr: Gen) -> None:
    run, session = branch.run, branch.session()
    params, n = expr.options.merged_over(run.defaults)
    if run.budget_tracker is not None:
        params = run.budget_tracker.limit_params(params)
    others = session.fork(n - 1) if n > 1 else []
    gen_results: list[GenResult] = []
    for index, each in enumerate((session, *others)):
        _announce_call(each, expr.name)
        call = each.generate(_sample(params, index), expr.constraint)
        gen_results.append(GenResult(run, expr.name, call, expr.value_format))
        gen_results[-1].lane = branch.lane if index == 0 else run.new_lane(branch.lane)
        run.add(gen_results[-1])
    for each in others:
        each.close()
    for call_segment in gen_results:
        call_segment.siblings = tuple(gen_results)
    branch.add(expr.name, gen_results[0] if n == 1 else Samples(gen_results))


def _sample(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of sample `index` of n: with one seed for all, all would be the same."""
    if params.seed is None or index == 0:
        return params
    return msgspec.structs.replace(params, seed=params.seed + index)


def _select(branch: Branch, expr: Select) -> None:
    run = branch.run
    timeout_s = expr.timeout_s if expr.timeout_s is not None else run.defaults.fields.get("timeout_s")
    if run.budget_tracker is not None:
        timeout_s = run.budget_tracker.limit_timeout(timeout_s)
    session = branch.session()
    _announce_call(session, expr.name)
    call = session.select(expr.choices, expr.method, timeout_s)
    call_segment = SelectResult(run, expr.name, call)
    call_segment.lane = branch.lane
    run.add(call_segment)
    branch.add(expr.name, call_segment)
