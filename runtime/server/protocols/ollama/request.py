"""Converts Ollama's requests to conversations and sampling parameters."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import replace

from plait.constrained.specs import JsonObject, JsonSchema, Spec
from plait.runtime.chat.parser import OutputParser
from plait.runtime.sampling_params import SamplingParams
from plait.runtime.server.chat.conversation import Conversation, Effort, Thinking, ToolCall, ToolDefinition, Turn
from plait.runtime.server.chat.engine import PreparedChat, prepare_chat
from plait.runtime.server.chat.template_settings import TemplateVariables, template_variables
from plait.runtime.server.chat.thinking import thinking_of
from plait.runtime.server.engines.served_model import ServedModel
from plait.runtime.server.errors import invalid, unsupported
from plait.runtime.server.fields.request_warnings import warn
from plait.runtime.server.generation.cache_miss import CacheMissReport
from plait.runtime.server.generation.raw_prompt import parses_special, with_suffix
from plait.runtime.server.generation.sampling_fields import read_sampling_params, sampling_fields
from plait.runtime.server.generation.submission import tokenize
from plait.runtime.server.protocols.shared import (
    ContentLogprob,
    ImportanceWeight,
    StrictStruct,
    build_constraint,
    build_tools,
    checked_tool_names,
    remaining_context,
    unnamed_choice,
)

# Ollama's defaults
TEMPERATURE, TOP_K, TOP_P = 0.8, 40, 0.9
# A unit ends every number but a lone one, so that a text is matched in one way only and backtracking is linear.
MAX_DURATION_CHARS = 10_000
_DURATION = re.compile(r"-?(?:[0-9]+(?:\.[0-9]+)?|(?:[0-9]+(?:\.[0-9]+)?(?:ns|us|µs|ms|s|m|h))+)")
_UNIT_S = {"": 1.0, "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
MAX_KEEP_ALIVE_S = 1e8  # three years


async def prepared_of(body: OllamaChatRequest | OllamaGenerateRequest, model: ServedModel) -> PreparedChat:
    """The prompt and the constraint. Raises ApiError 400 for values that are wrong or not supported."""
    client, constraint = model.client, _constraint(body.format)
    param = "format" if constraint is not None else None
    thinking, variables = _thinking(body.think), template_variables(body.chat_template_kwargs)
    if isinstance(body, OllamaChatRequest):
        tools = build_tools([tool.function for tool in body.tools or ()], "tools[{}].function")
        turns = tuple(_turns(body.messages or ()))
        names, must_call, one_call = _tool_choice(body, tools)
        conversation = Conversation(
            turns,
            tools,
            names,
            must_call,
            one_call,
            constraint=constraint,
            constraint_param=param,
            template_variables=variables,
            thinking=thinking,
        )
        return await prepare_chat(client, conversation, untagged_tool_calls=model.settings.untagged_tool_calls)
    prompt = body.prompt or ""
    if body.raw or body.suffix:
        if body.system:
            raise invalid("'system' has no place in a prompt without a template", "system")
        if body.chat_template_kwargs:
            raise invalid("'chat_template_kwargs' has no effect on a prompt without a template", "chat_template_kwargs")
        if body.think is not None:
            warn("think", "the prompt has no template")
        parts: Sequence[tuple[str, bool]] = [(prompt, bool(body.raw) and parses_special(model.settings))]
        if body.suffix:
            parts = with_suffix(parts, body.suffix, client.tokenizer.added_texts)
        ids = await tokenize(client, parts)
        return PreparedChat(ids, constraint, param, lambda: OutputParser(None, False))
    system = (Turn("system", body.system),) if body.system else ()
    conversation = Conversation(
        (*system, Turn("user", prompt)),
        constraint=constraint,
        constraint_param=param,
        template_variables=variables,
        thinking=thinking,
    )
    return await prepare_chat(client, conversation)


def _tool_choice(body: OllamaChatRequest, tools: Sequence[ToolDefinition]) -> tuple[frozenset[str] | None, bool, bool]:
    """(names of tools that may be called, None for all; whether a call is required; whether only one is allowed)"""
    choice = body.tool_choice
    if tools and isinstance(choice, NamedTool):
        return checked_tool_names([choice.name], tools, "tool_choice.name"), True, True
    return unnamed_choice(choice, has_tools=bool(tools))


def _thinking(think: bool | Effort | None) -> Thinking:
    """The reasoning, which the answer has unless `think` is false."""
    if isinstance(think, bool):
        return Thinking("think", think, is_shown=think)
    return Thinking() if think is None else thinking_of("think", think)


def sampling_of(body: OllamaRequestFields, context_length: int, prompt_ids: Sequence[int]) -> SamplingParams:
    """The checked sampling parameters, with Ollama's defaults."""
    options = _options(body)
    check_num_ctx(options, context_length)
    context_left = remaining_context(
        context_length, prompt_ids, "messages" if isinstance(body, OllamaChatRequest) else "prompt"
    )
    max_tokens = options.num_predict
    return read_sampling_params(
        options,
        "ollama",
        path="options",
        top_level=SAMPLING_OF_REQUEST,
        max_tokens=context_left if max_tokens is None or max_tokens < 0 else max_tokens,
        temperature=TEMPERATURE if options.temperature is None else options.temperature,
        top_k=TOP_K if options.top_k is None else options.top_k or -1,
        top_p=TOP_P if options.top_p is None else options.top_p,
        seed=options.seed if options.seed is not None and options.seed >= 0 else None,
        stop=options.stop or None,
        logprobs=bool(body.logprobs),
        top_logprobs=body.top_logprobs,
    )


