"""Chat completions and their stream chunks as structs, and how the parts of an answer become them.

Source: https://platform.openai.com/docs/api-reference/chat/object and .../chat/streaming.
"""

from __future__ import annotations

import secrets
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from plait.runtime.chat.parser import ParsedPart
from plait.runtime.client.call import Call, CallResult
from plait.runtime.client.client import Client
from plait.runtime.client.stream import CallUpdate
from plait.runtime.server.chat.engine import ChatOutput, PreparedChat
from plait.runtime.server.generation.cache_miss import CacheMissReport
from plait.runtime.server.generation.submission import RequestHandle, Submission
from plait.runtime.server.protocols.answer import Batch
from plait.runtime.server.protocols.openai.chat_request import CustomCall, FunctionCall
from plait.runtime.server.protocols.openai.custom_tools import InputReader
from plait.runtime.server.protocols.openai.fields import ChunkWriter, FinishReason, ResponseHead, UsageBody
from plait.runtime.server.protocols.shared import ContentLogprob, ImportanceWeight, extensions, token_logprobs


class ChatToolCall(msgspec.Struct, tag_field="type", tag="function"):
    id: str
    function: FunctionCall


class ChatCustomCall(msgspec.Struct, tag_field="type", tag="custom"):
    id: str
    custom: CustomCall


