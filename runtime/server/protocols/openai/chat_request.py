"""Converts a chat completion request to a `Conversation`: roles, content parts, tools and constraint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from plait.constrained.specs import MAX_REASONING_TOKENS
from plait.runtime.chat.call_constraint import INPUT
from plait.runtime.sampling_params import MAX_TOKENS_LIMIT, NAMES
from plait.runtime.server.chat.conversation import Conversation, Effort, Thinking, ToolCall, ToolDefinition, Turn
from plait.runtime.server.chat.template_settings import TemplateVariables, template_variables
from plait.runtime.server.chat.thinking import thinking_of
from plait.runtime.server.errors import invalid
from plait.runtime.server.protocols.openai.custom_tools import Grammar, TextInput, custom_tool
from plait.runtime.server.protocols.openai.fields import SamplingRequest, check_stream_options, constraint_of
from plait.runtime.server.protocols.shared import (
    StrictStruct,
    checked_tool_names,
    distinct_tools,
    tool_definition,
    unnamed_choice,
)

MAX_TOP_LOGPROBS = 20  # OpenAI's


def conversation_of(body: ChatRequest) -> Conversation:
    """The conversation. Raises ApiError 400 for values that contradict each other."""
    continue_final = bool(body.continue_final_message)
    add_prompt = body.add_generation_prompt if body.add_generation_prompt is not None else not continue_final
    if continue_final and add_prompt:
        text = "'continue_final_message' and 'add_generation_prompt' cannot both be true"
        raise invalid(text, "continue_final_message")
    turns = _turns(body.messages)
    if continue_final and (turns[-1].role != "assistant" or turns[-1].calls):
        text = "'continue_final_message' needs a last message of the assistant, without tool calls"
        raise invalid(text, "continue_final_message")
    constraint, param = constraint_of(body)
    tools = distinct_tools(_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ()))
    names, must_call, one_call = _tool_choice(body, tools)
    check_stream_options(body)
    return Conversation(
        turns=turns,
        tools=tools,
        callable_names=names,
        must_call=must_call,
        one_call=one_call or body.parallel_tool_calls is False,
        constraint=constraint,
        constraint_param=param,
        add_generation_prompt=add_prompt,
        continue_final=continue_final,
        strict_formats=bool(body.strict_formats),
        template_variables=template_variables(body.chat_template_kwargs, body.enable_thinking),
        thinking=_thinking(body),
        untagged_calls=body.untagged_tool_calls,
    )


def _thinking(body: ChatRequest) -> Thinking:
    field, effort, is_shown = body.reasoning, body.reasoning_effort, body.include_reasoning is not False
    if field is None and body.thinking is not None:
        wanted = "none" if body.thinking.type == "disabled" else effort
        return thinking_of("thinking", wanted, body.thinking.budget_tokens, is_shown=is_shown)
    if field is None:
        thinking = Thinking() if effort is None else thinking_of("reasoning_effort", effort)
        return replace(thinking, is_shown=is_shown)
    if body.thinking is not None:
        raise invalid("'reasoning' and 'thinking' are two names of one thing; write one of them", "thinking")
    if effort is not None and field.effort not in (None, effort):
        raise invalid("'reasoning.effort' and 'reasoning_effort' contradict each other", "reasoning_effort")
    wanted, is_shown = field.effort or effort if field.enabled else "none", is_shown and not field.exclude
    return thinking_of("reasoning", wanted, field.max_tokens, is_shown=is_shown, is_constrained=True)


def max_tokens_of(body: ChatRequest) -> int | None:
    """`max_completion_tokens`, or `max_tokens`, its older name. Raises ApiError 400 for two different values."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid("'max_tokens' and 'max_completion_tokens' are one setting; give one", "max_tokens")
    limit = new if new is not None else old
    if limit is None:
        return None
    name = "max_tokens" if new is None else "max_completion_tokens"  # the one that errors name
    if not 1 <= limit <= MAX_TOKENS_LIMIT:
        raise invalid(f"'{name}' must be from 1 to {MAX_TOKENS_LIMIT}, not {limit}", name)
    min_tokens: int = getattr(body, NAMES["openai"]["min_tokens"]) or 0
    if min_tokens > limit:
        raise invalid(f"'min_tokens' ({min_tokens}) must not exceed '{name}' ({limit})", "min_tokens")
    return limit


