"""The body of a messages request; `request_fields.py` has the fields that are not read.

Source: https://docs.anthropic.com/en/api/messages and the types of the `anthropic` package 2.12.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from plait.constrained.specs import MAX_REASONING_TOKENS
from plait.runtime.server.chat.conversation import Effort
from plait.runtime.server.chat.template_settings import TemplateVariables
from plait.runtime.server.generation.sampling_fields import sampling_fields
from plait.runtime.server.protocols.shared import StrictStruct

MAX_MESSAGES = 1024
MAX_TOOLS = 128

ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]


class CacheControl(StrictStruct):
    """Accepted and ignored: all prefixes are cached, for each API key apart."""

    type: Literal["ephemeral"]
    scope: str | None = None
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(StrictStruct, tag_field="type", tag="text"):
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any], Meta(max_length=0)] | None = None


class ThinkingBlock(StrictStruct, tag_field="type", tag="thinking"):
    """Reasoning of an earlier answer. This server's signatures are empty."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(StrictStruct, tag_field="type", tag="redacted_thinking"):
    """Reasoning that only Anthropic's servers can read; left out, with a warning."""

    data: str


class DirectCaller(StrictStruct):
    type: Literal["direct"]


class ToolUseBlock(StrictStruct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: DirectCaller | None = None
    toolset_name: None = None


class ToolResultBlock(StrictStruct, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: None = None


class SystemMessage(StrictStruct, tag_field="role", tag="system"):
    content: str | list[TextBlock]


class UserMessage(StrictStruct, tag_field="role", tag="user"):
    content: str | list[TextBlock | ToolResultBlock]


class AssistantMessage(StrictStruct, tag_field="role", tag="assistant"):
    content: str | list[TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock]


Message = SystemMessage | UserMessage | AssistantMessage


class AnthropicTool(StrictStruct):
    """A tool that the client runs. The input fits `input_schema` whether `strict` is set or not."""

    name: ToolName
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: Literal[True] | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class AutoChoice(StrictStruct, tag_field="type", tag="auto"):
    disable_parallel_tool_use: bool | None = None


class AnyChoice(StrictStruct, tag_field="type", tag="any"):
    disable_parallel_tool_use: bool | None = None


class ToolChoice(StrictStruct, tag_field="type", tag="tool"):
    name: str
    disable_parallel_tool_use: bool | None = None


class NoneChoice(StrictStruct, tag_field="type", tag="none"):
    """No tool may be used."""


class ThinkingAdaptive(StrictStruct, tag_field="type", tag="adaptive"):
    display: Literal["summarized", "omitted"] | None = None


class ThinkingEnabled(StrictStruct, tag_field="type", tag="enabled"):
    budget_tokens: Annotated[int, Meta(ge=0, le=MAX_REASONING_TOKENS)]
    display: Literal["summarized", "omitted"] | None = None


class ThinkingBetweenTools(StrictStruct, tag_field="type", tag="between_tools"):
    """Reasoning between tool uses."""


class ThinkingDisabled(StrictStruct, tag_field="type", tag="disabled"):
    """No reasoning in the answer."""


Thinking = ThinkingAdaptive | ThinkingEnabled | ThinkingBetweenTools | ThinkingDisabled


class JsonFormat(StrictStruct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(StrictStruct):
    """`format`: the answer is JSON that fits the schema. `effort`: of `thinking`."""

    format: JsonFormat | None = None
    effort: Effort | None = None


class Metadata(StrictStruct):
    """Accepted and ignored."""

    user_id: str | None = None


class PromptFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The prompt's fields: all of a `count_tokens` request, and part of a messages request.

    `chat_template_kwargs` is an extension.
    """

    field_table: ClassVar[str] = "count_tokens"
    model: str
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AutoChoice | AnyChoice | ToolChoice | NoneChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    chat_template_kwargs: TemplateVariables | None = None


if TYPE_CHECKING:
    _MessagesSampling = PromptFields
else:
    _MessagesSampling = sampling_fields("anthropic", base=PromptFields)


class MessagesRequest(_MessagesSampling, kw_only=True, forbid_unknown_fields=True):
    """Anthropic's messages request. `untagged_tool_calls` is an extension."""

    field_table: ClassVar[str] = "messages"
    max_tokens: Annotated[int, Meta(ge=0, le=1 << 20)]
    stop_sequences: list[str] | None = None
    untagged_tool_calls: bool | None = None
    stream: bool | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    metadata: Metadata | None = None
