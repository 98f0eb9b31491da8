"""Converts a messages request to a `Conversation` and sampling parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from plait.constrained.specs import MAX_REASONING_TOKENS, JsonSchema, Spec
from plait.runtime.sampling_params import SamplingParams
from plait.runtime.server.chat.conversation import Conversation, Effort, Thinking, ToolCall, ToolDefinition, Turn
from plait.runtime.server.chat.template_settings import TemplateVariables, template_variables
from plait.runtime.server.chat.thinking import thinking_of
from plait.runtime.server.errors import invalid
from plait.runtime.server.fields.request_warnings import warn
from plait.runtime.server.generation.sampling_fields import read_sampling_params, sampling_fields
from plait.runtime.server.protocols.shared import StrictStruct, build_constraint, build_tools, checked_tool_names

BETWEEN_BLOCKS = "\n"
BETWEEN_MESSAGES = "\n\n"
BILLING_HEADER = "x-anthropic-billing-header:"
SCHEMA_PARAM = "output_config.format.schema"


def conversation_of(body: PromptFields) -> Conversation:
    """The conversation. Raises ApiError 400 for values that contradict each other."""
    system = _system_text(body.system)
    turns = [Turn("system", system)] if system else []
    for message in body.messages:
        turns += _turns(message)
    _check_tool_results(body.messages)
    tools = build_tools(body.tools or (), "tools[{}]", "input_schema")
    names, must_call, one_call = _tool_choice(body, tools)
    constraint = _constraint(body)
    return Conversation(
        turns=tuple(_merge_same_role(turns)),
        tools=tools,
        callable_names=names,
        must_call=must_call,
        one_call=one_call,
        constraint=constraint,
        constraint_param=SCHEMA_PARAM if constraint is not None else None,
        untagged_calls=body.untagged_tool_calls if isinstance(body, MessagesRequest) else None,
        continue_final=isinstance(body.messages[-1], AssistantMessage),
        template_variables=template_variables(body.chat_template_kwargs),
        thinking=_thinking(body),
    )


def _system_text(system: str | Sequence[TextBlock] | None) -> str:
    """The system prompt, without the blocks that are wholly one line of BILLING_HEADER.

    Claude Code's first block is such a line and differs in each request, so that no prefix of the prompt would be
    cached. It says nothing to the model.
    """
    blocks = [TextBlock(system)] if isinstance(system, str) else system or ()
    for index, block in enumerate(blocks):
        if _is_billing_header(block.text):
            name = "system" if isinstance(system, str) else f"system[{index}]"
            warn(name, f"it is only a line of {BILLING_HEADER} which would keep the prompt from being cached")
    return _text_of_blocks([block for block in blocks if not _is_billing_header(block.text)])


def _is_billing_header(text: str) -> bool:
    return text.startswith(BILLING_HEADER) and len(text.splitlines()) == 1


def _thinking(body: PromptFields) -> Thinking:
    """The reasoning, which an answer only shows if the request has `thinking`."""
    config, effort = body.thinking, body.output_config.effort if body.output_config else None
    if config is None or isinstance(config, ThinkingDisabled):
        if effort is not None:
            warn("output_config.effort", "it needs 'thinking'")
        return Thinking(is_wanted=None if config is None else False, is_shown=False)
    limit = config.budget_tokens if isinstance(config, ThinkingEnabled) else None
    is_shown = isinstance(config, ThinkingBetweenTools) or config.display != "omitted"
    return thinking_of("thinking", effort, limit, is_shown=is_shown)


def sampling_of(body: MessagesRequest) -> SamplingParams:
    """The checked sampling parameters. `top_k` 0 is no limit."""
    return read_sampling_params(body, "anthropic", top_k=body.top_k or None)


# -- turns ------------------------------------------------------------------------------------------


def _turns(message: Message) -> list[Turn]:
    if isinstance(message, SystemMessage):
        return [Turn("system", _text_of_blocks(message.content))]
    if isinstance(message, AssistantMessage):
        return [_assistant(message)]
    if isinstance(message.content, str):
        return [Turn("user", message.content)]
    results = [_tool_result(block) for block in message.content if isinstance(block, ToolResultBlock)]
    texts = [block.text for block in message.content if isinstance(block, TextBlock)]
    if texts or not results:
        results.append(Turn("user", BETWEEN_BLOCKS.join(texts)))
    return results


def _assistant(message: AssistantMessage) -> Turn:
    if isinstance(message.content, str):
        return Turn("assistant", message.content)
    texts, thoughts, calls = [], [], []
    for block in message.content:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, RedactedThinkingBlock):
            warn("redacted_thinking", "only Anthropic's servers can read it")
        else:
            calls.append(ToolCall(block.id, block.name, block.input))
    return Turn("assistant", BETWEEN_BLOCKS.join(texts), tuple(calls), "\n".join(thoughts) or None)


def _tool_result(block: ToolResultBlock) -> Turn:
    """A tool's turn. A failure is marked in the text: chat templates have no other place for it."""
    text = _text_of_blocks(block.content)
    return Turn("tool", f"Error: {text}" if block.is_error else text, call_id=block.tool_use_id)


