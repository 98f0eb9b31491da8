"""The bodies of Ollama's requests and answers.

Source: https://github.com/ollama/ollama/blob/main/docs/api.md and the types of the `ollama` package 0.6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from plait.runtime.server.chat.conversation import Effort
from plait.runtime.server.chat.template_settings import TemplateVariables
from plait.runtime.server.generation.cache_miss import CacheMissReport
from plait.runtime.server.generation.sampling_fields import sampling_fields
from plait.runtime.server.protocols.shared import ContentLogprob, ImportanceWeight, StrictStruct

SAMPLING_OF_REQUEST = ("logprobs", "top_logprobs")  # beside `options`, not in it

if TYPE_CHECKING:
    _OllamaSampling = msgspec.Struct
else:
    _OllamaSampling = sampling_fields("ollama", leave_out=SAMPLING_OF_REQUEST)


class OllamaOptions(_OllamaSampling, kw_only=True, forbid_unknown_fields=True):
    """Ollama's `options`."""

    field_table: ClassVar[str] = "options"
    num_ctx: Annotated[int, Meta(ge=1)] | None = None
    num_predict: Annotated[int, Meta(ge=-2)] | None = None
    temperature: float | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    repeat_penalty: float | None = None


class OllamaFunctionCall(StrictStruct):
    name: str
    arguments: dict[str, Any]
    index: int | None = None
    description: str | None = None


class OllamaToolCall(StrictStruct):
    function: OllamaFunctionCall
    id: str | None = None
    type: Literal["function"] | None = None


class Message(StrictStruct):
    """One turn. The turn of a tool has its name in `tool_name`."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Annotated[list[str], Meta(max_length=0)] | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ToolFunction(StrictStruct):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.:-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OllamaTool(StrictStruct):
    function: ToolFunction
    type: Literal["function"] | None = None


class OllamaRequestFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of chat and generate. `format`: "json", or a JSON schema that the answer fits.

    `keep_alive`: with several models, how long this one stays loaded without requests; a server with one model never
    unloads it, and refuses 0. `chat_template_kwargs` is an extension.
    """

    model: Annotated[str, Meta(min_length=1)]
    format: str | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    stream: bool | None = None
    keep_alive: float | str | None = None
    think: bool | Effort | None = None
    chat_template_kwargs: TemplateVariables | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class NamedTool(StrictStruct, tag_field="type", tag="function"):
    name: str


class OllamaChatRequest(OllamaRequestFields, kw_only=True, forbid_unknown_fields=True):
    """A conversation. Without messages the answer only says that the model is loaded.

    `tool_choice` is an extension. It, and the fields behind it for those that `options` does not have, are what the
    ai SDK's provider (`ollama-ai-provider-v2`) sends.
    """

    field_table: ClassVar[str] = "ollama_chat"
    messages: Annotated[list[Message], Meta(max_length=1024)] | None = None
    tools: Annotated[list[OllamaTool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None


class OllamaGenerateRequest(OllamaRequestFields, kw_only=True, forbid_unknown_fields=True):
    """A prompt. With `raw` it is continued as it is, and names of control tokens in it become control tokens, unless
    the server is set otherwise. With `suffix` the answer stands between the two, which are plain text without `raw`."""

    field_table: ClassVar[str] = "ollama_generate"
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None


class AnswerFunctionCall(msgspec.Struct):
    name: str
    arguments: Any


class AnswerToolCall(msgspec.Struct):
    function: AnswerFunctionCall


class OllamaMessage(msgspec.Struct):
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[AnswerToolCall] | UnsetType = UNSET
    role: Literal["assistant"] = "assistant"


class OllamaResponseFields(msgspec.Struct, kw_only=True):
    """An answer, or a line of a stream. Only the last line has counts, durations (in nanoseconds) and extensions:
    warnings, weight and cache_miss.
    """

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[ContentLogprob] | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET
    weight: ImportanceWeight | UnsetType = UNSET
    cache_miss: CacheMissReport | UnsetType = UNSET


class OllamaChat(OllamaResponseFields, kw_only=True):
    message: OllamaMessage


class OllamaGenerated(OllamaResponseFields, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET
