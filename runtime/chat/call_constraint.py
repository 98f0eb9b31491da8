"""The constraint on an answer that may call tools, in the form in which the model writes calls, and a call's text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from plait.constrained.specs import (
    ID_PLACE,
    Content,
    Elements,
    GrammarError,
    JsonObject,
    JsonSchema,
    JsonString,
    Keywords,
    Lark,
    Notation,
    Regex,
    Structural,
    Trigger,
)
from plait.constrained.tool_arguments import closed_arguments
from plait.runtime.chat.formats.call_format import (
    ArgumentsForm,
    CallFormat,
    ElementArguments,
    JsonArguments,
    KeywordArguments,
    NotationArguments,
)

INPUT = "input"  # the only argument of a tool with freeform input
# The constraint on arguments in each form: it has the fields of the form.
_CONTENTS: dict[type, Any] = {ElementArguments: Elements, KeywordArguments: Keywords, NotationArguments: Notation}


class CallableTool(NamedTuple):
    """A tool that may be called. parameters: the JSON schema of its arguments. strict: an unsupported schema keyword is
    an error rather than an annotation. input: the constraint on its only argument, the text `input`; None for any other
    tool."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False
    input: Regex | Lark | None = None


class ToolError(GrammarError):
    """Raised for a tool whose arguments cannot be constrained. index: its place in the list of tools."""

    def __init__(self, index: int, error: GrammarError) -> None:
        super().__init__(error.reason, error.where)
        self.index = index


def call_constraint(
    call_format: CallFormat,
    tools: Sequence[CallableTool],
    *,
    must_call: bool,
    one_call: bool,
    otherwise: JsonSchema | JsonObject | None = None,
    strict_formats: bool = False,
    num_earlier: int = 0,
    control_tokens: Sequence[tuple[str, int]] = (),
    free_tokens: Sequence[str] = (),
    text_head: str = "",
) -> Structural:
    """Returns the constraint on an answer with calls of `tools`.

    must_call: the answer is only calls. one_call: there is at most one. otherwise: what an answer without calls is;
    None for free text. strict_formats: an unknown format in a tool's schema is an error. num_earlier: how many calls
    the conversation has. control_tokens: the texts and ids of those in the marks. free_tokens: the texts of those that
    may stand in free text. text_head: what begins the message of an answer without calls.

    Raises ToolError for the schema of a tool, and GrammarError for tools that cannot be told apart.
    """
    strict = any(tool.strict for tool in tools)
    text_head = text_head if otherwise is not None else ""
    begins_answer = must_call or bool(text_head)
    lead = call_format.lead if begins_answer else ""
    heads = (call_format.head, *(() if begins_answer else call_format.other_heads))
    triggers = [_trigger(call_format, tool, index, head) for index, tool in enumerate(tools) for head in heads]
    at_start = call_format.is_whole_answer and not must_call and otherwise is None
    wholes = ((lead + call_format.begin + trigger.begin).partition(ID_PLACE)[0] for trigger in triggers)
    openers = tuple(dict.fromkeys(wholes)) if at_start or call_format.is_message else (lead + call_format.opener,)
    return Structural(
        triggers,
        at_least=1 if must_call else 0,
        at_most=1 if one_call or call_format.is_single else None,
        free_text=not must_call and otherwise is None,
        annotations=not strict,
        strict_formats=strict_formats or strict,
        otherwise=otherwise,
        openers=openers,
        begin=lead + call_format.begin,
        separator=call_format.separator,
        end=call_format.end,
        control_tokens=control_tokens,
        call_id=call_format.id_pattern,
        first_number=call_format.next_number(num_earlier),
        at_start=at_start,
        free_tokens=() if must_call else tuple(free_tokens),
        otherwise_begin=text_head,
    )


def _trigger(call_format: CallFormat, tool: CallableTool, index: int, head: str) -> Trigger:
    """Returns the call of one tool, which begins with `head`."""
    head = head.replace("{name}", tool.name)
    try:
        if tool.input is not None:
            before, content, after = _input(call_format, tool.input)
            return Trigger(head + before, content, after + call_format.tail, name=tool.name)
        schema = closed_arguments(dict(tool.parameters))
        return Trigger(head, _content(call_format, schema), call_format.tail, name=tool.name)
    except GrammarError as error:
        raise ToolError(index, error) from None


def _input(call_format: CallFormat, spec: Regex | Lark) -> tuple[str, Content, str]:
    """Returns the arguments of a tool with freeform input: what is before the text, its constraint, what is behind.

    Where a form has two spellings of strings, it is that of any text.
    """
    probe = "zq'<input"
    text = call_format.arguments.render({INPUT: probe})
    content: Content = spec
    if f'"{probe}"' in text:
        probe, content = f'"{probe}"', JsonString(spec)
    before, _, after = text.partition(probe)
    return before, content, after


def _content(call_format: CallFormat, schema: dict[str, Any]) -> Content:
    """Returns the constraint on a call's arguments."""
    form = call_format.arguments
    if not isinstance(form, JsonArguments):
        content: Content = _CONTENTS[type(form)](schema, **vars(form))
        return content
    if form.style == "spaced":
        return schema
    return JsonSchema(schema, compact=form.style == "compact", whitespace=form.style == "any")


def arguments_form(content: Content) -> ArgumentsForm:
    """Returns the form of the arguments that a call's constraint allows."""
    for kind, content_kind in _CONTENTS.items():
        if isinstance(content, content_kind):
            form: ArgumentsForm = kind(**{field.name: getattr(content, field.name) for field in fields(kind)})
            return form
    return JsonArguments("compact" if isinstance(content, JsonSchema) and content.compact else "spaced")
