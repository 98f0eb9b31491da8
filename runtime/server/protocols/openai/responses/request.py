"""Converts a `/v1/responses` request to a `Conversation`: items, tools and constraint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from plait.constrained.specs import JsonObject, Spec
from plait.runtime.chat.call_constraint import INPUT
from plait.runtime.server.chat.conversation import Conversation, Thinking, ToolCall, ToolDefinition, Turn
from plait.runtime.server.chat.template_settings import template_variables
from plait.runtime.server.chat.thinking import thinking_of
from plait.runtime.server.errors import invalid
from plait.runtime.server.fields.request_warnings import warn
from plait.runtime.server.http.json_body import convert_json
from plait.runtime.server.protocols.openai.custom_tools import GrammarInput, custom_tool
from plait.runtime.server.protocols.openai.fields import JsonObjectFormat, schema_constraint
from plait.runtime.server.protocols.openai.responses import types
from plait.runtime.server.protocols.shared import checked_tool_names, distinct_tools, tool_definition, unnamed_choice

PlacedItem = tuple[str, types.Item]
"""An item, and its JSON path for errors."""


def conversation_of(body: types.ResponsePrompt, items: Sequence[PlacedItem]) -> tuple[Conversation, ToolTable]:
    """The conversation of `items`, and its tools. Raises ApiError 400 for values that contradict each other."""
    lists: list[tuple[str, Sequence[types.Tool]]] = [("tools", body.tools or ())]
    lists += [(f"{place}.tools", item.tools) for place, item in items if isinstance(item, types.AdditionalToolsItem)]
    tools = read_tools(lists)
    names, must_call, one_call = tool_choice(body, tools)
    answer = body if isinstance(body, types.ResponsesRequest) else None
    strict_formats = answer is not None and bool(answer.strict_formats)
    constraint, param = _constraint(body, strict_formats, compact=answer is not None and bool(answer.compact))
    for name in (answer and answer.include) or ():
        if name != types.LOGPROBS:
            warn(f"include: {name}", "items have their texts, and no tools run here")
    effort = body.reasoning.effort if body.reasoning else None
    conversation = Conversation(
        turns=_turns(body, items),
        tools=tools.definitions,
        callable_names=names,
        must_call=must_call,
        one_call=one_call or body.parallel_tool_calls is False,
        constraint=constraint,
        constraint_param=param,
        strict_formats=strict_formats,
        untagged_calls=answer.untagged_tool_calls if answer is not None else None,
        template_variables=template_variables(body.chat_template_kwargs, body.enable_thinking),
        thinking=Thinking() if effort is None else thinking_of("reasoning.effort", effort),
    )
    return conversation, tools


def placed_items(items: Sequence[Mapping[str, Any]]) -> list[PlacedItem]:
    """The items of `input`, which is a list. Raises ApiError 400."""
    kind: Any = types.Item
    return [
        (place, convert_json({"type": "message", **raw}, kind, place))
        for place, raw in [(f"input[{index}]", raw) for index, raw in enumerate(items)]
    ]


def _constraint(body: types.ResponsePrompt, strict_formats: bool, *, compact: bool) -> tuple[Spec | None, str | None]:
    output_format = body.text.format if body.text else None
    if isinstance(output_format, JsonObjectFormat):
        return JsonObject(compact=compact), "text.format"
    if isinstance(output_format, types.JsonSchemaFormat):
        param = "text.format.schema"
        return schema_constraint(param, output_format, compact, strict_formats), param
    return None, None


def _turns(body: types.ResponsePrompt, items: Sequence[PlacedItem]) -> tuple[Turn, ...]:
    turns = [] if body.instructions is None else [Turn("system", body.instructions)]
    call_ids = set[str]()
    reasoning: str | None = None
    for place, item in items:
        if isinstance(item, types.CallItem | types.CustomCallItem):
            call_ids.add(item.call_id)
            _add_call(turns, _call(item, place), reasoning)
        elif isinstance(item, types.CallOutputItem | types.CustomCallOutputItem):
            if item.call_id not in call_ids:
                param = f"{place}.call_id"
                raise invalid(f"'{param}' answers no call of the items before it", param)
            turns.append(Turn("tool", _text(item.output), call_id=item.call_id))
        elif isinstance(item, types.MessageItem):
            turns.append(_message(item, reasoning))
        elif isinstance(item, types.ReasoningItem):
            reasoning = "".join(part.text for part in item.content or []) or None
            if item.encrypted_content:
                warn(f"{place}.encrypted_content", "this server cannot read it")
            continue
        reasoning = None
    return tuple(turns)


def _call(item: types.CallItem | types.CustomCallItem, place: str) -> ToolCall:
    arguments = item.arguments if isinstance(item, types.CallItem) else {INPUT: item.input}
    return ToolCall(item.call_id, qualified(item.name, item.namespace), arguments, f"{place}.arguments")


def _add_call(turns: list[Turn], call: ToolCall, reasoning: str | None) -> None:
    """Adds a call. Consecutive calls and the text before them are one turn."""
    if turns and turns[-1].role == "assistant":
        last = turns.pop()
        turns.append(replace(last, calls=(*last.calls, call)))
    else:
        turns.append(Turn("assistant", "", (call,), reasoning))


def _message(item: types.MessageItem, reasoning: str | None) -> Turn:
    if item.role == "assistant":
        return Turn("assistant", _text(item.content), reasoning=reasoning)
    return Turn("user" if item.role == "user" else "system", _text(item.content))


def _text(content: str | Sequence[types.Content]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, types.Refusal) else part.text for part in content)


# -- tools ----------------------------------------------------------------------------------------
# Functions, custom tools, and both within namespaces. The model sees a tool of a namespace as `namespace.name`; items
# and events have the two apart.


@dataclass(frozen=True)
class CalledTool:
    """What a call's item says of its tool."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(frozen=True)
