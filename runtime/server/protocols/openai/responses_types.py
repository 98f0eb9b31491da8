"""The body of a `/v1/responses` request, with every documented field.

Source: https://platform.openai.com/docs/api-reference/responses/create.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from plait.runtime.server.chat.template_settings import TemplateVariables
from plait.runtime.server.generation.sampling_fields import sampling_fields
from plait.runtime.server.protocols.openai.chat_types import ToolName
from plait.runtime.server.protocols.shared import Priority, StrictStruct, UnsupportedFields


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


class MessageItem(StrictStruct, tag_field="type", tag="message"):
    """A turn. `type` may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Content]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class CallItem(StrictStruct, tag_field="type", tag="function_call"):
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None
    caller: None = None
    namespace: None = None


class CallOutputItem(StrictStruct, tag_field="type", tag="function_call_output"):
    call_id: str
    output: str | list[Content]
    id: str | None = None
    status: str | None = None


class ReasoningText(StrictStruct, tag_field="type", tag="reasoning_text"):
    text: str


class ReasoningItem(StrictStruct, tag_field="type", tag="reasoning"):
    id: str | None = None
    content: list[ReasoningText] | None = None
    summary: list[Any] | None = None
    encrypted_content: None = None
    status: str | None = None


Item = MessageItem | CallItem | CallOutputItem | ReasoningItem


class TextFormat(StrictStruct, tag_field="type", tag="text"):
    """Free text."""


class JsonObjectFormat(StrictStruct, tag_field="type", tag="json_object"):
    """Any JSON object."""


class JsonSchemaFormat(StrictStruct, tag_field="type", tag="json_schema"):
    """A JSON value that fits `schema`, whether `strict` is set or not."""

    name: ToolName
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextConfig(StrictStruct):
    format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    verbosity: Literal["medium"] | None = None


class FunctionTool(StrictStruct, tag_field="type", tag="function"):
    name: ToolName
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class NamedToolChoice(StrictStruct, tag_field="type", tag="function"):
    name: str


class AllowedToolsChoice(StrictStruct, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: list[NamedToolChoice]


class StreamOptions(StrictStruct):
    include_obfuscation: Literal[False] | None = None


if TYPE_CHECKING:
    _ResponsesSampling = msgspec.Struct
else:
    _ResponsesSampling = sampling_fields("responses")


class ResponsesRequest(_ResponsesSampling, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's response request. `cache_salt` to `strict_formats` are extensions."""

    model: str
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=1024)]
    instructions: str | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    parallel_tool_calls: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    text: TextConfig | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=128)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    top_p: float | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: Priority | None = None
    complete: bool | None = None
    compact: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    enable_thinking: bool | None = None
    strict_formats: bool | None = None
    untagged_tool_calls: bool | None = None
    access_programs: Any = None
    background: Any = None
    background_options: Any = None
    context_management: Any = None
    conversation: Any = None
    image: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    reasoning: Any = None
    service_tier: Any = None
    store: Any = None
    truncation: Any = None


UNSUPPORTED_FIELDS: UnsupportedFields = {
    "access_programs": (),
    "background": (False,),
    "background_options": (),
    "context_management": (),
    "conversation": (),
    "image": (),
    "max_tool_calls": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory",),
    "reasoning": ({},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "truncation": ("disabled",),
}
