"""Ollama's requests as conversations and sampling parameters.

Knows: Ollama's fields and their defaults. Must not know: templates, answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from plait.constrained.specs import GrammarError, JsonObject, JsonSchema, Spec
from plait.runtime.client.client import Client
from plait.runtime.sampling_params import SamplingParams
from plait.runtime.server.chat.conversation import NO_PARAMETERS, Conversation, ToolCall, ToolDefinition, Turn
from plait.runtime.server.chat.engine import PreparedChat, prepare_chat
from plait.runtime.server.chat.formats import reasoning_format
from plait.runtime.server.chat.parser import OutputParser
from plait.runtime.server.errors import ApiError, invalid, unsupported
from plait.runtime.server.generation.sampling_fields import sampling_params_from_fields
from plait.runtime.server.generation.submission import tokenize
from plait.runtime.server.protocols.ollama.types import (
    UNSUPPORTED_FIELDS,
    UNSUPPORTED_OPTIONS,
    Message,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaOptions,
    OllamaRequestFields,
)
from plait.runtime.server.protocols.openai.fields import check_unsupported, remaining_context

# Ollama's own, where a request says nothing
TEMPERATURE, TOP_K, TOP_P = 0.8, 40, 0.9


async def prepared_of(body: OllamaChatRequest | OllamaGenerateRequest, client: Client) -> PreparedChat:
    """The prompt and what the answer must be. Raises ApiError for what is wrong or not supported."""
    constraint = _constraint(body.format)
    param = "format" if constraint is not None else None
    if isinstance(body, OllamaChatRequest):
        tools = tuple(_tools(body))
        turns = tuple(_turns(body.messages or ()))
        return await prepare_chat(client, Conversation(turns, tools, constraint=constraint, constraint_param=param))
    check_unsupported(body, UNSUPPORTED_FIELDS)
    prompt = body.prompt or ""
    if body.raw:
        if body.system:
            raise invalid("'system' has no place in a raw prompt", "system")
        ids = await tokenize(client, [(prompt, True)])
        return PreparedChat(ids, constraint, param, lambda: OutputParser(None, False))
    system = (Turn("system", body.system),) if body.system else ()
    conversation = Conversation((*system, Turn("user", prompt)), constraint=constraint, constraint_param=param)
    return await prepare_chat(client, conversation)


def sampling_of(body: OllamaRequestFields, context_length: int, prompt_ids: Sequence[int]) -> SamplingParams:
    """Checked; what is not said is Ollama's default."""
    options = body.options or OllamaOptions()
    check_options(options, UNSUPPORTED_OPTIONS, context_length)
    context_left = remaining_context(
        context_length, prompt_ids, "messages" if isinstance(body, OllamaChatRequest) else "prompt"
    )
    max_tokens = options.num_predict
    return sampling_params_from_fields(
        {"max_tokens": "num_predict"},
        "options",
        top_level=("logprobs", "top_logprobs"),
        max_tokens=context_left if max_tokens is None or max_tokens < 0 else max_tokens,
        temperature=TEMPERATURE if options.temperature is None else options.temperature,
        top_k=TOP_K if options.top_k is None else options.top_k or -1,
        top_p=TOP_P if options.top_p is None else options.top_p,
        min_p=options.min_p,
        seed=options.seed if options.seed is not None and options.seed >= 0 else None,
        stop=options.stop or None,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logprobs=bool(body.logprobs),
        top_logprobs=body.top_logprobs,
    )


def check_options(options: OllamaOptions, refused: dict[str, tuple[Any, ...]], context_length: int) -> None:
    """ApiError for an option that is in `refused` and has another value than it may, or a context that does not fit."""
    try:
        check_unsupported(options, refused)
    except ApiError as error:
        error.param = f"options.{error.param}"
        raise
    if options.num_ctx is not None and options.num_ctx > context_length:
        text = f"'num_ctx' is {options.num_ctx}; the context holds {context_length} tokens"
        raise invalid(text, "options.num_ctx")


def shows_thinking(body: OllamaRequestFields, client: Client) -> bool:
    """Whether reasoning is told. ApiError where it is asked for and the model has none."""
    if isinstance(body.think, str):
        raise unsupported("think", "can only be true or false on this server")
    template = client.tokenizer.chat_template
    if body.think and (template is None or reasoning_format(template.source) is None):
        raise unsupported("think", "is not supported: this model does not mark reasoning")
    return body.think is not False


def check_keep_alive(given: float | str | None) -> None:
    """The model stays in memory; to be unloaded is the one wish that is not granted."""
    if isinstance(given, str) and not re.fullmatch(r"-?([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h)?)+", given):
        raise invalid("'keep_alive' is a number of seconds, or a duration such as 5m", "keep_alive")
    if given is not None and re.fullmatch(r"-?[0.]+[a-zµ]*", str(given)):
        raise unsupported("keep_alive", "cannot be 0: this server does not unload its model")


def _constraint(format: str | dict[str, Any] | None) -> Spec | None:
    if format in (None, ""):
        return None
    if format == "json":
        return JsonObject()
    if isinstance(format, str):
        raise invalid("'format' is json or a JSON schema", "format")
    try:
        return JsonSchema(format, annotations=True)
    except GrammarError as error:
        raise invalid(f"'format': {error}", "format", "invalid_constraint") from None


def _tools(body: OllamaChatRequest) -> list[ToolDefinition]:
    tools: list[ToolDefinition] = []
    for index, given in enumerate(body.tools or ()):
        function = given.function
        if any(tool.name == function.name for tool in tools):
            raise invalid(f"two tools are called '{function.name}'", f"tools[{index}].function.name")
        parameters = NO_PARAMETERS if function.parameters is None else function.parameters
        param = f"tools[{index}].function.parameters"
        tools.append(ToolDefinition(function.name, function.description or "", parameters, param))
    return tools


def _turns(messages: Sequence[Message]) -> list[Turn]:
    """Ollama's calls have no ids: a tool's turn answers the first call of its name, or the first, not yet answered."""
    turns: list[Turn] = []
    waiting: list[ToolCall] = []
    for index, message in enumerate(messages):
        text = message.content or ""
        if message.tool_calls and message.role != "assistant":
            raise invalid("only an assistant's message has tool calls", f"messages[{index}].tool_calls")
        if message.role == "tool":
            named = [call for call in waiting if message.tool_name in (None, call.name)]
            if not named:
                raise invalid(
                    f"'messages[{index}]' answers no tool call of the messages before it", f"messages[{index}]"
                )
            waiting.remove(named[0])
            turns.append(Turn("tool", text, call_id=named[0].id, name=named[0].name))
            continue
        calls = [
            ToolCall(f"call_{index}_{at}", call.function.name, json.dumps(call.function.arguments, ensure_ascii=False))
            for at, call in enumerate(message.tool_calls or ())
        ]
        waiting += calls
        turns.append(Turn(message.role, text, tuple(calls), message.thinking))
    return turns
