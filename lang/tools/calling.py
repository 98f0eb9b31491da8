"""`s.call(name)`: runs the tool that the model called and gives it the result, an exception included.

Knows: tools, strands, how a result is worded. Must not know: handles, sockets, schemas.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plait.lang.answers import Generated, Readable
from plait.lang.errors import UnreadableValue
from plait.lang.tools.generating import CallForm, name_in
from plait.lang.tools.tool import ToolCall
from plait.lang.tools.wording import has_tool_turns, result_text
from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.lang.strand import Strand


@dataclass(frozen=True)
class ToolResult:
    """What a tool gave: `value`, or the `error` it raised; `text` is what the model was told. `call` is None where
    the arguments were refused (by a validator of their types) before the tool could run."""

    name: str
    call: ToolCall | None
    value: Any
    error: Exception | None
    text: str


def call_tool(strand: Strand, name: str, variable: Readable) -> ToolResult | None:
    """Runs the call behind `variable` here and appends its result. None: the model called nothing."""
    call = _called(name, variable)
    if call is None:
        return None
    if isinstance(call, ToolResult):
        return _told(strand, call)
    try:
        value = call.tool.function(**call.arguments)
        if inspect.isawaitable(value):
            value = _run_here(call.name, value)
        result = ToolResult(call.name, call, value, None, result_text(value))
    except Exception as error:
        result = _failed(call, error)
    return _told(strand, result)


async def call_tool_async(strand: Strand, name: str, variable: Readable) -> ToolResult | None:
    """`call_tool` for an event loop: an async tool is awaited, a plain one runs in a thread. Expects an answer
    that has arrived."""
    call = _called(name, variable)
    if call is None:
        return None
    if isinstance(call, ToolResult):
        return _told(strand, call)
    try:
        if inspect.iscoroutinefunction(call.tool.function):
            value = await call.tool.function(**call.arguments)
        else:
            value = await asyncio.to_thread(call.tool.function, **call.arguments)
            if inspect.isawaitable(value):
                value = await value
        result = ToolResult(call.name, call, value, None, result_text(value))
    except Exception as error:
        result = _failed(call, error)
    return _told(strand, result)


def _called(name: str, variable: Readable) -> ToolCall | ToolResult | None:
    """The call; or the result that its arguments were refused; or None."""
    form = variable.form if isinstance(variable, Generated) else None
    if not isinstance(variable, Generated) or not isinstance(form, CallForm):
        raise InputError(f"variable {name!r} is no call: it does not come from gen({name!r}, tools=[...])")
    try:
        call: ToolCall | None = variable.value()
        return call
    except UnreadableValue as error:
        if not isinstance(error.__cause__, Exception) or not _is_whole(error.text, form):
            raise
        refused = error.__cause__
        tool = name_in(error.text, form)
        return ToolResult(tool, None, None, refused, f"Error: {type(refused).__name__}: {refused}")


def _is_whole(text: str, form: CallForm) -> bool:
    try:
        return bool(name_in(text, form))
    except (ValueError, KeyError):
        return False


def _run_here(name: str, value: Any) -> Any:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_awaited(value))
    if inspect.iscoroutine(value):
        value.close()
    raise InputError(f"the tool {name!r} is async and an event loop runs in this thread: make the program an async def")


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _failed(call: ToolCall, error: Exception) -> ToolResult:
    return ToolResult(call.name, call, None, error, f"Error: {type(error).__name__}: {error}")


def _told(strand: Strand, result: ToolResult) -> ToolResult:
    """Appends the result as the model expects it: a turn of its own, or a line where a turn is open."""
    line = f"Result of {result.name}: {result.text}"
    template = strand.run.client.tokenizer.chat_template
    if template is None or strand.in_turn or not strand.turns:
        strand.write(f"\n{line}\n")
        return result
    if has_tool_turns(template) and _wrote_turn(strand, result.text):
        return result
    strand.begin_turn("user")
    strand.write(line)
    strand.end_turn("user")
    return result


def _wrote_turn(strand: Strand, text: str) -> bool:
    """Writes a tool's turn; False where the template does not take one here, as some do for a second in a row."""
    try:
        strand.begin_turn("tool")
    except InputError:
        return False
    strand.write(text)
    strand.end_turn("tool")
    return True
