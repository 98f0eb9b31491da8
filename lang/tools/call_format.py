"""`gen(name, tools=...)`: the constraint of a tool call, and how its text is parsed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from plait.constrained.specs import GrammarError, JsonSchema, Spec, Structural
from plait.lang.sampling_options import NO_STOP, Options, make_options
from plait.lang.tools.call_schema import call_schema
from plait.lang.tools.call_syntax import DEFAULT_CALL_SYNTAX, ToolCallSyntax
from plait.lang.tools.make_tools import make_tools
from plait.lang.tools.tool import Tool, ToolCall
from plait.lang.typed.value_format import ValueFormat
from plait.runtime.errors import InputError

ToolChoice = Literal["required", "auto", "none"]
CALL_END_MARKER = "\n<end of call>"
"""With tool_choice "auto" the constraint ends a call with this text. It is also a stop string, so it is not
returned."""
JSON_BEGINNINGS = ("", *'{["-0123456789tfn')


@dataclass(frozen=True)
class ToolCallFormat(ValueFormat):
    """The format of a tool call; with `choice` "auto" of text that may contain one, whose value can be None."""

    syntax: ToolCallSyntax = DEFAULT_CALL_SYNTAX
    choice: ToolChoice = "required"
    tools: tuple[Tool, ...] = ()


def checked_tools(where: str, sources: object, choice: object) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Returns the tools and the choice. If `choice` is one of the tools or its name, only that tool is left.

    Raises InputError, beginning with `where`, for invalid tools or an unknown choice.
    """
    tools = make_tools(where, sources)
    match choice:
        case None | "required":
            return tools, "required"
        case "auto":
            return tools, "auto"
        case "none":
            return tools, "none"
    only = tuple(tool for tool in tools if choice is tool or choice in (tool.name, tool.function))
    if not only:
        names = ", ".join(tool.name for tool in tools)
        raise InputError(
            f'{where}: tool_choice is "required", "auto", "none", or one of the tools ({names}), not {choice!r:.80}'
        )
    return only, "required"


def call_options(where: str, choice: ToolChoice, sampling: dict[str, Any]) -> Options:
    """Returns the options of a gen with tools. A required call is complete and has no stop strings.

    Raises InputError, beginning with `where`, for a keyword that has no effect with tools.
    """
    if choice == "none":
        return make_options(where, **sampling)
    for keyword in NO_STOP:
        if sampling[keyword] is not None:
            raise InputError(f"{where}: {keyword} has no effect with tools, since a call ends when it is complete")
    if choice == "auto":
        if sampling["complete"]:
            raise InputError(f'{where}: complete needs tool_choice="required", since "auto" allows free text')
        return make_options(where, **sampling)
    return make_options(where, **(sampling | NO_STOP | {"complete": sampling["complete"] is not False}))


def value_or_call_options(where: str, choice: ToolChoice, sampling: dict[str, Any]) -> Options:
    """Returns the options of a gen of a call or a value: it is complete and has no stop strings, like a required call.

    Raises InputError, beginning with `where`, for a keyword that has no effect, and for a choice without the value.
    """
    if choice != "auto":
        raise InputError(f'{where}: with type or json_schema, tool_choice must be "auto": a call or a value')
    return call_options(where, "required", sampling)


def tool_call_format(
    tools: tuple[Tool, ...], choice: ToolChoice, syntax: ToolCallSyntax, value: ValueFormat | None = None
) -> ToolCallFormat:
    """Returns the format of a call of `tools` in the syntax of this model. `value`: the format of a JSON value that the
    text may be instead."""
    if value is not None:
        return _value_or_call_format(tools, choice, syntax, value)
    if choice == "none":
        return ToolCallFormat("text", None, _nothing, None, False, syntax, choice, tools)
    if choice == "auto" and not syntax.begin:
        syntax = DEFAULT_CALL_SYNTAX  # free text and calls must be distinguishable
    read = _reader(tools, syntax)
    if choice == "required":
        return ToolCallFormat(
            "call of a tool", _call_constraint(tools, syntax, choice), read, None, False, syntax, choice, tools
        )

    def read_in_text(text: str) -> ToolCall | None:
        call = _extract_call(text, syntax)
        return None if call is None else read(call)

    return ToolCallFormat(
        "call of a tool", _call_constraint(tools, syntax, choice), read_in_text, None, True, syntax, choice, tools
    )


def _value_or_call_format(
    tools: tuple[Tool, ...], choice: ToolChoice, syntax: ToolCallSyntax, value: ValueFormat
) -> ToolCallFormat:
    if syntax.begin.strip()[:1] in JSON_BEGINNINGS:
        syntax = DEFAULT_CALL_SYNTAX  # values and calls must be distinguishable
    read_call = _reader(tools, syntax)

    def read(text: str) -> Any:
        if not text.startswith(syntax.begin):
            return value.read(text)
        return read_call(text.removeprefix(syntax.begin).removesuffix(syntax.end))

    assert isinstance(value.spec, JsonSchema)
    spec = _call_constraint(tools, syntax, choice, value.spec)
    return ToolCallFormat(f"call of a tool or {value.type_name}", spec, read, None, False, syntax, choice, tools)


def stop_after_call(options: Options) -> Options:
    """Returns `options` with the stop string that ends the text after its first call."""
    return replace(options, fields={**options.fields, "stop": (CALL_END_MARKER,)})


def called_tool_name(text: str, value_format: ToolCallFormat) -> str:
    """Returns the name of the tool called in `text`, for a call whose arguments could not be parsed.

    Raises ValueError or KeyError if `text` is not a complete call.
    """
    call = _extract_call(text, value_format.syntax) if value_format.choice == "auto" else text
    return str(json.loads(call or "")[value_format.syntax.name_key])


def _extract_call(text: str, syntax: ToolCallSyntax) -> str | None:
    """Returns the JSON of the call at the end of `text`, or None if there is no call."""
    _, begin, call = text.partition(syntax.begin)
    return call.removesuffix(syntax.end) if begin else None


def _call_constraint(
    tools: tuple[Tool, ...], syntax: ToolCallSyntax, choice: ToolChoice, value: JsonSchema | None = None
) -> Spec:
    is_strict = any(tool.strict for tool in tools)
    rules: dict[str, Any] = {"annotations": not is_strict, "strict_formats": is_strict}
    try:
        schema = json.dumps(call_schema(tools, syntax.name_key, syntax.arguments_key), ensure_ascii=False)
        if value is not None:
            triggers = [(syntax.begin, schema, syntax.end)]
            return Structural(triggers, at_most=1, free_text=False, otherwise=value, **rules)
        if choice == "auto":
            triggers = [(syntax.begin, schema, syntax.end + CALL_END_MARKER)]
            return Structural(triggers, at_most=1, **rules)
        return JsonSchema(schema, **rules)
    except GrammarError as error:
        raise InputError(f"the schema of the tools cannot be used as a constraint: {error}") from None


def _reader(tools: tuple[Tool, ...], syntax: ToolCallSyntax) -> Callable[[str], ToolCall]:
    def read(text: str) -> ToolCall:
        """Raises ValueError if the arguments are not valid for the function."""
        call = json.loads(text)
        tool = next(tool for tool in tools if tool.name == call[syntax.name_key])
        return ToolCall(tool.name, tool.read(json.dumps(call[syntax.arguments_key])), tool)

    return read


def _nothing(text: str) -> None:
    return None
