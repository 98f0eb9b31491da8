"""OpenAI's response object, its output items and the events of a stream. Fields are encoded in the order in which they
are declared.

Sources: https://platform.openai.com/docs/api-reference/responses/object and .../responses-streaming.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from plait.runtime.call_reports import Usage
from plait.runtime.chat.parser import ParsedPart
from plait.runtime.server.chat.conversation import Effort
from plait.runtime.server.generation.cache_miss import CacheMissReport
from plait.runtime.server.protocols.openai.custom_tools import InputReader
from plait.runtime.server.protocols.openai.responses.request import CalledTool
from plait.runtime.server.protocols.shared import ContentLogprob, ImportanceWeight

ItemStatus = Literal["in_progress", "completed", "incomplete"]

# -- output items ---------------------------------------------------------------------------------


class OutputTextPart(msgspec.Struct, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str = ""
    annotations: tuple[()] = ()
    logprobs: list[ContentLogprob] = []


class ReasoningTextPart(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """The text of the reasoning."""

    text: str = ""


ContentPart = OutputTextPart | ReasoningTextPart


class OutputItem(msgspec.Struct):
    """An item of the answer; `type` is message, reasoning, function_call or custom_tool_call."""

    prefix: ClassVar[str]  # of its ids
    event: ClassVar[str]  # the beginning of the names of the events that add to it


class MessageOutput(OutputItem, kw_only=True):
    """A message of the assistant. `content` is empty until its only part begins."""

    prefix = "mes"
    event = "response.output_text"
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: ItemStatus = "in_progress"
    content: list[OutputTextPart] = []


class ReasoningOutput(OutputItem, kw_only=True):
    """The reasoning before a message. `content` is empty until its only part begins."""

    prefix = "rea"
    event = "response.reasoning_text"
    id: str
    type: Literal["reasoning"] = "reasoning"
    summary: tuple[()] = ()
    status: ItemStatus = "in_progress"
    content: list[ReasoningTextPart] = []


class CallOutput(OutputItem, kw_only=True):
    """A call of a function. `arguments` is JSON."""

    prefix = "fc"
    event = "response.function_call_arguments"
    type: Literal["function_call"] = "function_call"
    name: str
    arguments: str = ""
    status: ItemStatus = "in_progress"
    id: str
    call_id: str
    namespace: str | UnsetType = UNSET


class CustomCallOutput(OutputItem, kw_only=True):
    """A call of a custom tool."""

    prefix = "ctc"
    event = "response.custom_tool_call_input"
    type: Literal["custom_tool_call"] = "custom_tool_call"
    name: str
    input: str = ""
    status: ItemStatus = "in_progress"
    id: str
    call_id: str
    namespace: str | UnsetType = UNSET


AnyOutput = MessageOutput | ReasoningOutput | CallOutput | CustomCallOutput

# -- the response object --------------------------------------------------------------------------


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage, reasoning_tokens: int) -> ResponseUsage:
        prompt, completion = usage.prompt_tokens, usage.completion_tokens
        details = InputTokensDetails(usage.cached_tokens, prompt - usage.cached_tokens)
        return cls(prompt, details, completion, OutputTokensDetails(reasoning_tokens), prompt + completion)


class Incomplete(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class ReasoningEcho(msgspec.Struct, frozen=True):
    effort: Effort | None = None
    summary: None = None


class ResponseError(msgspec.Struct):
    code: str
    message: str


class ResponseBody(msgspec.Struct, kw_only=True):
    """OpenAI's response object; its `output` has items of `AnyOutput`.

    `warnings`, `weight` and `cache_miss` are extensions.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["completed", "incomplete", "in_progress", "failed"] = "in_progress"
    background: Literal[False] = False
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: Sequence[OutputItem] = ()
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    reasoning: ReasoningEcho = ReasoningEcho()
    service_tier: str = "default"
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    warnings: list[str] | UnsetType = UNSET
    weight: ImportanceWeight | UnsetType = UNSET
    cache_miss: CacheMissReport | UnsetType = UNSET


class InputTokens(msgspec.Struct):
    """The answer of `/v1/responses/input_tokens`. `warnings` is an extension."""

    input_tokens: int
    warnings: list[str] | UnsetType = UNSET
    object: Literal["response.input_tokens"] = "response.input_tokens"


# -- stream events --------------------------------------------------------------------------------
# `sequence_number` counts the events of a stream; `endpoint.py` sets it when it encodes them.


class ResponseEvent(msgspec.Struct, kw_only=True):
    """The response object, at the beginning of a stream and at its end."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    response: ResponseBody
    sequence_number: int = 0


class ItemEvent(msgspec.Struct, kw_only=True):
    """The beginning or the end of an item."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: AnyOutput
    sequence_number: int = 0


