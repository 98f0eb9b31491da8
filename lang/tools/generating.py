"""`gen(name, tools=...)`: the constraint that holds a call, and the value it is read as.

Knows: tools, wordings, constraints. Must not know: states, sessions, how a tool is run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from plait.constrained.specs import GrammarError, JsonSchema, Spec, Structural
from plait.lang.options import UNSTOPPED, Options, make_options
from plait.lang.tools.tool import Tool, ToolCall, call_schema, read_call, tools_of
from plait.lang.tools.wording import PLAIN, Wording
from plait.lang.typed.form import Form
from plait.runtime.errors import InputError

ToolChoice = Literal["required", "auto", "none"]
CALL_IS_OVER = "\n<end of call>"
"""Under "auto" a call is held to end with this, which as a stop string ends the text there and is cut from it."""


@dataclass(frozen=True)
class CallForm(Form):
    """A call, or with `choice` "auto" a text in which there may be one; then the value can be None."""

    wording: Wording = PLAIN
    choice: ToolChoice = "required"
    tools: tuple[Tool, ...] = ()


def checked_tools(where: str, functions: object, choice: object) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools that may be called, and whether one must be. A function or its name as `choice` leaves only that."""
    tools = tools_of(where, functions)
    match choice:
        case None | "required":
            return tools, "required"
        case "auto":
            return tools, "auto"
        case "none":
            return tools, "none"
    only = tuple(tool for tool in tools if choice in (tool.name, tool.function))
    if not only:
        names = ", ".join(tool.name for tool in tools)
        raise InputError(
            f'{where}: tool_choice is "required", "auto", "none", or one of the tools ({names}), not {choice!r:.80}'
        )
    return only, "required"


def call_options(where: str, choice: ToolChoice, sampling: dict[str, Any]) -> Options:
    """A call that must be made is complete and ends itself; other text may have stop strings of its own."""
    if choice == "none":
        return make_options(where, **sampling)
    for keyword in UNSTOPPED:
        if sampling[keyword] is not None:
            raise InputError(f"{where}: {keyword} has no effect with tools; a call ends itself")
    if choice == "auto":
        if sampling["complete"]:
            raise InputError(f'{where}: complete needs tool_choice="required"; what "auto" gives may be free text')
        return make_options(where, **sampling)
    whole = sampling | UNSTOPPED | {"complete": sampling["complete"] is not False}
    return make_options(where, **whole)


def call_form(tools: tuple[Tool, ...], choice: ToolChoice, wording: Wording) -> CallForm:
    """How a call of `tools` is held and read, as this model words it."""
    if choice == "none":
        return CallForm("text", None, _nothing, None, False, wording, choice, tools)
    if choice == "auto" and not wording.begin:
        wording = PLAIN  # free text and calls must be told apart
    read = _reader(tools, wording)
    if choice == "required":
        return CallForm("call of a tool", _held(tools, wording, choice), read, None, False, wording, choice, tools)

    def read_in_text(text: str) -> ToolCall | None:
        call = _call_in(text, wording)
        return None if call is None else read(call)

    return CallForm("call of a tool", _held(tools, wording, choice), read_in_text, None, True, wording, choice, tools)


def ended_by_call(options: Options) -> Options:
    """Options under which the text ends with its first call."""
    return replace(options, fields={**options.fields, "stop": (CALL_IS_OVER,)})


def name_in(text: str, form: CallForm) -> str:
    """The name of the tool that is called in `text`, a call whose arguments could not be read."""
    call = _call_in(text, form.wording) if form.choice == "auto" else text
    return str(json.loads(call or "")[form.wording.name_key])


def _call_in(text: str, wording: Wording) -> str | None:
    """The JSON of the call at the end of `text`; None: there is no call."""
    _, begin, call = text.partition(wording.begin)
    return call.removesuffix(wording.end) if begin else None


def _held(tools: tuple[Tool, ...], wording: Wording, choice: ToolChoice) -> Spec:
    schema = json.dumps(call_schema(tools, wording.name_key, wording.arguments_key), ensure_ascii=False)
    try:
        if choice == "auto":
            return Structural([(wording.begin, schema, wording.end + CALL_IS_OVER)], at_most=1)
        return JsonSchema(schema)
    except GrammarError as error:
        raise InputError(f"the tools cannot be held to their schema: {error}") from None


def _reader(tools: tuple[Tool, ...], wording: Wording) -> Callable[[str], ToolCall]:
    return lambda text: read_call(text, tools, wording.name_key, wording.arguments_key)


def _nothing(text: str) -> None:
    return None
