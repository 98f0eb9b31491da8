"""A messages request as a `Conversation`: roles, blocks, tools, and what the answer must be.

Knows: Anthropic's fields and rules. Must not know: templates, tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from plait.constrained.specs import GrammarError, JsonSchema, Spec
from plait.runtime.sampling_params import SamplingParams
from plait.runtime.server.chat import conversation
from plait.runtime.server.chat.conversation import Conversation, ToolCall, Turn
from plait.runtime.server.chat.formats import reasoning_format
from plait.runtime.server.errors import invalid, unsupported
from plait.runtime.server.generation.sampling_fields import sampling_params_from_fields
from plait.runtime.server.protocols.anthropic.types import (
    AnthropicTool,
    AnyChoice,
    AssistantMessage,
    AutoChoice,
    Message,
    MessagesRequest,
    NoneChoice,
    PromptFields,
    SystemMessage,
    TextBlock,
    ThinkingAdaptive,
    ThinkingBlock,
    ThinkingDisabled,
    ThinkingEnabled,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from plait.runtime.tokenizer.chat_template import ChatTemplate

BETWEEN_BLOCKS = "\n"
BETWEEN_MESSAGES = "\n\n"


def conversation_of(body: PromptFields) -> Conversation:
    """Raises ApiError for values that contradict each other."""
    turns = [Turn("system", _text_of_blocks(body.system))] if body.system else []
    for message in body.messages:
        turns += _turns(message)
    _check_results(body.messages)
    tools = tuple(_tool(each, index) for index, each in enumerate(body.tools or ()))
    _check_names(tools)
    names, must_call, one_call = _tool_choice(body, tools)
    constraint = _constraint(body)
    return Conversation(
        turns=tuple(_merge_same_role(turns)),
        tools=tools,
        callable_names=names,
        must_call=must_call,
        one_call=one_call,
        constraint=constraint,
        constraint_param="output_config.format.schema" if constraint is not None else None,
        continue_final=isinstance(body.messages[-1], AssistantMessage),
    )


def sampling_of(body: MessagesRequest) -> SamplingParams:
    """The request's sampling parameters, checked."""
    return sampling_params_from_fields(
        {"stop": "stop_sequences"},
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k or None,  # 0 and null: not limited
        stop=body.stop_sequences,
    )


def shows_thinking(body: PromptFields, template: ChatTemplate | None) -> bool:
    """Whether reasoning is part of the answer. ApiError where it is asked for and the model has none."""
    thinking_config = body.thinking
    if thinking_config is None or isinstance(thinking_config, ThinkingDisabled):
        return False
    if template is None or reasoning_format(template.source) is None:
        raise unsupported("thinking", "is not supported: this model does not mark reasoning")
    if isinstance(thinking_config, ThinkingEnabled):
        why = 'is not supported: reasoning has no budget of its own here; use {"type": "adaptive"}'
        raise unsupported("thinking.budget_tokens", why)
    if not isinstance(thinking_config, ThinkingAdaptive):
        raise unsupported("thinking.type", "can only be adaptive or disabled on this server")
    return thinking_config.display != "omitted"


# -- turns ------------------------------------------------------------------------------------------


def _turns(message: Message) -> list[Turn]:
    if isinstance(message, SystemMessage):
        return [Turn("system", _text_of_blocks(message.content))]
    if isinstance(message, AssistantMessage):
        return [_assistant(message)]
    if isinstance(message.content, str):
        return [Turn("user", message.content)]
    results = [_result(block) for block in message.content if isinstance(block, ToolResultBlock)]
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
        else:
            calls.append(ToolCall(block.id, block.name, json.dumps(block.input, ensure_ascii=False)))
    return Turn("assistant", BETWEEN_BLOCKS.join(texts), tuple(calls), "\n".join(thoughts) or None)


def _result(block: ToolResultBlock) -> Turn:
    """What a tool gave; that it failed is said in words, since chat templates have no other place for it."""
    text = _text_of_blocks(block.content)
    return Turn("tool", f"Error: {text}" if block.is_error else text, call_id=block.tool_use_id)


def _text_of_blocks(content: str | Sequence[TextBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return BETWEEN_BLOCKS.join(block.text for block in content)


def _merge_same_role(turns: Iterable[Turn]) -> list[Turn]:
    """Neighbouring turns of the user, or of the assistant, are one turn, as Anthropic documents it."""
    merged: list[Turn] = []
    for turn in turns:
        last = merged[-1] if merged else None
        if last is not None and last.role == turn.role and turn.role in ("user", "assistant"):
            text = BETWEEN_MESSAGES.join(text for text in (last.text, turn.text) if text)
            thoughts = "\n".join(each.reasoning for each in (last, turn) if each.reasoning) or None
            merged[-1] = Turn(turn.role, text, last.calls + turn.calls, thoughts)
        else:
            merged.append(turn)
    return merged


def _check_results(messages: Sequence[Message]) -> None:
    """Each tool use is answered in the next message, and nothing else is."""
    waiting: set[str] = set()
    for index, message in enumerate(messages):
        blocks = [] if isinstance(message.content, str) else message.content
        given = [block.tool_use_id for block in blocks if isinstance(block, ToolResultBlock)]
        param = f"messages[{index}]"
        for call_id in given:
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


def _tool(given: AnthropicTool, index: int) -> conversation.ToolDefinition:
    param = f"tools[{index}].input_schema"
    return conversation.ToolDefinition(
        given.name, given.description or "", given.input_schema, param, bool(given.strict)
    )


def _check_names(tools: Sequence[conversation.ToolDefinition]) -> None:
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in seen:
            raise invalid(f"two tools are called '{tool.name}'", f"tools[{index}].name")
        seen.add(tool.name)


def _tool_choice(
    body: PromptFields, tools: Sequence[conversation.ToolDefinition]
) -> tuple[frozenset[str] | None, bool, bool]:
    """(names of tools that may be called, or None for all; whether one must be; whether only one may be)"""
    choice = body.tool_choice
    if not tools:
        if isinstance(choice, AnyChoice | ToolChoice):
            raise invalid("'tool_choice' needs 'tools'", "tool_choice")
        return frozenset(), False, False
    if isinstance(choice, NoneChoice):
        return frozenset(), False, False
    if isinstance(choice, ToolChoice):
        if all(tool.name != choice.name for tool in tools):
            text = f"'tool_choice.name' is '{choice.name[:100]}', which is none of the tools"
            raise invalid(text, "tool_choice.name")
        return frozenset([choice.name]), True, True
    one_call = isinstance(choice, AutoChoice | AnyChoice) and bool(choice.disable_parallel_tool_use)
    return None, isinstance(choice, AnyChoice), one_call


def _constraint(body: PromptFields) -> Spec | None:
    config = body.output_config
    if config is None:
        return None
    if config.effort is not None:
        raise unsupported("output_config.effort", "is not supported by this server")
    if config.format is None:
        return None
    try:
        return JsonSchema(config.format.schema)
    except GrammarError as error:
        param = "output_config.format.schema"
        raise invalid(f"'{param}': {error}", param, "invalid_constraint") from None
