"""An answer as Anthropic's blocks: the events that build them up, and the blocks that these events add up to.

A whole answer is made of the same events as a stream, so the two cannot differ.

Source: https://docs.anthropic.com/en/docs/build-with-claude/streaming

Knows: blocks, events, stop reasons. Must not know: HTTP, sessions.
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


class AnswerUsage(msgspec.Struct):
    """Input tokens that were computed, and those found in the cache; what a prompt has in all is their sum."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(msgspec.Struct):
    """Anthropic's message object."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerText | AnswerThinking | AnswerToolUse]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: AnswerUsage


class TokenCount(msgspec.Struct):
    input_tokens: int


class SseEvent(NamedTuple):
    """A server-sent event."""

    name: str
    data: dict[str, Any]


class ContentBlocks:
    """The blocks of one answer, while it comes. Reasoning is left out unless `with_thinking`."""

    def __init__(self, with_thinking: bool) -> None:
        self._with_thinking = with_thinking
        self._pieces: list[tuple[dict[str, Any], list[str]]] = []  # a block as it began, and what came since
        self._open: tuple[str, int] | None = None  # kind and number of the part that the open block shows

    def add(self, parts: Sequence[ParsedPart]) -> list[SseEvent]:
        """The events of these parts."""
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
        """The events that end the last block."""
        return self._close()

    def content(self) -> list[dict[str, Any]]:
        """The blocks, whole."""
        return [_finished_block(begun, "".join(pieces)) for begun, pieces in self._pieces]

    def _begin(self, part: ParsedPart) -> SseEvent:
        if part.kind == "call":
            block = {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": part.text, "input": {}}
        elif part.kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            block = {"type": "text", "text": ""}
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


def _finished_block(begun: dict[str, Any], text: str) -> dict[str, Any]:
    kind: str = begun["type"]
    return begun | ({"input": read_partial_object(text)} if kind == "tool_use" else {kind: text})


def stop_reason_of(result: CallResult, max_tokens: int, made_calls: bool) -> dict[str, Any]:
    """`stop_reason` and `stop_sequence`."""
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


def usage_body(usage: Usage) -> dict[str, int]:
    """Anthropic's usage object."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