class ChatMessage(msgspec.Struct):
    """`content` is null where there are tool calls and no text."""

    content: str | None
    tool_calls: list[ChatToolCall | ChatCustomCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChoiceLogprobs(msgspec.Struct):
    """Logprobs of every token of the answer, reasoning and tool calls included."""

    content: list[ContentLogprob]
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """`weight` and `cache_miss` are extensions."""

    index: int
    message: ChatMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason
    weight: ImportanceWeight | UnsetType = UNSET
    cache_miss: CacheMissReport | UnsetType = UNSET


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


class DeltaCustom(msgspec.Struct):
    """The name comes first, then the input piece by piece."""

    input: str
    name: str | UnsetType = UNSET


class DeltaToolCall(msgspec.Struct):
    """`function`, or `custom` for a custom tool."""

    index: int
    function: DeltaFunction | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    custom: DeltaCustom | UnsetType = UNSET


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
    weight: ImportanceWeight | UnsetType = UNSET  # in the last chunk of a choice
    cache_miss: CacheMissReport | UnsetType = UNSET  # likewise


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
    """Collects the parts of an answer into one message. custom_tools: names of tools with freeform input."""

    def __init__(self, custom_tools: Container[str]) -> None:
        self._custom_tools = custom_tools
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
        calls = [self._call(part, "".join(pieces)) for part, pieces in self._calls]
        return ChatMessage(text or (None if calls else ""), calls or UNSET, reasoning or UNSET)

    def _call(self, part: ParsedPart, arguments: str) -> ChatToolCall | ChatCustomCall:
        if part.text in self._custom_tools:
            return ChatCustomCall(_new_call_id(part), CustomCall(part.text, InputReader().add(arguments)))
        return ChatToolCall(_new_call_id(part), FunctionCall(part.text, arguments))


class DeltaBuilder:
    """Makes the deltas of one answer. custom_tools: names of tools with freeform input."""

    def __init__(self, custom_tools: Container[str]) -> None:
        self._custom_tools = custom_tools
        self._inputs: dict[int, InputReader] = {}  # of the calls of custom tools

    def deltas(self, part: ParsedPart) -> list[Delta]:
        """The deltas that add one part."""
        if part.kind == "text":
            return [Delta(content=part.text)]
        if part.kind == "reasoning":
            return [Delta(reasoning_content=part.text)]
        call = self._call(part)
        return [] if call is None else [Delta(tool_calls=[call])]

    def _call(self, part: ParsedPart) -> DeltaToolCall | None:
        number = part.number
        if part.kind == "call":
            call_id = _new_call_id(part)
            if part.text not in self._custom_tools:
                return DeltaToolCall(number, DeltaFunction("", part.text), call_id, "function")
            self._inputs[number] = InputReader()
            return DeltaToolCall(number, UNSET, call_id, "custom", DeltaCustom("", part.text))
        if number not in self._inputs:
            return DeltaToolCall(number, DeltaFunction(part.text))
        text = self._inputs[number].add(part.text)
        return DeltaToolCall(number, custom=DeltaCustom(text)) if text else None


def _new_call_id(part: ParsedPart) -> str:
    return f"call_{secrets.token_hex(12)}{part.call_id}"


# -- the answer -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckedChat:
    """A checked request. `custom_tools`: names of tools with freeform input."""

    submission: Submission
    prepared: PreparedChat
    head: ResponseHead
    with_logprobs: bool
    includes_usage: bool
    custom_tools: frozenset[str]


class _ChoiceWriter:
    """Makes one choice, or writes its chunks."""

    def __init__(self, checked: CheckedChat, client: Client, chunks: ChunkWriter, call: Call, index: int) -> None:
        self._checked, self._client, self._chunks, self._index = checked, client, chunks, index
        self._output = ChatOutput(checked.prepared, client, call)
        self._deltas = DeltaBuilder(checked.custom_tools)
        self._has_begun = False

    def choice(self, result: CallResult) -> ChatChoice:
        """The choice of a call that has ended."""
        message = MessageBuilder(self._checked.custom_tools)
        for part in self._output.parse_result(result):
            message.add(part)
        reason, logprobs = self._output.finish_reason, self._take_logprobs()
        assert reason is not None
        more = extensions(self._client, result, self._checked.submission.prompt_ids)
        return ChatChoice(self._index, message.build(), logprobs, reason, *more)

    def chunks(self, update: CallUpdate) -> bytes:
        """The events of an update. Logprobs go with its last chunk that has text, otherwise with the very last."""
        deltas = [delta for part in self._output.parse_update(update) for delta in self._deltas.deltas(part)]
        if not deltas and not update.finished:
            return b""
        if not self._has_begun:
            self._has_begun = True
            deltas.insert(0, Delta(role="assistant", content=""))
        logprobs = self._take_logprobs()
        chunks = [self._chunk(delta, None, None) for delta in deltas[:-1]]
        chunks += [self._chunk(delta, logprobs, None) for delta in deltas[-1:]]
        if update.finished:
            result = self._output.call.result(0)
            chunks.append(self._chunk(Delta(), None if deltas else logprobs, self._output.finish_reason, result))
        return b"".join(chunks)

    def _chunk(
        self,
        delta: Delta,
        logprobs: ChoiceLogprobs | None,
        reason: FinishReason | None,
        result: CallResult | None = None,
    ) -> bytes:
        """An event; `result`: of the choice that it ends."""
        choice = ChunkChoice(self._index, delta, logprobs, reason)
        if result is None:
            return self._chunks.chunk([choice])
        choice.weight, choice.cache_miss = extensions(self._client, result, self._checked.submission.prompt_ids)
        warnings = self._chunks.handle.warnings([self._output.call], self._checked.prepared.warnings)
        return self._chunks.chunk([choice], warnings)

    def _take_logprobs(self) -> ChoiceLogprobs | None:
        """The logprobs that were not sent yet; None where the request has no `logprobs`."""
        if not self._checked.with_logprobs:
            return None
        entries, self._output.logprobs = self._output.logprobs, []
        return ChoiceLogprobs(token_logprobs(self._client, entries))


class ChatWriter(ChunkWriter):
    """All choices, and the usage: in a stream at the end, if it is requested."""

    kind = ChatChunk

    def __init__(self, checked: CheckedChat, client: Client, handle: RequestHandle) -> None:
        super().__init__(checked.head, checked.includes_usage, handle)
        self._more_warnings = checked.prepared.warnings
        self._writers = [_ChoiceWriter(checked, client, self, call, index) for index, call in enumerate(handle.calls)]

    def body(self, results: Sequence[CallResult]) -> ChatCompletion:
        choices = [writer.choice(result) for writer, result in zip(self._writers, results, strict=True)]
        warnings = self.handle.warnings(more=self._more_warnings)
        return ChatCompletion(*self.head, choices, UsageBody.of(self.handle.usage()), warnings=warnings)

    def write(self, batch: Batch) -> bytes:
        return b"".join([self._writers[index].chunks(update) for index, update in batch])
