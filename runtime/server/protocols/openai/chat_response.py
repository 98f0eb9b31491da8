"""Chat completions and their stream chunks as structs, and how the parts of an answer become them.

Source: https://platform.openai.com/docs/api-reference/chat/object and .../chat/streaming.
"""

from __future__ import annotations

import secrets
from typing import Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from plait.runtime.server.chat.parser import ParsedPart
from plait.runtime.server.protocols.openai.chat_types import FunctionCall
from plait.runtime.server.protocols.openai.fields import FinishReason, UsageBody
from plait.runtime.server.protocols.shared import ContentLogprob, DrawnWeight


class ResponseHead(NamedTuple):
    """What a completion and each of its chunks begin with; `created` in seconds since 1970."""

    id: str
    created: int
    model: str


class ChatToolCall(msgspec.Struct):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct):
    """`content` is null where there are tool calls and no text."""

    content: str | None
    tool_calls: list[ChatToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChoiceLogprobs(msgspec.Struct):
    """Logprobs of every token of the answer, reasoning and tool calls included."""

    content: list[ContentLogprob]
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """`weight` is an extension."""

    index: int
    message: ChatMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason
    weight: DrawnWeight | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    """OpenAI's chat completion object. `warnings` is an extension."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: None = None
    warnings: list[str] | UnsetType = UNSET


class DeltaFunction(msgspec.Struct):
    """The name comes first, then the arguments piece by piece."""

    arguments: str
    name: str | UnsetType = UNSET


class DeltaToolCall(msgspec.Struct):
    index: int
    function: DeltaFunction
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(msgspec.Struct):
    """The new part of a message. The last chunk of a choice has an empty one."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[DeltaToolCall] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason | None
    weight: DrawnWeight | UnsetType = UNSET  # in the last chunk of a choice


class ChatChunk(msgspec.Struct):
    """One event of a stream. `usage`: with `include_usage` null in all chunks but the last, which has no choices."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    system_fingerprint: None = None
    warnings: list[str] | UnsetType = UNSET


class MessageBuilder:
    """Collects the parts of an answer into one message."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {"text": [], "reasoning": []}
        self._calls: list[tuple[ParsedPart, list[str]]] = []  # the call's beginning, and pieces of its arguments

    def add(self, part: ParsedPart) -> None:
        if part.kind == "call":
            self._calls.append((part, []))
        elif part.kind == "arguments":
            self._calls[part.number][1].append(part.text)
        else:
            self._texts[part.kind].append(part.text)

    def build(self) -> ChatMessage:
        text, reasoning = "".join(self._texts["text"]), "".join(self._texts["reasoning"])
        calls = [
            ChatToolCall(_new_call_id(part), FunctionCall(part.text, "".join(pieces))) for part, pieces in self._calls
        ]
        return ChatMessage(text or (None if calls else ""), calls or UNSET, reasoning or UNSET)


def delta_of(part: ParsedPart) -> Delta:
    """The delta that adds one part."""
    if part.kind == "text":
        return Delta(content=part.text)
    if part.kind == "reasoning":
        return Delta(reasoning_content=part.text)
    if part.kind == "call":
        call = DeltaToolCall(part.number, DeltaFunction("", part.text), _new_call_id(part), "function")
    else:
        call = DeltaToolCall(part.number, DeltaFunction(part.text))
    return Delta(tool_calls=[call])


def _new_call_id(part: ParsedPart) -> str:
    return f"call_{secrets.token_hex(12)}{part.call_id}"