def top_logprobs_of(body: ChatRequest) -> int:
    """`top_logprobs`, 0 where it is missing. Raises ApiError 400 out of range or without `logprobs`."""
    top = body.top_logprobs
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise invalid(f"'top_logprobs' must be from 0 to {MAX_TOP_LOGPROBS}, not {top}", "top_logprobs")
    if top and not body.logprobs:
        raise invalid("'top_logprobs' needs 'logprobs' to be true", "top_logprobs")
    return top or 0


def _turns(messages: Sequence[Message]) -> tuple[Turn, ...]:
    turns = [_turn(message, f"messages[{index}]") for index, message in enumerate(messages)]
    known_ids: set[str] = set()
    for index, turn in enumerate(turns):
        known_ids |= {call.id for call in turn.calls}
        if turn.role == "tool" and turn.call_id not in known_ids:
            param = f"messages[{index}].tool_call_id"
            raise invalid(f"'{param}' answers no tool call of the messages before it", param)
    return tuple(turns)


def _turn(message: Message, path: str) -> Turn:
    text = _text(message.content)
    if isinstance(message, ToolMessage):
        return Turn("tool", text, call_id=message.tool_call_id, name=message.name)
    if isinstance(message, AssistantMessage):
        calls = tuple(
            _call(call, f"{path}.tool_calls[{number}]") for number, call in enumerate(message.tool_calls or ())
        )
        reasoning = message.reasoning_content or message.reasoning
        return Turn("assistant", text or message.refusal or "", calls, reasoning, name=message.name)
    role: Any = message.__struct_config__.tag
    return Turn("system" if role == "developer" else role, text, name=message.name)


def _text(content: str | Sequence[TextPart | RefusalPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)


def _call(call: AssistantToolCall, path: str) -> ToolCall:
    if call.type == "custom" and call.custom is not None:
        return ToolCall(call.id, call.custom.name, {INPUT: call.custom.input}, f"{path}.custom.input")
    if call.type == "function" and call.function is not None:
        return ToolCall(call.id, call.function.name, call.function.arguments, f"{path}.function.arguments")
    missing = f"{path}.{call.type}"
    raise invalid(f"missing required parameter: '{missing}'", missing, "missing_required_parameter")


def _tool(tool: FunctionTool | CustomTool, path: str) -> tuple[str, ToolDefinition]:
    """The place of a tool's name, and its definition."""
    if isinstance(tool, FunctionTool):
        return f"{path}.function", tool_definition(tool.function, f"{path}.function")
    custom, place = tool.custom, f"{path}.custom"
    grammar = custom.format.grammar if isinstance(custom.format, GrammarFormat) else None
    return place, custom_tool(custom.name, custom.description, grammar, f"{place}.format.grammar")


def _name_of(choice: NamedToolChoice | NamedCustomChoice) -> str:
    return choice.function.name if isinstance(choice, NamedToolChoice) else choice.custom.name


def _tool_choice(body: ChatRequest, tools: Sequence[ToolDefinition]) -> tuple[frozenset[str] | None, bool, bool]:
    """(names of tools that may be called, None for all; whether a call is required; whether only one is allowed)"""
    choice = body.tool_choice
    if tools and isinstance(choice, NamedToolChoice | NamedCustomChoice):
        param = f"tool_choice.{choice.__struct_config__.tag}.name"
        return checked_tool_names([_name_of(choice)], tools, param), True, True
    if tools and isinstance(choice, AllowedToolsChoice):
        allowed = choice.allowed_tools
        names = checked_tool_names([_name_of(tool) for tool in allowed.tools], tools, "tool_choice.allowed_tools.tools")
        return names, allowed.mode == "required", False
    return unnamed_choice(choice, has_tools=bool(tools))


# -- chat types -----------------------------------------------------------------------------------
# The body of a chat completion request; `request_fields.py` has the fields that are not read.
#
# Source: https://platform.openai.com/docs/api-reference/chat/create.

ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.:-]{1,64}$")]


class TextPart(StrictStruct, tag_field="type", tag="text"):
    """`cache_control`: sent by gateways for Anthropic's models; ignored, since all prefixes are cached."""

    text: str
    cache_control: dict[str, Any] | None = None