def _options(body: OllamaRequestFields) -> OllamaOptions:
    """The options, with those of the top level of a chat request that they do not have."""
    options = body.options or OllamaOptions()
    if not isinstance(body, OllamaChatRequest):
        return options
    above = {"temperature": body.temperature, "top_p": body.top_p, "num_predict": body.max_output_tokens}
    return replace(options, **{name: value for name, value in above.items() if getattr(options, name) is None})


def check_num_ctx(options: OllamaOptions, context_length: int) -> None:
    """Raises ApiError 400 for `num_ctx` above `context_length`."""
    if options.num_ctx is not None and options.num_ctx > context_length:
        text = f"'num_ctx' is {options.num_ctx}, above the context length of {context_length} tokens"
        raise invalid(text, "options.num_ctx")


def keep_alive_of(duration: float | str | None, can_unload: bool) -> float | None:
    """`keep_alive` in seconds, infinity for a negative one; None without one.

    Raises ApiError 400 for what is no duration, and for 0, which unloads the model, unless the server `can_unload`.
    """
    if duration is None:
        return None
    if isinstance(duration, str) and (len(duration) > MAX_DURATION_CHARS or not _DURATION.fullmatch(duration)):
        raise invalid("'keep_alive' is a number of seconds, or a duration such as 5m", "keep_alive")
    seconds = _seconds(duration) if isinstance(duration, str) else float(duration)
    if seconds == 0 and not can_unload:
        raise unsupported("keep_alive", "cannot be 0: this server does not unload its model")
    return math.inf if seconds < 0 or seconds > MAX_KEEP_ALIVE_S else seconds


def _seconds(duration: str) -> float:
    """
    >>> _seconds("1h30m"), _seconds("-1"), _seconds("100ms")
    (5400.0, -1.0, 0.1)
    """
    text = duration.removeprefix("-")
    parts = re.findall(r"([0-9.]+)(ns|us|µs|ms|s|m|h|)", text)
    seconds = sum(float(number) * _UNIT_S[unit] for number, unit in parts)
    return -seconds if duration.startswith("-") else seconds


def _constraint(format: str | dict[str, Any] | None) -> Spec | None:
    if format in (None, ""):
        return None
    if format == "json":
        return JsonObject()
    if isinstance(format, str):
        raise invalid("'format' must be json or a JSON schema", "format")
    constraint: Spec = build_constraint("format", JsonSchema, format, annotations=True)
    return constraint


def _turns(messages: Sequence[Message]) -> list[Turn]:
    """The turns. Ollama's calls have no ids: a tool's turn answers the first open call, of its name if it has one."""
    turns: list[Turn] = []
    open_calls: defaultdict[str | None, dict[str, ToolCall]] = defaultdict(dict)  # {name, or None for all: {id: call}}
    for index, message in enumerate(messages):
        text = message.content or ""
        if message.tool_calls and message.role != "assistant":
            raise invalid("only an assistant's message has tool calls", f"messages[{index}].tool_calls")
        if message.role == "tool":
            call = next(iter(open_calls[message.tool_name].values()), None)
            if call is None:
                raise invalid(
                    f"'messages[{index}]' answers no tool call of the messages before it", f"messages[{index}]"
                )
            del open_calls[None][call.id], open_calls[call.name][call.id]
            turns.append(Turn("tool", text, call_id=call.id, name=call.name))
            continue
        calls = [
            ToolCall(f"call_{index}_{number}", called.function.name, called.function.arguments)
            for number, called in enumerate(message.tool_calls or ())
        ]
        for call in calls:
            open_calls[None][call.id] = open_calls[call.name][call.id] = call
        turns.append(Turn(message.role, text, tuple(calls), message.thinking))
    return turns


# -- types ----------------------------------------------------------------------------------------
# The bodies of Ollama's requests and answers.
#
# Source: https://github.com/ollama/ollama/blob/main/docs/api.md and the types of the `ollama` package 0.6.

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
