"""The shapes of chat answers: for the OpenAPI document, and a token's logprob as OpenAI writes it.

Knows: OpenAI's chat objects. Must not know: how answers come about.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from plait.runtime.client.client import Client
from plait.runtime.messages import TokenLogprob
from plait.runtime.server.protocols.openai.chat_types import FunctionCall
from plait.runtime.server.protocols.openai.fields import FinishReason, UsageBody

MIN_LOGPROB = -9999.0  # OpenAI's logprob of what cannot be; JSON has no infinity


class ChatToolCall(msgspec.Struct):
    id: str
    function: FunctionCall
    type: Literal["function"]


class ChatMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ChatToolCall] | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET


class TopLogprob(msgspec.Struct):
    token: str
    bytes: list[int]
    logprob: float


class ContentLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct):
    """Of every token of the answer, reasoning and tool calls included."""

    content: list[ContentLogprob]
    refusal: None


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(msgspec.Struct):
    """OpenAI's chat completion object."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    system_fingerprint: None


def token_logprobs(client: Client, entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """OpenAI's `logprobs.content`."""
    token_bytes = client.tokenizer.vocabulary.token_bytes

    def one(token: int, logprob: float) -> dict[str, Any]:
        data = token_bytes[token]
        return {"token": data.decode("utf-8", "replace"), "bytes": list(data), "logprob": max(logprob, MIN_LOGPROB)}

    return [
        one(entry.token_id, entry.logprob) | {"top_logprobs": [one(token, value) for token, value in entry.top]}
        for entry in entries
    ]
