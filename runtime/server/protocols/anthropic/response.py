"""Anthropic's message object, its content blocks, and the stream events, as structs.

Fields are encoded in the order in which they are declared. The name of an event is its `type`.

Source: https://docs.anthropic.com/en/docs/build-with-claude/streaming.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from plait.runtime.call_reports import Usage
from plait.runtime.server.generation.cache_miss import CacheMissReport

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]

# -- the message ----------------------------------------------------------------------------------


class AnswerText(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class AnswerThinking(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class AnswerToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = AnswerText | AnswerThinking | AnswerToolUse


class AnswerUsage(msgspec.Struct):
    """Anthropic's usage object. The prompt has `input_tokens` computed and `cache_read_input_tokens` cached tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> AnswerUsage:
        return cls(usage.prompt_tokens - usage.cached_tokens, 0, usage.cached_tokens, usage.completion_tokens)


class Stop(msgspec.Struct):
    """Why an answer ended, and the stop sequence that ended it."""

    stop_reason: StopReason
    stop_sequence: str | None


class AnthropicMessage(msgspec.Struct):
    """Anthropic's message object. `warnings` and `cache_miss` are extensions."""

    id: str
    model: str
    usage: AnswerUsage
    content: list[AnswerBlock] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    warnings: list[str] | UnsetType = UNSET
    cache_miss: CacheMissReport | UnsetType = UNSET


class TokenCount(msgspec.Struct):
    """`warnings` and `cache_miss` are extensions."""

    input_tokens: int
    warnings: list[str] | UnsetType = UNSET
    cache_miss: CacheMissReport | UnsetType = UNSET


# -- stream events --------------------------------------------------------------------------------


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    """The message while nothing is generated."""

    message: AnthropicMessage


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    """Follows the start, and comes while a stream waits for it, as in Anthropic's streams."""


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    """A new block, which is empty."""

    index: int
    content_block: AnswerBlock


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class InputDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


BlockDeltaBody = TextDelta | ThinkingDelta | InputDelta


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    """New text of a block."""

    index: int
    delta: BlockDeltaBody


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    """The end of a block."""

    index: int


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    """How the message ended. `warnings` and `cache_miss` are extensions."""

    delta: Stop
    usage: AnswerUsage
    warnings: list[str] | UnsetType = UNSET
    cache_miss: CacheMissReport | UnsetType = UNSET


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    """The end of a stream."""


Event = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
