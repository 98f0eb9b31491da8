"""The constraint on an answer that may call tools, in the form in which the model writes calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
from plait.runtime.chat.formats.call_format import CallFormat, ElementArguments, JsonArguments, NotationArguments
from plait.runtime.server.chat.conversation import INPUT, Conversation, ToolDefinition
from plait.runtime.server.errors import ToolParams, invalid


def tool_constraint(
    call_format: CallFormat,
    conversation: Conversation,
    control_tokens: Sequence[tuple[str, int]] = (),
    free_tokens: Sequence[str] = (),
    text_head: str = "",
) -> Structural:
    """Returns the constraint of an answer that may call tools.

    It allows free text with valid calls; with `must_call` only calls; with a JSON constraint either calls or a JSON
    answer that satisfies it. control_tokens: the texts and ids of those in the model's marks; free_tokens: those that
    free text may have; text_head: what begins the message of a JSON answer. Raises ApiError for an invalid schema, and
    for a constraint that is not JSON.
    """
    tools, otherwise = conversation.callable_tools, json_answer_constraint(conversation)
    strict = any(tool.strict for tool in tools)
    text_head = text_head if otherwise is not None else ""
    begins_answer = conversation.must_call or bool(text_head)
    lead = call_format.lead if begins_answer else ""
    heads = (call_format.head, *(() if begins_answer else call_format.other_heads))
    triggers = [_trigger(call_format, tool, head) for tool in tools for head in heads]
    at_start = call_format.is_whole_answer and not conversation.must_call and otherwise is None
    wholes = ((lead + call_format.begin + trigger.begin).partition(ID_PLACE)[0] for trigger in triggers)
    openers = tuple(dict.fromkeys(wholes)) if at_start or call_format.is_message else (lead + call_format.opener,)
    try:
        return Structural(
            triggers,
            at_least=1 if conversation.must_call else 0,
            at_most=1 if conversation.one_call or call_format.is_single else None,
            free_text=not conversation.must_call and otherwise is None,
            annotations=not strict,
            strict_formats=conversation.strict_formats or strict,
            otherwise=otherwise,
            openers=openers,
            begin=lead + call_format.begin,
            separator=call_format.separator,
            end=call_format.end,
            control_tokens=control_tokens,
            call_id=call_format.id_pattern,
            first_number=call_format.next_number(sum(len(turn.calls) for turn in conversation.turns)),
            at_start=at_start,
            free_tokens=() if conversation.must_call else tuple(free_tokens),
            otherwise_begin=text_head,
        )
    except GrammarError as error:  # two tools of one name, or more tools than a constraint may have
        raise invalid(f"'tools': {error}", "tools", "invalid_constraint") from None


def tool_params(constraint: Structural, conversation: Conversation) -> ToolParams:
    """Returns the parameters of the request that a constraint of `tool_constraint` came from. A tool has a trigger for
    each form of the head of its calls."""
    tools = conversation.callable_tools
    num_heads = len(constraint.triggers) // len(tools)
    return ToolParams([tool.param for tool in tools for _ in range(num_heads)], conversation.constraint_param)


def json_answer_constraint(conversation: Conversation) -> JsonSchema | JsonObject | None:
    """Returns the constraint of an answer without calls, if tools may be called; None for free text and `must_call`.

    Raises ApiError for a constraint that is not JSON.
    """
    constraint, param = conversation.constraint, conversation.constraint_param
    if constraint is None or conversation.must_call or not conversation.callable_tools:
        return None
    if isinstance(constraint, JsonSchema | JsonObject):
        return constraint
    text = f"'{param}' cannot constrain an answer that may call tools; set 'tool_choice' to 'none' or 'required'"
    raise invalid(text, param, "unsupported_combination")


def _trigger(call_format: CallFormat, tool: ToolDefinition, head: str) -> Trigger:
    """Returns the call of one tool, which begins with `head`."""
    head = head.replace("{name}", tool.name)
    try:
        if tool.input is not None:
            before, content, behind = _input(call_format, tool.input)
            return Trigger(head + before, content, behind + call_format.tail, name=tool.name)
        schema = closed_arguments(dict(tool.parameters))
        return Trigger(head, _content(call_format, schema), call_format.tail, name=tool.name)
    except GrammarError as error:
        raise invalid(f"'{tool.param}': {error}", tool.param, "invalid_constraint") from None


def _input(call_format: CallFormat, spec: Regex | Lark) -> tuple[str, Content, str]:
    """Returns the arguments of a tool with freeform input: what is before the text, its constraint, what is behind."""
    probe = "zq_input"
    text = call_format.arguments.render({INPUT: probe})
    content: Content = spec
    if f'"{probe}"' in text:
        probe, content = f'"{probe}"', JsonString(spec)
    before, _, behind = text.partition(probe)
    return before, content, behind


def _content(call_format: CallFormat, schema: dict[str, Any]) -> Content:
    """Returns the constraint on a call's arguments."""
    form = call_format.arguments
    if isinstance(form, ElementArguments):
        return Elements(
            schema,
            form.open,
            form.close,
            form.separator,
            types=form.types,
            python=form.python,
            has_cdata=form.has_cdata,
        )
    if isinstance(form, JsonArguments):
        if form.style == "spaced":
            return schema
        return JsonSchema(schema, compact=form.style == "compact", whitespace=form.style == "any")
    if isinstance(form, NotationArguments):
        return Notation(schema, form.quote, form.null, form.is_sorted)
    return Keywords(schema, single_quotes=form.single_quotes)