def _text_of_blocks(content: str | Sequence[TextBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return BETWEEN_BLOCKS.join(block.text for block in content)


def _merge_same_role(turns: Iterable[Turn]) -> list[Turn]:
    """Merges consecutive turns of the user or of the assistant, as Anthropic documents it."""
    merged: list[Turn] = []
    for role, group in groupby(turns, key=lambda turn: turn.role):
        same = list(group)
        if len(same) == 1 or role not in ("user", "assistant"):
            merged += same
            continue
        text = BETWEEN_MESSAGES.join(turn.text for turn in same if turn.text)
        thoughts = "\n".join(turn.reasoning for turn in same if turn.reasoning) or None
        merged.append(Turn(role, text, tuple(call for turn in same for call in turn.calls), thoughts))
    return merged


def _check_tool_results(messages: Sequence[Message]) -> None:
    """Raises ApiError 400 unless the next message has the result of each tool use, and no other result."""
    waiting: set[str] = set()
    for index, message in enumerate(messages):
        blocks = [] if isinstance(message.content, str) else message.content
        param = f"messages[{index}]"
        for call_id in [block.tool_use_id for block in blocks if isinstance(block, ToolResultBlock)]:
            if call_id not in waiting:
                raise invalid(f"'{param}' has a tool_result for no tool_use of the message before it", param)
            waiting.discard(call_id)
        if waiting:
            missing = sorted(waiting)[0][:100]
            raise invalid(f"'{param}' has no tool_result for the tool_use '{missing}' of the message before it", param)
        waiting = {block.id for block in blocks if isinstance(block, ToolUseBlock)}
    if waiting:
        raise invalid("the last message is a tool_use, which only a tool_result can follow", "messages")


# -- tools ------------------------------------------------------------------------------------------


def _tool_choice(body: PromptFields, tools: Sequence[ToolDefinition]) -> tuple[frozenset[str] | None, bool, bool]:
    """(names of tools that may be called, None for all; whether a call is required; whether only one is allowed)"""
    choice = body.tool_choice
    if not tools:
        if isinstance(choice, AnyChoice | ToolChoice):
            raise invalid("'tool_choice' needs 'tools'", "tool_choice")
        return frozenset(), False, False
    if isinstance(choice, NoneChoice):
        return frozenset(), False, False
    if isinstance(choice, ToolChoice):
        return checked_tool_names([choice.name], tools, "tool_choice.name"), True, True
    one_call = isinstance(choice, AutoChoice | AnyChoice) and bool(choice.disable_parallel_tool_use)
    return None, isinstance(choice, AnyChoice), one_call


def _constraint(body: PromptFields) -> Spec | None:
    config = body.output_config
    if config is None or config.format is None:
        return None
    constraint: Spec = build_constraint(SCHEMA_PARAM, JsonSchema, config.format.schema)
    return constraint


# -- types ----------------------------------------------------------------------------------------
# The body of a messages request; `request_fields.py` has the fields that are not read.
#
# Source: https://docs.anthropic.com/en/api/messages and the types of the `anthropic` package 2.12.

MAX_MESSAGES = 1024
MAX_TOOLS = 128

ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]


class CacheControl(StrictStruct):
    """Accepted and ignored: all prefixes are cached, for each API key apart."""

    type: Literal["ephemeral"]
    scope: str | None = None
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(StrictStruct, tag_field="type", tag="text"):
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any], Meta(max_length=0)] | None = None


