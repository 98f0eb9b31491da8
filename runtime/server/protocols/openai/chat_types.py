"""The body of a chat completion request, with every documented field.

Source: https://platform.openai.com/docs/api-reference/chat/create.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from plait.constrained.specs import MAX_REASONING_TOKENS
from plait.runtime.server.chat.template_settings import TemplateVariables
from plait.runtime.server.protocols.openai.fields import SamplingRequest
from plait.runtime.server.protocols.shared import StrictStruct, UnsupportedFields

ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.:-]{1,64}$")]


class TextPart(StrictStruct, tag_field="type", tag="text"):
    text: str


class RefusalPart(StrictStruct, tag_field="type", tag="refusal"):
    refusal: str


class FunctionCall(StrictStruct):
    name: str
    arguments: str


class AssistantToolCall(StrictStruct):
    """A tool call of an earlier answer."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"
    index: int | None = None


class SystemMessage(StrictStruct, tag_field="role", tag="system"):
    content: str | list[TextPart]
    name: str | None = None


class DeveloperMessage(StrictStruct, tag_field="role", tag="developer"):
    content: str | list[TextPart]
    name: str | None = None


class UserMessage(StrictStruct, tag_field="role", tag="user"):
    content: str | list[TextPart]
    name: str | None = None


class AssistantMessage(StrictStruct, tag_field="role", tag="assistant"):
    """An earlier answer, sent back. Fields that can only be null are those that this server never fills.

    `provider_specific_fields`: added to answers by litellm, and sent back by it; ignored.
    """

    content: str | list[TextPart | RefusalPart] | None = None
    tool_calls: list[AssistantToolCall] | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    name: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    provider_specific_fields: dict[str, Any] | None = None


class ToolMessage(StrictStruct, tag_field="role", tag="tool"):
    tool_call_id: str
    content: str | list[TextPart]
    name: str | None = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class Function(StrictStruct):
    """`parameters` is a JSON schema. The arguments fit it whether `strict` is set or not."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(StrictStruct, tag_field="type", tag="function"):
    function: Function


class FunctionName(StrictStruct):
    name: str


class NamedToolChoice(StrictStruct, tag_field="type", tag="function"):
    function: FunctionName


class AllowedTool(StrictStruct, tag_field="type", tag="function"):
    function: FunctionName


class AllowedTools(StrictStruct):
    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class AllowedToolsChoice(StrictStruct, tag_field="type", tag="allowed_tools"):
    allowed_tools: AllowedTools


class ReasoningField(StrictStruct):
    """OpenRouter's `reasoning`: the answer's constraint applies behind reasoning of at most `max_tokens` tokens."""

    enabled: bool = True
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_REASONING_TOKENS)] | None = None


class ChatRequest(SamplingRequest, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's chat completion request. The fields of `UNSUPPORTED_FIELDS` are refused but for the values there."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=1024)]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    enable_thinking: bool | None = None
    untagged_tool_calls: bool | None = None
    reasoning: ReasoningField | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    metadata: Any = None
    modalities: Any = None
    moderation: Any = None
    prediction: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    service_tier: Any = None
    store: Any = None
    verbosity: Any = None
    web_search_options: Any = None


UNSUPPORTED_FIELDS: UnsupportedFields = {
    "audio": (),
    "function_call": (),
    "functions": (),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory",),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
