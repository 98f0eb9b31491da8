"""Tools in a program: the gen of a tool call, the system turn that lists tools, and `s.call(name)`, which runs one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from plait.lang.core.expressions import Gen, GenToolCall, SystemWithTools
from plait.lang.core.results import GenResult, Segment
from plait.lang.errors import UnreadableValue
from plait.lang.tools.call_format import ToolCallFormat, called_tool_name, stop_after_call, tool_call_format
from plait.lang.tools.call_syntax import (
    DEFAULT_CALL_SYNTAX,
    default_tool_listing,
    detect_call_syntax,
    has_tool_turns,
    result_text,
    template_system_turn,
)
from plait.lang.tools.running import check_seconds, run_tool, run_tool_async
from plait.lang.tools.tool import ToolCall
from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.lang.core.branch import Branch


@dataclass(frozen=True)
class ToolResult:
    """The result of a tool: its `value`, or the `error` it raised. `text` is what the model reads. `call` is None if a
    validator of the argument types rejected the arguments, so that the tool did not run."""

    name: str
    call: ToolCall | None
    value: Any
    error: Exception | None
    text: str


def tool_call_gen(branch: Branch, expr: GenToolCall) -> tuple[str, Gen, str, bool]:
    """The constrained gen of one tool call, as (text before it, the gen, text after it, from_template).

    Where a call is required, the model's own markers around it are written instead of sampled. `from_template`: those
    markers come from the chat template, so they hold control tokens.
    """
    syntax = detect_call_syntax(branch.run.chat_template) if branch.in_turn else DEFAULT_CALL_SYNTAX
    value_format = tool_call_format(expr.tools, expr.choice, syntax, expr.value_format)
    ends_by_stop = expr.choice == "auto" and expr.value_format is None
    options = stop_after_call(expr.options) if ends_by_stop else expr.options
    gen, written = Gen(expr.name, options, value_format.spec, value_format), value_format.syntax
    if expr.choice != "required":
        return "", gen, "", False
    return written.begin, gen, written.end, written.from_template


def write_system_turn(branch: Branch, turn: SystemWithTools) -> None:
    """Writes a system turn that lists tools: as the chat template lists them in a first system turn, or as JSON lines
    after the content."""
    tools = turn.tools
    tokenizer = branch.run.client.tokenizer
    template = branch.run.chat_template
    is_first = not branch.turns and not branch.segments
    around_content = template_system_turn(template, tools) if template is not None and is_first else None
    listing = msgspec.json.encode([tool.as_json() for tool in tools]).decode()
    listing_tokens = tokenizer.encode([(listing, True)], at_start=False)
    # the template writes descriptions as its own text: a control token in one could end the turn
    if around_content is not None and not tokenizer.control_ids.intersection(listing_tokens):
        branch.write_templated_turn("system", *around_content, turn.content)
        return
    branch.begin_turn("system")
    branch.append(turn.content)
    branch.write("\n\n" + default_tool_listing(tools, detect_call_syntax(template)))
    branch.end_turn("system")


def call_tool(branch: Branch, name: str, variable: Segment, timeout: float | None) -> ToolResult | None:
    """Runs the tool call in `variable` and appends its result. Returns None if the model made no call."""
    result = _parse_call(name, variable, timeout)
    if isinstance(result, ToolCall):
        call, function = result, _function_of(name, result)
        try:
            result = _succeeded(call, run_tool(call.name, function, call.arguments, timeout))
        except Exception as error:
            result = _failed(call, error)
    return None if result is None else _append_result(branch, result)


async def call_tool_async(branch: Branch, name: str, variable: Segment, timeout: float | None) -> ToolResult | None:
    """`call_tool` for an event loop: awaits an async tool, runs a plain one in a thread. `variable` must be ready."""
    result = _parse_call(name, variable, timeout)
    if isinstance(result, ToolCall):
        call, function = result, _function_of(name, result)
        try:
            result = _succeeded(call, await run_tool_async(call.name, function, call.arguments, timeout))
        except Exception as error:
            result = _failed(call, error)
    return None if result is None else _append_result(branch, result)


def append_tool_result(branch: Branch, name: str, variable: Segment, value: Any) -> ToolResult:
    """Appends `value` as the result of the call in `variable`, which the program has run itself."""
    call = _parse_call(name, variable)
    if call is None:
        raise InputError(f"variable {name!r} is an answer in text: the model made no call, so there is no result")
    made = call.call if isinstance(call, ToolResult) else call
    return _append_result(branch, ToolResult(call.name, made, value, None, result_text(value)))


def _function_of(name: str, call: ToolCall) -> Callable[..., Any]:
    if call.tool.function is None:
        raise InputError(
            f"the tool {call.name!r} has no function: run the call s[{name!r}] and append its result with "
            f"s.tool_result({name!r}, value)"
        )
    return call.tool.function


def _parse_call(name: str, variable: Segment, timeout: float | None = None) -> ToolCall | ToolResult | None:
    """Returns the call; or, if its arguments were rejected, the result that says so; or None for no call.

    `timeout`: in seconds, of the tool; checked here.
    """
    if timeout is not None:
        check_seconds("call: timeout", timeout)
    value_format = variable.value_format if isinstance(variable, GenResult) else None
    if not isinstance(variable, GenResult) or not isinstance(value_format, ToolCallFormat):
        raise InputError(f"variable {name!r} is not a tool call: it does not come from gen({name!r}, tools=[...])")
    try:
        value = variable.value()
        return value if isinstance(value, ToolCall) else None
    except UnreadableValue as error:
        if not isinstance(error.__cause__, Exception) or not _is_complete(error.text, value_format):
            raise
        rejection = error.__cause__
        tool = called_tool_name(error.text, value_format)
        return ToolResult(tool, None, None, rejection, f"Error: {type(rejection).__name__}: {rejection}")


def _is_complete(text: str, value_format: ToolCallFormat) -> bool:
    try:
        return bool(called_tool_name(text, value_format))
    except (ValueError, KeyError):
        return False


def _succeeded(call: ToolCall, value: Any) -> ToolResult:
    return ToolResult(call.name, call, value, None, result_text(value))


def _failed(call: ToolCall, error: Exception) -> ToolResult:
    return ToolResult(call.name, call, None, error, f"Error: {type(error).__name__}: {error}")


def _append_result(branch: Branch, result: ToolResult) -> ToolResult:
    """Appends the result as the model expects it: as a separate turn, or as a line inside an open turn."""
    line = f"Result of {result.name}: {result.text}"
    template = branch.run.chat_template
    if template is None or branch.in_turn or not branch.turns:
        branch.write(f"\n{line}\n")
        return result
    if has_tool_turns(template) and _try_tool_turn(branch, result.text):
        return result
    branch.begin_turn("user")
    branch.write(line)
    branch.end_turn("user")
    return result


def _try_tool_turn(branch: Branch, text: str) -> bool:
    """Writes a turn of role "tool". Returns False if the template refuses it here; some refuse two in a row."""
    try:
        branch.begin_turn("tool")
    except InputError:
        return False
    branch.write(text)
    branch.end_turn("tool")
    return True