class RefusalPart(StrictStruct, tag_field="type", tag="refusal"):
    refusal: str


class FunctionCall(StrictStruct):
    name: str
    arguments: str


class EarlierFunctionCall(FunctionCall):
    """`parsed_arguments`: added to answers by the `parse` of OpenAI's client, and sent back by it; ignored."""

    parsed_arguments: Any = None


class CustomCall(StrictStruct):
    name: str
    input: str


class AssistantToolCall(StrictStruct):
    """A tool call of an earlier answer, with what its type names."""

    id: str
    function: EarlierFunctionCall | None = None
    type: Literal["function", "custom"] = "function"
    index: int | None = None
    custom: CustomCall | None = None


class SystemMessage(StrictStruct, tag_field="role", tag="system"):
    content: str | list[TextPart]
    name: str | None = None


class DeveloperMessage(SystemMessage, tag="developer"):
    """A system message, under its newer name."""


class UserMessage(SystemMessage, tag="user"):
    """The user's turn."""


class AssistantMessage(StrictStruct, tag_field="role", tag="assistant"):
    """An earlier answer, sent back. Fields that can only be null are those that this server never fills.

    `reasoning`: another name of `reasoning_content`. `provider_specific_fields`: added to answers by litellm, and sent
    back by it; ignored, as are the `reasoning_details` of OpenRouter and the `parsed` of OpenAI's client.
    """

    content: str | list[TextPart | RefusalPart] | None = None
    tool_calls: list[AssistantToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    reasoning_details: list[Any] | None = None
    refusal: str | None = None
    name: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    parsed: Any = None
    provider_specific_fields: dict[str, Any] | None = None


class ToolMessage(StrictStruct, tag_field="role", tag="tool"):
    tool_call_id: str
    content: str | list[TextPart]
    name: str | None = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class Function(StrictStruct):
    """`parameters` is a JSON schema. The arguments fit it whether `strict` is set or not."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(StrictStruct, tag_field="type", tag="function"):
    function: Function


class GrammarFormat(StrictStruct, tag_field="type", tag="grammar"):
    """A text of the grammar."""

    grammar: Grammar


class Custom(StrictStruct):
    """A tool with freeform input, which `format` constrains."""

    name: ToolName
    description: str | None = None
    format: TextInput | GrammarFormat | None = None


class CustomTool(StrictStruct, tag_field="type", tag="custom"):
    custom: Custom


class FunctionName(StrictStruct):
    name: str


class NamedToolChoice(StrictStruct, tag_field="type", tag="function"):
    function: FunctionName


class NamedCustomChoice(StrictStruct, tag_field="type", tag="custom"):
    custom: FunctionName


class AllowedTools(StrictStruct):
    mode: Literal["auto", "required"]
    tools: list[NamedToolChoice | NamedCustomChoice]


class AllowedToolsChoice(StrictStruct, tag_field="type", tag="allowed_tools"):
    allowed_tools: AllowedTools


class ReasoningField(StrictStruct):
    """OpenRouter's `reasoning`: reasoning of at most `max_tokens` tokens, or as many as `effort` gives. A constraint on
    the answer applies behind it. `exclude`: the answer has no `reasoning_content`."""

    enabled: bool = True
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_REASONING_TOKENS)] | None = None
    effort: Effort | None = None
    exclude: bool = False


class ThinkingField(StrictStruct):
    """`thinking` as DeepSeek, GLM and Kimi have it in chat completions, and as LiteLLM sends it."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Annotated[int, Meta(ge=0, le=MAX_REASONING_TOKENS)] | None = None


class ChatRequest(SamplingRequest, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's chat completion request."""

    field_table: ClassVar[str] = "chat"
    messages: Annotated[list[Message], Meta(min_length=1, max_length=1024)]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: Annotated[list[FunctionTool | CustomTool], Meta(max_length=128)] | None = None
    tool_choice: (
        Literal["none", "auto", "required"] | NamedToolChoice | NamedCustomChoice | AllowedToolsChoice | None
    ) = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    enable_thinking: bool | None = None
    untagged_tool_calls: bool | None = None
    reasoning: ReasoningField | None = None
    thinking: ThinkingField | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
