"""OpenAI's response object and its output items. Fields are encoded in the order in which they are declared.

Source: https://platform.openai.com/docs/api-reference/responses/object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from plait.runtime.call_reports import Usage
from plait.runtime.server.chat.conversation import Effort
from plait.runtime.server.generation.cache_miss import CacheMissReport
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
    """An item of the answer; `type` is message, reasoning, function_call or custom_tool_call.

    prefix: of its ids. event: the beginning of the names of the events that add to it.
    """

    prefix: ClassVar[str]
    event: ClassVar[str]


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
