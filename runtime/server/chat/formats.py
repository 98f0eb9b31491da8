"""The formats in which models write tool calls and reasoning, and the constraints on tool calls.

A tool call is `begin`, JSON, `end`. If `begin` contains {name}, the JSON is the arguments; otherwise it is an object
with the name and the arguments under the format's two keys. The constraint enforces the tool's schema after every
`begin`, so an opened call is always a valid call. `chat/parser.py` parses all formats.

Sources: the published chat templates of the models (Hermes 2 Pro and Qwen 2.5, Llama 3.1, Mistral v3).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plait.constrained.specs import GrammarError, JsonObject, JsonSchema, Reasoning, Spec, Structural, Trigger
from plait.constrained.tool_arguments import closed_arguments
from plait.runtime.server.chat.conversation import Conversation, ReasoningRequest, ToolCall, ToolDefinition
from plait.runtime.server.errors import invalid
from plait.runtime.tokenizer.json_text import json_text


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes a tool call. `template_marker`: a text in the chat templates that use the format, or ""."""

    template_marker: str
    begin: str
    end: str
    name_key: str = "name"
    arguments_key: str = "arguments"

    @property
    def is_native(self) -> bool:
        """Whether the chat template itself renders tools, calls and results."""
        return bool(self.template_marker)

    def call_openers(self, names: Sequence[str]) -> dict[str, str | None]:
        """Returns the texts that open a call -> the tool's name if the text contains it, else None."""
        if "{name}" in self.begin:
            return {self.begin.replace("{name}", name): name for name in names}
        return {self.begin: None}

    def render_call(self, call: ToolCall) -> str:
        """Returns the text of a call as the model writes it."""
        arguments = call.arguments
        if not isinstance(arguments, str):
            arguments = json_text(arguments, ensure_ascii=False)
        if "{name}" in self.begin:
            return f"{self.begin.replace('{name}', call.name)}{arguments}{self.end}"
        name = json.dumps(call.name)
        return f'{self.begin}{{"{self.name_key}": {name}, "{self.arguments_key}": {arguments}}}{self.end}'


@dataclass(frozen=True)
class ReasoningFormat:
    """The texts before and after the reasoning at the beginning of an answer."""

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
# used where the answer itself may be JSON
GENERIC_FORMAT_BESIDE_JSON = ToolFormat(template_marker="", begin="<tool_call>", end="</tool_call>")
REASONING_FORMATS = (ReasoningFormat("<think>", "</think>"), ReasoningFormat("[THINK]", "[/THINK]"))

_INSTRUCTIONS = """You can call functions. Each is given as a JSON object with its parameters' JSON schema:
{tools}
To call a function, write {example} with the function's name and arguments. You may write text before it. \
The function's result is then given to you."""


def tool_format(template: str, *, with_json_answer: bool = False) -> ToolFormat:
    """Returns the tool format of models with this chat template (its source), or a generic one.

    `with_json_answer`: the answer may be JSON instead of a call, so the generic format must differ from JSON.
    """
    has_tools = "tools" in template
    generic = GENERIC_FORMAT_BESIDE_JSON if with_json_answer else GENERIC_FORMAT
    return next((format for format in TOOL_FORMATS if has_tools and format.template_marker in template), generic)


def reasoning_format(template: str) -> ReasoningFormat | None:
    """Returns the reasoning format of models with this chat template (its source); None without reasoning."""
    return next((format for format in REASONING_FORMATS if format.begin in template or format.end in template), None)


def reasoning_first(
    constraint: Spec | None, request: ReasoningRequest, marks: ReasoningFormat, is_open: bool
) -> Reasoning:
    """Returns `constraint` behind reasoning. `is_open`: the prompt has the opening mark. Raises ApiError without a
    constraint."""
    if constraint is None or isinstance(constraint, Reasoning):
        text = "'reasoning' needs a constraint on the answer, such as response_format; set enable_thinking without one"
        raise invalid(text, "reasoning", "unsupported_combination")
    return Reasoning(constraint, "" if is_open else marks.begin, marks.end, max_tokens=request.max_tokens)


def tool_instructions(tools: Sequence[ToolDefinition], call_format: ToolFormat = GENERIC_FORMAT) -> str:
    """Returns the tool instructions for the system turn, for templates that cannot render tools."""
    lines = [json_text(tool_as_json(tool)["function"], ensure_ascii=False) for tool in tools]
    example = call_format.render_call(ToolCall("", "NAME", "{...}"))
    return _INSTRUCTIONS.replace("{example}", example).replace("{tools}", "\n".join(lines))


def tool_as_json(tool: ToolDefinition) -> dict[str, Any]:
    """Returns a tool in the JSON shape of OpenAI and of chat templates."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def tool_constraint(call_format: ToolFormat, conversation: Conversation) -> Structural:
    """Returns the constraint of an answer that may call tools.

    It allows free text with valid calls; with `must_call` only calls; with a JSON constraint either calls or a JSON
    answer that satisfies it. Raises ApiError for an invalid schema, and for a constraint that is not JSON.
    """
    tools, otherwise = conversation.callable_tools, json_answer_constraint(conversation)
    triggers = [_trigger(call_format, tool) for tool in tools]
    return Structural(
        triggers,
        at_least=1 if conversation.must_call else 0,
        at_most=1 if conversation.one_call else None,
        free_text=not conversation.must_call and otherwise is None,
        annotations=not any(tool.strict for tool in tools),
        strict_formats=conversation.strict_formats or any(tool.strict for tool in tools),
        otherwise=otherwise,
        openers=() if "{name}" in call_format.begin else (call_format.begin,),
    )


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


def _trigger(call_format: ToolFormat, tool: ToolDefinition) -> Trigger:
    """Returns the trigger of one tool's calls. Raises ApiError for a schema that is not JSON."""
    if "{name}" in call_format.begin:
        begin, end = call_format.begin.replace("{name}", tool.name), call_format.end
    else:
        name = json.dumps(tool.name, ensure_ascii=False)
        begin = f'{call_format.begin}{{"{call_format.name_key}": {name}, "{call_format.arguments_key}": '
        end = "}" + call_format.end
    try:
        return Trigger(begin, closed_arguments(tool.parameters), end, tool.name)
    except GrammarError as error:
        raise invalid(f"'{tool.param}': {error}", tool.param, "invalid_constraint") from None
