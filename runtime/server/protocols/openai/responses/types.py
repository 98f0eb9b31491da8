"""The body of a `/v1/responses` request; `request_fields.py` has the fields that are not read.

Source: https://platform.openai.com/docs/api-reference/responses/create.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from plait.runtime.server.chat.conversation import Effort
from plait.runtime.server.chat.template_settings import TemplateVariables
from plait.runtime.server.generation.sampling_fields import sampling_fields
from plait.runtime.server.protocols.openai.chat_request import ToolName
from plait.runtime.server.protocols.openai.custom_tools import GrammarInput, TextInput
from plait.runtime.server.protocols.openai.fields import JsonObjectFormat, StreamOptions, TextFormat
from plait.runtime.server.protocols.shared import Priority, StrictStruct

MAX_TOOLS = 128


class InputText(StrictStruct, tag_field="type", tag="input_text"):
    text: str


class OutputText(StrictStruct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Refusal(StrictStruct, tag_field="type", tag="refusal"):
    refusal: str


class PlainText(StrictStruct, tag_field="type", tag="text"):
    text: str


Content = InputText | OutputText | Refusal | PlainText


class AnswerItem(StrictStruct, kw_only=True):
    """What items of answers have, which clients send back."""

    id: str | None = None
    status: str | None = None


class MessageItem(AnswerItem, tag_field="type", tag="message"):
    """A turn. `type` may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Content]
    phase: str | None = None


class DirectCaller(StrictStruct, tag_field="type", tag="direct"):
    """The model itself called."""


class OfCall(AnswerItem, kw_only=True):
    """A call or its output."""

    call_id: str
    caller: DirectCaller | None = None


class CallItem(OfCall, tag_field="type", tag="function_call"):
    name: str
    arguments: str
    namespace: str | None = None


class CallOutputItem(OfCall, tag_field="type", tag="function_call_output"):
    output: str | list[Content]
    name: str | None = None
    namespace: str | None = None


class CustomCallItem(OfCall, tag_field="type", tag="custom_tool_call"):
    name: str
    input: str
    namespace: str | None = None


class CustomCallOutputItem(OfCall, tag_field="type", tag="custom_tool_call_output"):
    output: str | list[Content]


class ReasoningText(StrictStruct, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryText(StrictStruct, tag_field="type", tag="summary_text"):
    text: str


class ReasoningItem(AnswerItem, tag_field="type", tag="reasoning"):
    """`content` is read. `encrypted_content` is another server's, which nobody else can read, and so is `summary`."""

    content: list[ReasoningText] | None = None
    summary: list[SummaryText] | None = None
    encrypted_content: str | None = None


LOGPROBS = "message.output_text.logprobs"
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class JsonSchemaFormat(StrictStruct, tag_field="type", tag="json_schema"):
    """A JSON value that fits `schema`, whether `strict` is set or not. `schemas`: the documents that it refers to."""

    name: ToolName
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    schemas: dict[str, dict[str, Any] | bool] | None = None


class TextConfig(StrictStruct):
    field_table: ClassVar[str] = "text"
    format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None


class ReasoningConfig(StrictStruct):
    field_table: ClassVar[str] = "reasoning"
    effort: Effort | None = None


class FunctionTool(StrictStruct, tag_field="type", tag="function"):
    name: ToolName
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class CustomTool(StrictStruct, tag_field="type", tag="custom"):
    """A tool with freeform input, which `format` constrains."""

    name: ToolName
    description: str | None = None
    format: TextInput | GrammarInput | None = None


class NamespaceTool(StrictStruct, tag_field="type", tag="namespace"):
    """Tools whose names are their own within the namespace."""

    name: ToolName
    tools: Annotated[list[FunctionTool | CustomTool], Meta(max_length=MAX_TOOLS)]
    description: str | None = None


Tool = FunctionTool | CustomTool | NamespaceTool


class AdditionalToolsItem(StrictStruct, tag_field="type", tag="additional_tools"):
    """Further tools of the request, as Codex sends them."""

    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
    role: Literal["developer"] = "developer"
    id: str | None = None


class ItemReference(StrictStruct, tag_field="type", tag="item_reference"):
    """Stands for a stored item; see `stored.py`."""

    id: str


Item = (
    MessageItem
    | CallItem
    | CallOutputItem
    | CustomCallItem
    | CustomCallOutputItem
    | ReasoningItem
    | AdditionalToolsItem
)


class NamedToolChoice(StrictStruct, tag_field="type", tag="function"):
    name: str
    namespace: str | None = None


class NamedCustomChoice(StrictStruct, tag_field="type", tag="custom"):
    name: str
    namespace: str | None = None


class AllowedToolsChoice(StrictStruct, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: list[NamedToolChoice | NamedCustomChoice]


class ResponsePrompt(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The prompt's fields: all of an `input_tokens` request, and part of a response request.

    `chat_template_kwargs` and `enable_thinking` are extensions.
    """

    field_table: ClassVar[str] = "input_tokens"
    model: str = "default"
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=1024)]
    instructions: str | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    tool_choice: (
        Literal["none", "auto", "required"] | NamedToolChoice | NamedCustomChoice | AllowedToolsChoice | None
    ) = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    enable_thinking: bool | None = None


if TYPE_CHECKING:
    _ResponsesSampling = ResponsePrompt
else:
    _ResponsesSampling = sampling_fields("responses", base=ResponsePrompt)


class ResponsesRequest(_ResponsesSampling, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's response request. `cache_salt` to `untagged_tool_calls` are extensions."""

    field_table: ClassVar[str] = "responses"
    model: str
    include: list[Include] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    top_p: float | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: Priority | None = None
    complete: bool | None = None
    compact: bool | None = None
    strict_formats: bool | None = None
    untagged_tool_calls: bool | None = None
