"""Converts a messages request to a `Conversation` and sampling parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from plait.constrained.specs import JsonSchema, Spec
from plait.runtime.sampling_params import SamplingParams
from plait.runtime.server.chat.conversation import Conversation, Thinking, ToolCall, ToolDefinition, Turn
from plait.runtime.server.chat.template_settings import template_variables
from plait.runtime.server.chat.thinking import thinking_of
from plait.runtime.server.errors import invalid
from plait.runtime.server.fields.request_warnings import warn
from plait.runtime.server.generation.sampling_fields import read_sampling_params
from plait.runtime.server.protocols.anthropic.types import (
    AnyChoice,
    AssistantMessage,
    AutoChoice,
    Message,
    MessagesRequest,
    NoneChoice,
    PromptFields,
    RedactedThinkingBlock,
    SystemMessage,
    TextBlock,
    ThinkingBetweenTools,
    ThinkingBlock,
    ThinkingDisabled,
    ThinkingEnabled,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from plait.runtime.server.protocols.shared import build_constraint, build_tools, checked_tool_names

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
