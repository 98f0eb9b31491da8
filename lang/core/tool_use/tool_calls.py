"""Results of tools in a program: `s.call(name)`, which runs one, and `s.tool_result(name, value)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plait.lang.core.results import GenResult, Segment
from plait.lang.core.waiting import finish, value_of
from plait.lang.errors import UnreadableValue
from plait.lang.tools.call_format import ToolCallFormat
from plait.lang.tools.running import check_seconds, run_tool, run_tool_async
from plait.lang.tools.tool import ToolCall, result_text
from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.lang.core.branch import Branch

ANSWER_TOKENS = 256  # that a result leaves free for the turns after it
MAX_ERROR_CHARS = 2000  # of an error's message, for the model


@dataclass(frozen=True)
class ToolResult:
    """The result of a tool: its `value`, or the `error` it raised. `text` is what the model reads. `call` is None if a
    validator of the argument types rejected the arguments, so that the tool did not run.

    A value that is no text or data, or that does not fit into the context, is an error: of type TypeError, ValueError.
    """

    name: str
    call: ToolCall | None
    value: Any
    error: Exception | None
    text: str


def call_tool(branch: Branch, name: str, variable: Segment, timeout: float | None) -> ToolResult | None:
    """Runs the tool call in `variable` and appends its result. Returns None if the model made no call."""
    return finish(_call_tool(branch, name, variable, timeout, run_tool))


async def call_tool_async(branch: Branch, name: str, variable: Segment, timeout: float | None) -> ToolResult | None:
    """`call_tool` for an event loop: awaits an async tool, runs a plain one in a thread. `variable` must be ready."""
    return await _call_tool(branch, name, variable, timeout, run_tool_async)


async def _call_tool(
    branch: Branch, name: str, variable: Segment, timeout: float | None, run: Callable[..., Any]
) -> ToolResult | None:
    result = _parse_call(name, variable, timeout)
    if isinstance(result, ToolCall):
        call, function = result, _function_of(name, result)
        try:
            value = await value_of(run(call.name, function, call.arguments, timeout))
            result = ToolResult(call.name, call, value, None, result_text(value))
            _check_fits(branch, variable, result.text)
        except Exception as error:
            result = _failed(call.name, call, error)
    return None if result is None else _append_result(branch, name, variable, result)


def append_tool_result(branch: Branch, name: str, variable: Segment, value: Any) -> ToolResult:
    """Appends `value` as the result of the call in `variable`, which the program has run itself."""
    call = _parse_call(name, variable)
    if call is None:
        raise InputError(f"variable {name!r} is an answer in text: the model made no call, so there is no result")
    made = call.call if isinstance(call, ToolResult) else call
    return _append_result(branch, name, variable, ToolResult(call.name, made, value, None, result_text(value)))


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
    variable, value_format = _checked(name, variable)
    try:
        value = variable.value()
        return value if isinstance(value, ToolCall) else None
    except UnreadableValue as error:
        found, _ = variable.parse_call(value_format)
        if not isinstance(error.__cause__, Exception) or found is None or not found.is_complete:
            raise
        rejection = error.__cause__
        return _failed(found.name, None, rejection)


def _check_fits(branch: Branch, variable: Segment, text: str) -> None:
    """Raises ValueError if `text`, after the call in `variable`, leaves no room in the context for an answer. Where the
    client has no tokenizer, nothing is checked."""
    client, (call, *_) = branch.run.client, variable.calls()
    if call.usage is None or not client.takes_token_ids:
        return
    length = client.model.context_length
    room = length - call.usage.prompt_tokens - call.usage.completion_tokens - min(ANSWER_TOKENS, length // 4)
    if len(text.encode()) > room and (size := len(client.tokenizer.encode_plain(text))) > room:
        raise ValueError(f"the result is too long: {size:,} tokens, and {max(room, 0):,} fit; ask for less")


def _failed(name: str, call: ToolCall | None, error: Exception) -> ToolResult:
    message = str(error)[:MAX_ERROR_CHARS].encode(errors="replace").decode()
    return ToolResult(name, call, None, error, f"Error: {type(error).__name__}: {message}")


def _append_result(branch: Branch, name: str, variable: Segment, result: ToolResult) -> ToolResult:
    from plait.lang.core.tool_use.tool_turns import append_result  # lazy: few programs have tools

    append_result(branch, *_checked(name, variable), result.name, result.text)
    return result


def _checked(name: str, variable: Segment) -> tuple[GenResult, ToolCallFormat]:
    value_format = variable.value_format if isinstance(variable, GenResult) else None
    if not isinstance(variable, GenResult) or not isinstance(value_format, ToolCallFormat):
        raise InputError(f"variable {name!r} is not a tool call: it does not come from gen({name!r}, tools=[...])")
    return variable, value_format