class ToolTable:
    """The tools of a request. called: the name that the model writes -> the tool."""

    definitions: tuple[ToolDefinition, ...] = ()
    called: Mapping[str, CalledTool] = field(default_factory=dict)


def qualified(name: str, namespace: str | None) -> str:
    """The name that the model writes.

    >>> qualified("find", "crm")
    'crm.find'
    """
    return f"{namespace}.{name}" if namespace else name


def read_tools(lists: Iterable[tuple[str, Sequence[types.Tool]]]) -> ToolTable:
    """The tools of several lists, each with its JSON path. Raises ApiError 400."""
    found = [
        item
        for path, tools in lists
        for index, tool in enumerate(tools)
        for item in _definitions(tool, f"{path}[{index}]")
    ]
    if len(found) > types.MAX_TOOLS:
        raise invalid(f"there are {len(found)} tools, those of namespaces counted; at most {types.MAX_TOOLS}", "tools")
    definitions = distinct_tools((place, definition) for place, definition, _ in found)
    return ToolTable(definitions, {definition.name: called for _, definition, called in found})


def _definitions(tool: types.Tool, place: str) -> Iterator[tuple[str, ToolDefinition, CalledTool]]:
    """Yields (place, definition, what its calls are) of a tool, or of the tools of a namespace."""
    if not isinstance(tool, types.NamespaceTool):
        yield place, _definition(tool, place), CalledTool(tool.name, None, isinstance(tool, types.CustomTool))
        return
    for index, inner in enumerate(tool.tools):
        definition = _definition(inner, f"{place}.tools[{index}]")
        # The namespace's description stands once, at its first tool.
        texts = (tool.description if not index else None, definition.description)
        definition = replace(
            definition, name=qualified(inner.name, tool.name), description="\n".join(filter(None, texts))
        )
        called = CalledTool(inner.name, tool.name, isinstance(inner, types.CustomTool))
        yield f"{place}.tools[{index}]", definition, called


def _definition(tool: types.FunctionTool | types.CustomTool, place: str) -> ToolDefinition:
    if isinstance(tool, types.FunctionTool):
        return tool_definition(tool, place)
    grammar = tool.format if isinstance(tool.format, GrammarInput) else None
    return custom_tool(tool.name, tool.description, grammar, f"{place}.format")


def tool_choice(body: types.ResponsePrompt, tools: ToolTable) -> tuple[frozenset[str] | None, bool, bool]:
    """(names of tools that may be called, None for all; whether a call is required; whether only one is allowed)"""
    choice = body.tool_choice
    if tools.definitions and isinstance(choice, types.NamedToolChoice | types.NamedCustomChoice):
        return _chosen([choice], tools, "tool_choice.name"), True, True
    if tools.definitions and isinstance(choice, types.AllowedToolsChoice):
        return _chosen(choice.tools, tools, "tool_choice.tools"), choice.mode == "required", False
    return unnamed_choice(choice, has_tools=bool(tools.definitions))


def _chosen(
    choices: Sequence[types.NamedToolChoice | types.NamedCustomChoice], tools: ToolTable, param: str
) -> frozenset[str]:
    """The tools that choices name: a name without a namespace also means tools of that name in every namespace."""
    names: list[str] = []
    for choice in choices:
        name = qualified(choice.name, choice.namespace)
        same = [whole for whole, tool in tools.called.items() if choice.namespace is None and tool.name == name]
        names += [name] if name in tools.called else same or [name]
    return checked_tool_names(names, tools.definitions, param)
