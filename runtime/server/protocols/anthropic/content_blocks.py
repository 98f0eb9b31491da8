"""Anthropic's message object, its content blocks, and the stream events that build the blocks.

An answer that is not streamed is built by the same events, so the two cannot differ.

Source: https://docs.anthropic.com/en/docs/build-with-claude/streaming.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from plait.runtime.client.call import CallResult
from plait.runtime.messages import Usage
from plait.runtime.server.chat.parser import ParsedPart
from plait.runtime.server.protocols.anthropic.partial_json import read_partial_object

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


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


class AnthropicMessage(msgspec.Struct):
    """Anthropic's message object."""

    id: str
    model: str
    usage: AnswerUsage
    content: list[AnswerBlock] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class TokenCount(msgspec.Struct):
    input_tokens: int


class SseEvent(NamedTuple):
    """A server-sent event."""

    name: str
    data: dict[str, Any]


class ContentBlocks:
    """The content blocks of one answer. Reasoning is left out unless `with_thinking`."""

    def __init__(self, with_thinking: bool) -> None:
        self._with_thinking = with_thinking
        self._pieces: list[tuple[AnswerBlock, list[str]]] = []  # an empty block, and the texts of its deltas
        self._open: tuple[str, int] | None = None  # kind and number of the part in the open block

    def add(self, parts: Sequence[ParsedPart]) -> list[SseEvent]:
        """Adds parts of the answer; returns their stream events."""
        events: list[SseEvent] = []
        for part in parts:
            if part.kind == "reasoning" and not self._with_thinking:
                continue
            kind = "call" if part.kind == "arguments" else part.kind
            if part.kind == "call" or self._open != (kind, part.number):
                events += self._close()
                events.append(self._begin(part))
            if part.kind != "call":
                events.append(self._delta(part))
        return events

    def finish(self) -> list[SseEvent]:
        """Ends the last block; returns the stream events."""
        return self._close()

    def content(self) -> list[AnswerBlock]:
        """The finished blocks."""
        return [_finished_block(block, "".join(pieces)) for block, pieces in self._pieces]

    def _begin(self, part: ParsedPart) -> SseEvent:
        block: AnswerBlock
        if part.kind == "call":
            block = AnswerToolUse(f"toolu_{secrets.token_hex(12)}", part.text, {})
        elif part.kind == "reasoning":
            block = AnswerThinking("", "")
        else:
            block = AnswerText("")
        self._pieces.append((block, []))
        self._open = (part.kind, part.number)
        data = {"type": "content_block_start", "index": len(self._pieces) - 1, "content_block": block}
        return SseEvent("content_block_start", data)

    def _delta(self, part: ParsedPart) -> SseEvent:
        self._pieces[-1][1].append(part.text)
        kind, field = _DELTAS[part.kind]
        delta = {"type": kind, field: part.text}
        data = {"type": "content_block_delta", "index": len(self._pieces) - 1, "delta": delta}
        return SseEvent("content_block_delta", data)

    def _close(self) -> list[SseEvent]:
        if self._open is None:
            return []
        self._open = None
        return [SseEvent("content_block_stop", {"type": "content_block_stop", "index": len(self._pieces) - 1})]


_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "arguments": ("input_json_delta", "partial_json"),
}


def _finished_block(block: AnswerBlock, text: str) -> AnswerBlock:
    if isinstance(block, AnswerToolUse):
        return msgspec.structs.replace(block, input=read_partial_object(text))
    return AnswerThinking(text, block.signature) if isinstance(block, AnswerThinking) else AnswerText(text)


def stop_reason_of(result: CallResult, max_tokens: int, made_calls: bool) -> dict[str, Any]:
    """The fields `stop_reason` and `stop_sequence` of a message."""
    reason: StopReason = "end_turn"
    matched = result.matched if isinstance(result.matched, str) else None
    if matched is not None:
        reason = "stop_sequence"
    elif result.finish_reason == "length":
        is_full = result.usage.completion_tokens < max_tokens
        reason = "model_context_window_exceeded" if is_full else "max_tokens"
    elif made_calls:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": matched}
