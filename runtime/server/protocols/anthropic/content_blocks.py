"""Builds the content blocks of an Anthropic message, and the stream events that build them.

An answer that is not streamed is built by the same events, so the two cannot differ.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from plait.runtime.chat.parser import ParsedPart
from plait.runtime.client.call import CallResult
from plait.runtime.client.partial_json import parse_partial_json
from plait.runtime.server.protocols.anthropic.response import (
    AnswerBlock,
    AnswerText,
    AnswerThinking,
    AnswerToolUse,
    BlockDelta,
    BlockStart,
    BlockStop,
    Event,
    InputDelta,
    Stop,
    StopReason,
    TextDelta,
    ThinkingDelta,
)
from plait.runtime.server.protocols.shared import as_written


class ContentBlocks:
    """The content blocks of one answer."""

    def __init__(self) -> None:
        self._pieces: list[tuple[AnswerBlock, list[str]]] = []  # an empty block, and the texts of its deltas
        self._open: tuple[str, int] | None = None  # kind and number of the part in the open block

    def add(self, parts: Sequence[ParsedPart]) -> list[Event]:
        """Adds parts of the answer; returns their stream events."""
        events: list[Event] = []
        for part in parts:
            kind = "call" if part.kind == "arguments" else part.kind
            if part.kind == "call" or self._open != (kind, part.number):
                events += self._close()
                events.append(self._begin(part))
            if part.kind != "call":
                events.append(self._delta(part))
        return events

    def finish(self) -> list[Event]:
        """Ends the last block; returns the stream events."""
        return self._close()

    def content(self) -> list[AnswerBlock]:
        """The finished blocks."""
        return [_finished_block(block, "".join(pieces)) for block, pieces in self._pieces]

    def _begin(self, part: ParsedPart) -> Event:
        block: AnswerBlock
        if part.kind == "call":
            block = AnswerToolUse(f"toolu_{secrets.token_hex(12)}{part.call_id}", part.text, {})
        elif part.kind == "reasoning":
            block = AnswerThinking("", "")
        else:
            block = AnswerText("")
        self._pieces.append((block, []))
        self._open = (part.kind, part.number)
        return BlockStart(len(self._pieces) - 1, block)

    def _delta(self, part: ParsedPart) -> Event:
        self._pieces[-1][1].append(part.text)
        return BlockDelta(len(self._pieces) - 1, _DELTAS[part.kind](part.text))

    def _close(self) -> list[Event]:
        if self._open is None:
            return []
        self._open = None
        return [BlockStop(len(self._pieces) - 1)]


_DELTAS: dict[str, type[TextDelta] | type[ThinkingDelta] | type[InputDelta]] = {
    "text": TextDelta,
    "reasoning": ThinkingDelta,
    "arguments": InputDelta,
}


def _finished_block(block: AnswerBlock, text: str) -> AnswerBlock:
    if isinstance(block, AnswerToolUse):
        value = as_written(text)
        return msgspec.structs.replace(block, input=read_partial_object(text) if value is None else value)
    return AnswerThinking(text, block.signature) if isinstance(block, AnswerThinking) else AnswerText(text)


def read_partial_object(text: str) -> dict[str, Any]:
    """The object that `text` is or begins; a string or number that is cut off is left out, with its key.

    >>> read_partial_object('{"a": [1, 2, {"b": "x"'), read_partial_object('{"a": 1, "b')
    ({'a': [1, 2, {'b': 'x'}]}, {'a': 1})
    """
    try:
        part = parse_partial_json(text)
    except ValueError:  # no constraint held these arguments
        return {}
    return part.data(cut_strings=False) if part is not None and part.kind == "object" else {}


def stop_reason_of(result: CallResult, max_tokens: int, made_calls: bool) -> Stop:
    """Why a message ended."""
    reason: StopReason = "end_turn"
    matched = result.matched if isinstance(result.matched, str) else None
    if matched is not None:
        reason = "stop_sequence"
    elif result.finish_reason == "length":
        is_full = result.usage.completion_tokens < max_tokens
        reason = "model_context_window_exceeded" if is_full else "max_tokens"
    elif made_calls:
        reason = "tool_use"
    return Stop(reason, matched)