class ThinkingBlock(StrictStruct, tag_field="type", tag="thinking"):
    """Reasoning of an earlier answer. This server's signatures are empty."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(StrictStruct, tag_field="type", tag="redacted_thinking"):
    """Reasoning that only Anthropic's servers can read; left out, with a warning."""

    data: str


class DirectCaller(StrictStruct):
    type: Literal["direct"]


class ToolUseBlock(StrictStruct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: DirectCaller | None = None
    toolset_name: None = None


class ToolResultBlock(StrictStruct, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: None = None


class SystemMessage(StrictStruct, tag_field="role", tag="system"):
    content: str | list[TextBlock]


class UserMessage(StrictStruct, tag_field="role", tag="user"):
    content: str | list[TextBlock | ToolResultBlock]


class AssistantMessage(StrictStruct, tag_field="role", tag="assistant"):
    content: str | list[TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock]


Message = SystemMessage | UserMessage | AssistantMessage


class AnthropicTool(StrictStruct):
    """A tool that the client runs. The input fits `input_schema` whether `strict` is set or not."""

    name: ToolName
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: Literal[True] | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class AutoChoice(StrictStruct, tag_field="type", tag="auto"):
    disable_parallel_tool_use: bool | None = None


class AnyChoice(StrictStruct, tag_field="type", tag="any"):
    disable_parallel_tool_use: bool | None = None


class ToolChoice(StrictStruct, tag_field="type", tag="tool"):
    name: str
    disable_parallel_tool_use: bool | None = None


class NoneChoice(StrictStruct, tag_field="type", tag="none"):
    """No tool may be used."""


class ThinkingAdaptive(StrictStruct, tag_field="type", tag="adaptive"):
    display: Literal["summarized", "omitted"] | None = None


class ThinkingEnabled(StrictStruct, tag_field="type", tag="enabled"):
    budget_tokens: Annotated[int, Meta(ge=0, le=MAX_REASONING_TOKENS)]
    display: Literal["summarized", "omitted"] | None = None


class ThinkingBetweenTools(StrictStruct, tag_field="type", tag="between_tools"):
    """Reasoning between tool uses."""


class ThinkingDisabled(StrictStruct, tag_field="type", tag="disabled"):
    """No reasoning in the answer."""


ThinkingField = ThinkingAdaptive | ThinkingEnabled | ThinkingBetweenTools | ThinkingDisabled


class JsonFormat(StrictStruct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(StrictStruct):
    """`format`: the answer is JSON that fits the schema. `effort`: of `thinking`."""

    format: JsonFormat | None = None
    effort: Effort | None = None


class Metadata(StrictStruct):
    """Accepted and ignored."""

    user_id: str | None = None


class PromptFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The prompt's fields: all of a `count_tokens` request, and part of a messages request.

    `chat_template_kwargs` is an extension.
    """

    field_table: ClassVar[str] = "count_tokens"
    model: str
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AutoChoice | AnyChoice | ToolChoice | NoneChoice | None = None
    thinking: ThinkingField | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    chat_template_kwargs: TemplateVariables | None = None


if TYPE_CHECKING:
    _MessagesSampling = PromptFields
else:
    _MessagesSampling = sampling_fields("anthropic", base=PromptFields)


class MessagesRequest(_MessagesSampling, kw_only=True, forbid_unknown_fields=True):
    """Anthropic's messages request. `untagged_tool_calls` is an extension."""

    field_table: ClassVar[str] = "messages"
    max_tokens: Annotated[int, Meta(ge=0, le=1 << 20)]
    stop_sequences: list[str] | None = None
    untagged_tool_calls: bool | None = None
    stream: bool | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    metadata: Metadata | None = None
