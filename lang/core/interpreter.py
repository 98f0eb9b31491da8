"""Executes an expression on a strand: each node becomes instructions to the session, and nothing here waits.

Knows: every node, and the session's methods. Must not know: threads, streaming, how values are read.
"""

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
from plait.lang.errors import program_error
from plait.lang.source_location import caller_location
from plait.lang.tools.call_format import stop_after_call, tool_call_format
from plait.lang.tools.call_syntax import (
    DEFAULT_CALL_SYNTAX,
    default_tool_listing,
    detect_call_syntax,
    template_system_turn,
)
from plait.runtime.errors import InputError, PlaitError

if TYPE_CHECKING:
    from plait.runtime.client.session import Session


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
            _system_with_tools(branch, expr)
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
                _generate_call(branch, expr)
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
        call = each.generate(params.for_sample(index), expr.constraint)
        gen_results.append(GenResult(run, expr.name, call, expr.value_format))
        gen_results[-1].lane = branch.lane if index == 0 else run.new_lane(branch.lane)
        run.add(gen_results[-1])
    for each in others:
        each.close()
    for call_segment in gen_results:
        call_segment.siblings = tuple(gen_results)
    branch.add(expr.name, gen_results[0] if n == 1 else Samples(gen_results))


def _generate_call(branch: Branch, expr: GenToolCall) -> None:
    """The model's words around a call are not sampled, where a call must be made."""
    syntax = detect_call_syntax(branch.run.client.tokenizer.chat_template) if branch.in_turn else DEFAULT_CALL_SYNTAX
    value_format = tool_call_format(expr.tools, expr.choice, syntax)
    options = stop_after_call(expr.options) if expr.choice == "auto" else expr.options
    must = expr.choice == "required"
    if must and value_format.syntax.begin:
        branch.write(value_format.syntax.begin, control=value_format.syntax.from_template)
    _generate(branch, Gen(expr.name, options, value_format.spec, value_format))
    if must and value_format.syntax.end:
        branch.write(value_format.syntax.end, control=value_format.syntax.from_template)


def _system_with_tools(branch: Branch, expr: SystemWithTools) -> None:
    tokenizer = branch.run.client.tokenizer
    template, listing = tokenizer.chat_template, [tool.as_json() for tool in expr.tools]
    own = None if template is None or branch.turns or branch.segments else template_system_turn(template, expr.tools)
    spelled = tokenizer.encode([(msgspec.json.encode(listing).decode(), True)], at_start=False)
    if own is not None and not tokenizer.control_ids.intersection(spelled):  # a description must not end the turn
        branch.write_templated_turn("system", *own, lambda: execute(expr.content, branch))
        return
    branch.begin_turn("system")
    execute(expr.content, branch)
    branch.write("\n\n" + default_tool_listing(expr.tools, detect_call_syntax(template)))
    branch.end_turn("system")


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
