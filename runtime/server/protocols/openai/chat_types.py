"""The body of a chat completion request; `request_fields.py` has the fields that are not read.

Source: https://platform.openai.com/docs/api-reference/chat/create.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from plait.constrained.specs import MAX_REASONING_TOKENS
from plait.runtime.server.chat.conversation import Effort
from plait.runtime.server.chat.template_settings import TemplateVariables
from plait.runtime.server.protocols.openai.custom_tools import Grammar, TextInput
from plait.runtime.server.protocols.openai.fields import SamplingRequest
from plait.runtime.server.protocols.shared import StrictStruct

ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.:-]{1,64}$")]


class TextPart(StrictStruct, tag_field="type", tag="text"):
    """`cache_control`: sent by gateways for Anthropic's models; ignored, since all prefixes are cached."""

    text: str
    cache_control: dict[str, Any] | None = None


class RefusalPart(StrictStruct, tag_field="type", tag="refusal"):
    refusal: str


class FunctionCall(StrictStruct):
    name: str
    arguments: str


class EarlierFunctionCall(FunctionCall):
    """`parsed_arguments`: added to answers by the `parse` of OpenAI's client, and sent back by it; ignored."""

    parsed_arguments: Any = None


class CustomCall(StrictStruct):
    name: str
    input: str


class AssistantToolCall(StrictStruct):
    """A tool call of an earlier answer, with what its type names."""

    id: str
    function: EarlierFunctionCall | None = None
    type: Literal["function", "custom"] = "function"
    index: int | None = None
    custom: CustomCall | None = None


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

    `reasoning`: another name of `reasoning_content`. `provider_specific_fields`: added to answers by litellm, and sent
    back by it; ignored, as are the `reasoning_details` of OpenRouter and the `parsed` of OpenAI's client.
    """

    content: str | list[TextPart | RefusalPart] | None = None
    tool_calls: list[AssistantToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    reasoning_details: list[Any] | None = None
    refusal: str | None = None
    name: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    parsed: Any = None
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


class GrammarFormat(StrictStruct, tag_field="type", tag="grammar"):
    """A text of the grammar."""

    grammar: Grammar


class Custom(StrictStruct):
    """A tool with freeform input, which `format` constrains."""

    name: ToolName
    description: str | None = None
    format: TextInput | GrammarFormat | None = None


class CustomTool(StrictStruct, tag_field="type", tag="custom"):
    custom: Custom


class FunctionName(StrictStruct):
    name: str


class NamedToolChoice(StrictStruct, tag_field="type", tag="function"):
    function: FunctionName


class NamedCustomChoice(StrictStruct, tag_field="type", tag="custom"):
    custom: FunctionName


class AllowedTools(StrictStruct):
    mode: Literal["auto", "required"]
    tools: list[NamedToolChoice | NamedCustomChoice]


class AllowedToolsChoice(StrictStruct, tag_field="type", tag="allowed_tools"):
    allowed_tools: AllowedTools


class ReasoningField(StrictStruct):
    """OpenRouter's `reasoning`: reasoning of at most `max_tokens` tokens, or as many as `effort` gives. A constraint on
    the answer applies behind it. `exclude`: the answer has no `reasoning_content`."""

    enabled: bool = True
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_REASONING_TOKENS)] | None = None
    effort: Effort | None = None
    exclude: bool = False


class ThinkingField(StrictStruct):
    """`thinking` as DeepSeek, GLM and Kimi have it in chat completions, and as LiteLLM sends it."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Annotated[int, Meta(ge=0, le=MAX_REASONING_TOKENS)] | None = None


class ChatRequest(SamplingRequest, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's chat completion request."""

    field_table: ClassVar[str] = "chat"
    messages: Annotated[list[Message], Meta(min_length=1, max_length=1024)]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: Annotated[list[FunctionTool | CustomTool], Meta(max_length=128)] | None = None
    tool_choice: (
        Literal["none", "auto", "required"] | NamedToolChoice | NamedCustomChoice | AllowedToolsChoice | None
    ) = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    enable_thinking: bool | None = None
    untagged_tool_calls: bool | None = None
    reasoning: ReasoningField | None = None
    thinking: ThinkingField | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