class PartEvent(msgspec.Struct, kw_only=True):
    """The beginning or the end of an item's only content part."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    item_id: str
    output_index: int
    content_index: Literal[0] = 0
    part: ContentPart
    sequence_number: int = 0


class TextDelta(msgspec.Struct, kw_only=True):
    """New text of a content part. Only a message has `logprobs`."""

    type: str  # response.output_text.delta or response.reasoning_text.delta
    item_id: str
    output_index: int
    content_index: Literal[0] = 0
    delta: str
    logprobs: list[ContentLogprob] | UnsetType = UNSET
    sequence_number: int = 0


class TextDone(msgspec.Struct, kw_only=True):
    """The complete text of a content part. Only a message has `logprobs`."""

    type: str  # response.output_text.done or response.reasoning_text.done
    item_id: str
    output_index: int
    content_index: Literal[0] = 0
    text: str
    logprobs: list[ContentLogprob] | UnsetType = UNSET
    sequence_number: int = 0


class CallDelta(msgspec.Struct, kw_only=True):
    """A new piece of a call's arguments, or of a custom tool's input."""

    type: str  # response.function_call_arguments.delta or response.custom_tool_call_input.delta
    item_id: str
    output_index: int
    delta: str
    sequence_number: int = 0


class CallDone(msgspec.Struct, kw_only=True):
    """The complete arguments of a call, with its tool's name, or the complete input of a custom tool."""

    type: str  # response.function_call_arguments.done or response.custom_tool_call_input.done
    item_id: str
    output_index: int
    arguments: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    sequence_number: int = 0


Event = ResponseEvent | ItemEvent | PartEvent | TextDelta | TextDone | CallDelta | CallDone


# -- items of an answer ---------------------------------------------------------------------------
# Builds the output items of a response and the stream events of each change, in OpenAI's order.
#
#     output_item.added  content_part.added  *.delta ...  *.done  content_part.done  output_item.done
#
# Calls have no content parts.
#
# A response that is not streamed has the same items without the events.


class OutputItems:
    """The items of one response. `add` and `close` return stream events; `output` has the items so far.

    tools: the name that the model writes -> the tool.
    """

    def __init__(self, tools: Mapping[str, CalledTool]) -> None:
        self._tools = tools
        self._input = InputReader()  # of the open call of a custom tool
        self.output: list[AnyOutput] = []
        self._open: AnyOutput | None = None  # the last item, while it can grow

    @property
    def reasoning(self) -> str:
        """All reasoning so far."""
        return "".join(item.content[0].text for item in self.output if isinstance(item, ReasoningOutput))

    def add(self, part: ParsedPart, logprobs: list[ContentLogprob] | None = None) -> list[Event]:
        """Adds a part of the answer; `logprobs` belong to a part that is text."""
        if part.kind == "call":
            return self._begin(self._new_call(part))
        if part.kind == "arguments":
            return self._add_arguments(part.text)
        kind: type[MessageOutput | ReasoningOutput] = MessageOutput if part.kind == "text" else ReasoningOutput
        events = [] if isinstance(self._open, kind) else self._begin(kind(id=_new_id(kind.prefix)))
        item = self._open
        assert isinstance(item, MessageOutput | ReasoningOutput)
        item.content[0].text += part.text
        delta = TextDelta(type=f"{item.event}.delta", item_id=item.id, output_index=self._index, delta=part.text)
        if isinstance(item, MessageOutput):
            delta.logprobs = logprobs or []
            item.content[0].logprobs += delta.logprobs
        return [*events, delta]

    def close(self, status: Literal["completed", "incomplete"] = "completed") -> list[Event]:
        """Ends the open item, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return []
        events: list[Event]
        place: dict[str, Any] = {"item_id": item.id, "output_index": self._index}
        kind = f"{item.event}.done"
        if isinstance(item, CallOutput):
            events = [CallDone(type=kind, **place, arguments=item.arguments, name=item.name)]
        elif isinstance(item, CustomCallOutput):
            events = [CallDone(type=kind, **place, input=item.input)]
        else:
            part = item.content[0]
            logprobs = part.logprobs if isinstance(part, OutputTextPart) else UNSET
            done = TextDone(type=kind, **place, text=part.text, logprobs=logprobs)
            events = [done, PartEvent(type="response.content_part.done", **place, part=part)]
        item.status = status
        return [*events, ItemEvent(type="response.output_item.done", output_index=self._index, item=item)]

    @property
    def _index(self) -> int:
        return len(self.output) - 1

    def _begin(self, item: AnyOutput) -> list[Event]:
        """Ends the open item and begins `item`, with its content part if it has one."""
        events = self.close()
        self.output.append(item)
        self._open = item
        # The events have copies, since they are encoded after later parts have changed the item.
        events.append(ItemEvent(type="response.output_item.added", output_index=self._index, item=replace(item)))
        part: OutputTextPart | ReasoningTextPart
        if isinstance(item, MessageOutput):
            part, item.content = OutputTextPart(), [OutputTextPart()]
        elif isinstance(item, ReasoningOutput):
            part, item.content = ReasoningTextPart(), [ReasoningTextPart()]
        else:
            return events
        added = PartEvent(type="response.content_part.added", item_id=item.id, output_index=self._index, part=part)
        return [*events, added]

    def _new_call(self, part: ParsedPart) -> CallOutput | CustomCallOutput:
        tool = self._tools.get(part.text, CalledTool(part.text))
        kind: type[CallOutput | CustomCallOutput] = CustomCallOutput if tool.is_custom else CallOutput
        call_id, self._input = _new_id("call") + part.call_id, InputReader()
        return kind(name=tool.name, id=_new_id(kind.prefix), call_id=call_id, namespace=tool.namespace or UNSET)

    def _add_arguments(self, text: str) -> list[Event]:
        call = self._open
        if isinstance(call, CallOutput):
            call.arguments += text
        else:
            assert isinstance(call, CustomCallOutput)
            text = self._input.add(text)
            call.input += text
        delta = CallDelta(type=f"{call.event}.delta", item_id=call.id, output_index=self._index, delta=text)
        return [delta] if text else []


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
