"""Converts turns, calls and tools to the messages of a chat template, as it writes them in the model's own words."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from plait.runtime.chat.derivation.model_formats import ModelFormats
from plait.runtime.chat.formats.call_format import CallFormat, JsonArguments, formed_ids
from plait.runtime.server.chat.conversation import Conversation, Role, ToolCall, ToolDefinition, Turn
from plait.runtime.server.errors import invalid
from plait.runtime.server.http.json_limits import JsonScan, scan_steps
from plait.runtime.tokenizer.json_text import json_text

Escape = Callable[[Any], Any]  # replaces the control tokens in a client's texts
NO_ARGUMENTS = ("", "null")
_ID_CHARS = 9  # of an id that templates with ids accept

_INSTRUCTIONS = """You can call functions. Each is given as a JSON object with its parameters' JSON schema:
{tools}
To call a function, write {example} with the function's name and arguments. You may write text before it. \
The function's result is then given to you."""


def template_messages(
    conversation: Conversation, call_format: CallFormat, formats: ModelFormats, escape: Escape
) -> list[dict[str, Any]]:
    """Returns the messages of a conversation, with `escape` applied to all texts of the client.

    Raises ApiError 400 for an earlier call whose arguments the template cannot write.
    """
    turns = list(conversation.turns)
    if conversation.tools and not call_format.is_native:
        turns = _with_instructions(turns, conversation.tools, call_format, formats.takes_system)
    names = {call.id: call.name for turn in turns for call in turn.calls}
    ids = _template_ids(turns, call_format)
    field = formats.reasoning.field if formats.reasoning is not None else "reasoning_content"
    return [_message(turn, call_format, names, ids, field, escape) for turn in turns]


def tool_as_json(tool: ToolDefinition) -> dict[str, Any]:
    """Returns a tool in the JSON shape of OpenAI and of chat templates."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def tool_instructions(tools: Sequence[ToolDefinition], call_format: CallFormat) -> str:
    """Returns the tool instructions for templates that cannot render tools."""
    lines = [json_text(tool_as_json(tool)["function"], ensure_ascii=False) for tool in tools]
    example = call_format.render_calls([("", "NAME", "{...}")])
    return _INSTRUCTIONS.replace("{example}", example).replace("{tools}", "\n".join(lines))


def _with_instructions(
    turns: list[Turn], tools: Sequence[ToolDefinition], call_format: CallFormat, takes_system: bool
) -> list[Turn]:
    """Adds the tool instructions to the system turn, or to a new one; to the first user turn if the template refuses
    system turns."""
    text = tool_instructions(tools, call_format)
    role: Role = "system" if takes_system else "user"
    if turns and turns[0].role == role:
        both = f"{turns[0].text}\n\n{text}" if takes_system else f"{text}\n\n{turns[0].text}"
        return [replace(turns[0], text=both), *turns[1:]]
    if not takes_system:
        for index, turn in enumerate(turns):
            if turn.role == "user":
                return [*turns[:index], replace(turn, text=f"{text}\n\n{turn.text}"), *turns[index + 1 :]]
    return [Turn(role, text), *turns]


def _message(
    turn: Turn,
    call_format: CallFormat,
    names: Mapping[str, str],
    ids: Mapping[str, str],
    reasoning_field: str,
    escape: Escape,
) -> dict[str, Any]:
    """Converts a turn to a chat template's message. Calls and results become text if the template has none.

    names: {id of a call: name of its tool}. ids: {id of a call: the id that the template is given}.
    """
    if turn.role == "tool":
        return _result_message(turn, call_format, names, ids, escape)
    message: dict[str, Any] = {"role": turn.role, "content": escape(turn.text)}
    if turn.name is not None:  # some templates render the speaker's name
        message["name"] = escape(turn.name)
    if turn.reasoning is not None:
        reasoning = escape(turn.reasoning)
        if reasoning_field == "content":
            parts = [{"type": "thinking", "thinking": reasoning}, {"type": "text", "text": message["content"]}]
            message["content"] = parts if turn.text else parts[:1]
        else:
            message[reasoning_field] = reasoning
    if turn.calls and call_format.writes_calls and call_format.is_native:
        message["tool_calls"] = [
            {
                "id": escape(ids[call.id]),
                "type": "function",
                "function": {"name": escape(call.name), "arguments": escape(_arguments(call, call_format))},
            }
            for call in turn.calls
        ]
    elif turn.calls:
        written = [
            (escape(ids[call.id]), escape(call.name), escape(_arguments_text(call, call_format))) for call in turn.calls
        ]
        message["content"] += call_format.render_calls(written)
    return message


def _result_message(
    turn: Turn, call_format: CallFormat, names: Mapping[str, str], ids: Mapping[str, str], escape: Escape
) -> dict[str, Any]:
    name = turn.name or names.get(turn.call_id or "", "the function")
    if not call_format.is_native:
        return {"role": "user", "content": escape(f"Result of {name}: {turn.text}")}
    call_id = ids.get(turn.call_id or "", turn.call_id)
    return {"role": "tool", "content": escape(turn.text), "tool_call_id": escape(call_id), "name": escape(name)}


def _template_ids(turns: Sequence[Turn], call_format: CallFormat) -> dict[str, str]:
    """Returns {id of a call: the id that the template is given}.

    The answers' ids end with the id that the model wrote, see `ParsedPart.call_id`.
    """
    calls = [call for turn in turns for call in turn.calls]
    if formed := formed_ids(call_format.id_form, [call.name for call in calls]):
        return {call.id: formed_id for call, formed_id in zip(calls, formed, strict=True)}
    if call_format.id_source != "client":
        return {call.id: call.id for call in calls}
    return {call.id: re.sub("[^a-zA-Z0-9]", "", call.id)[-_ID_CHARS:].rjust(_ID_CHARS, "0") for call in calls}


def _arguments(call: ToolCall, call_format: CallFormat) -> str | Mapping[str, Any]:
    """The arguments of an earlier call as the template takes them. Raises ApiError 400 if it cannot write them."""
    if isinstance(call.arguments, str) and call_format.takes_text:
        return call.arguments if call.arguments.strip() not in NO_ARGUMENTS else "{}"
    value = parsed_arguments(call.arguments)
    if not isinstance(value, Mapping):
        param = call.param or "tool_calls"
        raise invalid(f"'{param}' is not a JSON object, and the chat template cannot write anything else", param)
    return call_format.template_arguments(value)


def _arguments_text(call: ToolCall, call_format: CallFormat) -> str:
    """The arguments of an earlier call as the model writes them, whatever they are."""
    if isinstance(call.arguments, str) and isinstance(call_format.arguments, JsonArguments):
        return call.arguments if call.arguments.strip() not in NO_ARGUMENTS else "{}"
    value = parsed_arguments(call.arguments)
    return call_format.arguments.render(value) if isinstance(value, Mapping) else str(value)


def parsed_arguments(arguments: str | Mapping[str, Any]) -> Any:
    """The arguments as JSON, none as {}; a text that is no JSON as it is. Raises ApiError 400 for too many elements."""
    if not isinstance(arguments, str):
        return arguments
    if arguments.strip() in NO_ARGUMENTS:
        return {}
    for _ in scan_steps(arguments.encode(), JsonScan(), "the arguments of a tool call have"):
        pass  # other threads run between two steps
    try:
        return msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
