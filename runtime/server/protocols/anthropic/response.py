"""Anthropic's message object, its content blocks, and the stream events, as structs.

Fields are encoded in the order in which they are declared. The name of an event is its `type`.

Source: https://docs.anthropic.com/en/docs/build-with-claude/streaming.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from plait.runtime.call_reports import Usage
from plait.runtime.chat.parser import ParsedPart
from plait.runtime.client.call import CallResult
from plait.runtime.client.client import Client
from plait.runtime.client.partial_json import parse_partial_json
from plait.runtime.server.chat.engine import ChatOutput, PreparedChat
from plait.runtime.server.errors import ApiError
from plait.runtime.server.generation.cache_miss import CacheMissReport, cache_miss_report
from plait.runtime.server.generation.submission import RequestHandle, Submission
from plait.runtime.server.http.error_bodies import anthropic_error
from plait.runtime.server.http.response import KeepAlive, named_sse_event
from plait.runtime.server.protocols.answer import AnswerWriter, Batch
from plait.runtime.server.protocols.shared import as_written

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


# -- content blocks -------------------------------------------------------------------------------
# Builds the content blocks of an Anthropic message, and the stream events that build them.
#
# An answer that is not streamed is built by the same events, so the two cannot differ.


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


# -- the answer -----------------------------------------------------------------------------------

PING = KeepAlive(named_sse_event("ping", Ping()))


@dataclass(frozen=True)
class CheckedMessage:
    """A checked request. `started`: the message while nothing is generated."""

    submission: Submission
    prepared: PreparedChat
    started: AnthropicMessage
    request_id: str


class MessageWriter(AnswerWriter):
    """One message, or its events."""

    def __init__(self, client: Client, checked: CheckedMessage, handle: RequestHandle) -> None:
        self._client, self._checked, self._handle, self._has_begun = client, checked, handle, False
        self._output = ChatOutput(checked.prepared, client, handle.calls[0])
        self._blocks = ContentBlocks()

    def body(self, results: Sequence[CallResult]) -> AnthropicMessage:
        self._blocks.add(self._output.parse_result(results[0]))
        stop, usage, warnings, cache_miss = self._end(results[0])
        return msgspec.structs.replace(
            self._checked.started,
            content=self._blocks.content(),
            usage=usage,
            warnings=warnings,
            cache_miss=cache_miss,
            **msgspec.structs.asdict(stop),
        )

    def _end(self, result: CallResult) -> tuple[Stop, AnswerUsage, list[str] | UnsetType, CacheMissReport | UnsetType]:
        """What a message ends with."""
        made_calls = self._output.finish_reason == "tool_calls"
        return (
            stop_reason_of(result, self._checked.submission.sampling.max_tokens, made_calls),
            AnswerUsage.of(self._handle.usage()),
            self._handle.warnings(more=self._checked.prepared.warnings),
            cache_miss_report(self._client, result, self._checked.submission.prompt_ids),
        )

    def write(self, batch: Batch) -> bytes:
        events: list[Event] = [] if self._has_begun else [MessageStart(self._checked.started), Ping()]
        self._has_begun = True
        for _, update in batch:
            events += self._blocks.add(self._output.parse_update(update))
        return _encode(events)

    def finish(self) -> bytes:
        delta = MessageDelta(*self._end(self._handle.calls[0].result(0)))
        return _encode([*self._blocks.finish(), delta, MessageStop()])

    def fail(self, error: ApiError) -> bytes:
        return error_event(error, self._checked)


def error_event(error: ApiError, checked: CheckedMessage) -> bytes:
    """The event of an error."""
    return named_sse_event("error", anthropic_error(error, checked.request_id))


def _encode(events: Sequence[Event]) -> bytes:
    return b"".join([named_sse_event(str(event.__struct_config__.tag), event) for event in events])
