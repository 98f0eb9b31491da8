"""Converts a `/v1/responses` request to a `Conversation`: items, tools and constraint."""

from __future__ import annotations

from collections.abc import Sequence

from plait.constrained.specs import JsonObject, JsonSchema, Spec
from plait.runtime.server.chat.conversation import Conversation, ToolCall, ToolDefinition, Turn
from plait.runtime.server.chat.template_settings import template_variables
from plait.runtime.server.errors import invalid
from plait.runtime.server.http.json_body import convert_json
from plait.runtime.server.protocols.openai.responses_types import (
    AllowedToolsChoice,
    CallItem,
    CallOutputItem,
    Content,
    Item,
    JsonObjectFormat,
    JsonSchemaFormat,
    MessageItem,
    NamedToolChoice,
    ReasoningItem,
    Refusal,
    ResponsesRequest,
)
from plait.runtime.server.protocols.shared import build_constraint, build_tools, checked_tool_names


def conversation_of(body: ResponsesRequest) -> Conversation:
    """The conversation. Raises ApiError 400 for values that contradict each other."""
    tools = build_tools(body.tools or (), "tools[{}]")
    names, must_call, one_call = _tool_choice(body, tools)
    constraint, param = _constraint(body)
    return Conversation(
        turns=_turns(body),
        tools=tools,
        callable_names=names,
        must_call=must_call,
        one_call=one_call or body.parallel_tool_calls is False,
        constraint=constraint,
        constraint_param=param,
        strict_formats=bool(body.strict_formats),
        untagged_calls=body.untagged_tool_calls,
        template_variables=template_variables(body.chat_template_kwargs, body.enable_thinking),
    )


def _constraint(body: ResponsesRequest) -> tuple[Spec | None, str | None]:
    output_format = body.text.format if body.text else None
    if isinstance(output_format, JsonObjectFormat):
        return JsonObject(compact=bool(body.compact)), "text.format"
    if isinstance(output_format, JsonSchemaFormat):
        param = "text.format.schema"
        options = {
            "annotations": not output_format.strict,
            "compact": bool(body.compact),
            "strict_formats": bool(output_format.strict or body.strict_formats),
        }
        return build_constraint(param, JsonSchema, output_format.schema, **options), param
    return None, None


def _turns(body: ResponsesRequest) -> tuple[Turn, ...]:
    turns = [] if body.instructions is None else [Turn("system", body.instructions)]
    if isinstance(body.input, str):
        return (*turns, Turn("user", body.input))
    calls: list[ToolCall] = []
    reasoning: str | None = None
    for index, raw in enumerate(body.input):
        item: Item = convert_json({"type": "message", **raw}, Item, f"input[{index}]")  # type: ignore[arg-type]
        if isinstance(item, CallItem):  # consecutive calls and the text before them are one turn
            call = ToolCall(item.call_id, item.name, item.arguments, f"input[{index}].arguments")
            calls.append(call)
            if turns and turns[-1].role == "assistant":
                last = turns.pop()
                turns.append(Turn("assistant", last.text, (*last.calls, call), last.reasoning))
            else:
                turns.append(Turn("assistant", "", (call,), reasoning))
        elif isinstance(item, CallOutputItem):
            if all(call.id != item.call_id for call in calls):
                param = f"input[{index}].call_id"
                raise invalid(f"'{param}' answers no function call of the items before it", param)
            turns.append(Turn("tool", _text(item.output), call_id=item.call_id))
        elif isinstance(item, ReasoningItem):
            reasoning = "".join(part.text for part in item.content or [])
            continue
        else:
            turns.append(_message(item, reasoning))
        reasoning = None
    return tuple(turns)


def _message(item: MessageItem, reasoning: str | None) -> Turn:
    if item.role == "assistant":
        return Turn("assistant", _text(item.content), reasoning=reasoning)
    return Turn("user" if item.role == "user" else "system", _text(item.content))


def _text(content: str | Sequence[Content]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, Refusal) else part.text for part in content)


def _tool_choice(body: ResponsesRequest, tools: Sequence[ToolDefinition]) -> tuple[frozenset[str] | None, bool, bool]:
    """(names of tools that may be called, None for all; whether a call is required; whether only one is allowed)"""
    choice = body.tool_choice
    if not tools:
        if choice in (None, "none", "auto"):
            return frozenset(), False, False
        raise invalid("'tool_choice' needs 'tools'", "tool_choice")
    if isinstance(choice, NamedToolChoice):
        return checked_tool_names([choice.name], tools, "tool_choice.name"), True, True
    if isinstance(choice, AllowedToolsChoice):
        names = checked_tool_names([tool.name for tool in choice.tools], tools, "tool_choice.tools")
        return names, choice.mode == "required", False
    return frozenset() if choice == "none" else None, choice == "required", False
