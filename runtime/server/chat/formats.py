"""How models write tool calls and reasoning: tables of data, read by one constraint builder and one parser.

A tool format's call is `begin`, JSON, `end`. Where `begin` has {name} in it, the JSON is the arguments; else it is an
object of a name and the arguments under the format's two keys. The constraint holds whatever follows a `begin` to the
schema, so that what opens a call is always a call that fits.

Sources: the chat templates that the models' makers published (Hermes 2 Pro and Qwen 2.5, Llama 3.1, Mistral v3).

Knows: texts. Must not know: protocols, tokens, how texts are parsed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plait.constrained.specs import GrammarError, JsonObject, JsonSchema, Structural, Trigger
from plait.runtime.server.chat.conversation import Conversation, ToolCall, ToolDefinition
from plait.runtime.server.errors import invalid


@dataclass(frozen=True)
class ToolFormat:
    """`template_marker`: a text in the chat template of models that use it; "" for the form used where there is none."""

    template_marker: str
    begin: str
    end: str
    name_key: str = "name"
    arguments_key: str = "arguments"

    @property
    def is_native(self) -> bool:
        """Whether the template itself shows tools, calls and results to the model."""
        return bool(self.template_marker)

    def call_openers(self, names: Sequence[str]) -> dict[str, str | None]:
        """Text that opens a call -> the tool called, where the text says so already."""
        if "{name}" in self.begin:
            return {self.begin.replace("{name}", name): name for name in names}
        return {self.begin: None}

    def render_call(self, call: ToolCall) -> str:
        """A call as the model writes it."""
        if "{name}" in self.begin:
            return f"{self.begin.replace('{name}', call.name)}{call.arguments}{self.end}"
        name = json.dumps(call.name)
        return f'{self.begin}{{"{self.name_key}": {name}, "{self.arguments_key}": {call.arguments}}}{self.end}'


@dataclass(frozen=True)
class ReasoningFormat:
    """Reasoning stands between these two texts, at the beginning of the answer."""

    begin: str
    end: str


TOOL_FORMATS = (
    ToolFormat(template_marker="<tool_call>", begin="<tool_call>", end="</tool_call>"),
    ToolFormat(template_marker="[TOOL_CALLS]", begin="[TOOL_CALLS][", end="]"),
    ToolFormat(
        template_marker="<|python_tag|>", begin='{"name": "{name}", "parameters": ', end="}", arguments_key="parameters"
    ),
)
GENERIC_FORMAT = ToolFormat(template_marker="", begin='{"tool_call": ', end="}")
GENERIC_FORMAT_BESIDE_JSON = ToolFormat(
    template_marker="", begin="<tool_call>", end="</tool_call>"
)  # where the answer itself may be JSON
REASONING_FORMATS = (ReasoningFormat("<think>", "</think>"), ReasoningFormat("[THINK]", "[/THINK]"))

_INSTRUCTIONS = """You can call functions. Each is given as a JSON object with its parameters' JSON schema:
{tools}
To call a function, write {example} with the function's name and arguments. You may write text before it. \
The function's result is then given to you."""


def tool_format(template: str, *, with_json_answer: bool = False) -> ToolFormat:
    """The format of a model with this chat template. `with_json_answer`: a call must not be mistaken for a JSON answer."""
    shows_tools = "tools" in template
    plain = GENERIC_FORMAT_BESIDE_JSON if with_json_answer else GENERIC_FORMAT
    return next((each for each in TOOL_FORMATS if shows_tools and each.template_marker in template), plain)


def reasoning_format(template: str) -> ReasoningFormat | None:
    """The format of a model with this chat template, if it marks reasoning."""
    return next((each for each in REASONING_FORMATS if each.begin in template or each.end in template), None)


def tool_instructions(tools: Sequence[ToolDefinition], call_format: ToolFormat = GENERIC_FORMAT) -> str:
    """What the system turn says where the template cannot show tools."""
    lines = [json.dumps(tool_as_json(tool)["function"], ensure_ascii=False) for tool in tools]
    example = call_format.render_call(ToolCall("", "NAME", "{...}"))
    return _INSTRUCTIONS.replace("{example}", example).replace("{tools}", "\n".join(lines))


def tool_as_json(tool: ToolDefinition) -> dict[str, Any]:
    """A tool as chat templates and OpenAI write it."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def tool_constraint(call_format: ToolFormat, conversation: Conversation) -> Structural:
    """Free text in which calls fit their tools; with `must_call` nothing but calls; where the answer has a schema,
    calls or an answer that fits it. ApiError names a bad schema, and a constraint that is none of JSON."""
    tools, otherwise = conversation.callable_tools, json_answer_constraint(conversation)
    if "{name}" in call_format.begin:
        triggers = [
            _trigger(call_format.begin.replace("{name}", t.name), dict(t.parameters), call_format.end, t) for t in tools
        ]
    elif len(tools) == 1:
        triggers = [_trigger(call_format.begin, _call_schema(call_format, tools[0], "#"), call_format.end, tools[0])]
    else:
        for tool in tools:  # each alone first, so that a bad schema is named
            _trigger(call_format.begin, _call_schema(call_format, tool, "#"), call_format.end, tool)
        any_of = [_call_schema(call_format, tool, f"#/anyOf/{index}") for index, tool in enumerate(tools)]
        triggers = [_trigger(call_format.begin, {"anyOf": any_of}, call_format.end, tools[0])]
    return Structural(
        triggers,
        at_least=1 if conversation.must_call else 0,
        at_most=1 if conversation.one_call else None,
        free_text=not conversation.must_call and otherwise is None,
        annotations=not any(tool.strict for tool in tools),
        otherwise=otherwise,
    )


def json_answer_constraint(conversation: Conversation) -> JsonSchema | JsonObject | None:
    """What an answer must be that calls nothing, where it may call; None for free text, and where it must call."""
    constraint, param = conversation.constraint, conversation.constraint_param
    if constraint is None or conversation.must_call or not conversation.callable_tools:
        return None
    if isinstance(constraint, JsonSchema | JsonObject):
        return constraint
    text = f"'{param}' cannot shape an answer that may call tools instead; set 'tool_choice' to 'none' or 'required'"
    raise invalid(text, param, "unsupported_combination")


def _trigger(begin: str, schema: dict[str, Any], end: str, tool: ToolDefinition) -> Trigger:
    try:
        return Trigger(begin, schema, end)
    except GrammarError as error:
        raise invalid(f"'{tool.param}': {error}", tool.param, "invalid_constraint") from None


def _call_schema(call_format: ToolFormat, tool: ToolDefinition, at: str) -> dict[str, Any]:
    """The schema of one tool's call, to stand at the JSON pointer `at` of a whole."""
    arguments = _relocate_refs(dict(tool.parameters), f"{at}/properties/{call_format.arguments_key}")
    return {
        "type": "object",
        "properties": {call_format.name_key: {"const": tool.name}, call_format.arguments_key: arguments},
        "required": [call_format.name_key, call_format.arguments_key],
        "additionalProperties": False,
    }


def _relocate_refs(schema: Any, to: str, depth: int = 0) -> Any:
    """The schema with its local references ("#/...") pointing to where it stands now."""
    if isinstance(schema, list):
        return [_relocate_refs(item, to, depth + 1) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = to + value[1:]
        elif key in ("const", "enum", "default", "examples"):
            moved[key] = value
        else:
            moved[key] = _relocate_refs(value, to, depth + 1)
    return moved
