"""What OpenAI's endpoints share: sampling fields, constraints, usage, and fields that are known but refused.

Knows: names and meanings of OpenAI's fields and of our extras. Must not know: routes, sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from plait.constrained.specs import (
    Choices,
    Ebnf,
    GrammarError,
    JsonObject,
    JsonSchema,
    Lark,
    Regex,
    Spec,
)
from plait.runtime import messages
from plait.runtime.sampling_params import SamplingParams, sampling_params
from plait.runtime.server.chat.conversation import ToolDefinition
from plait.runtime.server.errors import ApiError, context_limit_message, invalid, unsupported


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of every request that samples. The second half are extras of ours, under the names others use."""

    model: str
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    n: int | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    regex: str | None = None
    ebnf: str | None = None
    lark: str | None = None
    choices: list[str] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout: float | None = None
    complete: bool | None = None
    compact: bool | None = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`include_usage`: a last chunk with the usage. Obfuscation is never added."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Schema(msgspec.Struct, forbid_unknown_fields=True):
    """A named JSON schema; `strict` or not, the answer fits it."""

    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Free text."""


class JsonObjectFormat(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """A JSON value that fits the schema."""

    json_schema: Schema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


def sampling_of(
    body: SamplingFields, *, max_tokens: int, logprobs: bool = False, top_logprobs: int = 0
) -> SamplingParams:
    """The request's sampling parameters, checked. InputError names the field."""
    return sampling_params(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        stop_regex=body.stop_regex,
        ignore_eos=body.ignore_eos,
        seed=body.seed,
        logit_bias=_bias(body.logit_bias),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        timeout_s=body.timeout,
    )


def _bias(given: dict[str, float] | None) -> dict[int, float] | None:
    if given is None:
        return None
    try:
        return {int(token): value for token, value in given.items() if len(token) < 10 or _no_token(token)}
    except ValueError:
        raise invalid("the keys of 'logit_bias' are token ids", "logit_bias") from None


def _no_token(text: str) -> bool:
    raise ValueError(text)


def checked_count(n: int | None, max_count: int, *, name: str = "n") -> int:
    """How many answers are wanted."""
    if n is not None and not 1 <= n <= max_count:
        raise invalid(f"'{name}' must be from 1 to {max_count}, not {n}", name)
    return n or 1


def constraint_of(body: SamplingFields) -> tuple[Spec | None, str | None]:
    """What the answer must fit, and the parameter that says so. At most one may."""
    found: list[tuple[str, Spec]] = []
    for name, kind in (("regex", Regex), ("ebnf", Ebnf), ("lark", Lark)):
        text = getattr(body, name)
        if text is not None:
            found.append((name, build_constraint(name, kind, text)))
    if body.choices is not None:
        found.append(("choices", build_constraint("choices", Choices, tuple(body.choices))))
    if isinstance(body.response_format, JsonObjectFormat):
        found.append(("response_format", JsonObject(compact=bool(body.compact))))
    elif isinstance(body.response_format, JsonSchemaFormat):
        param = "response_format.json_schema.schema"
        schema_format = body.response_format.json_schema
        options = {"annotations": not schema_format.strict, "compact": bool(body.compact)}
        found.append((param, build_constraint(param, JsonSchema, schema_format.schema or {}, **options)))
    if len(found) > 1:
        raise invalid(f"'{found[0][0]}' and '{found[1][0]}' cannot both constrain the answer", found[1][0])
    return (found[0][1], found[0][0]) if found else (None, None)


def build_constraint(param: str, kind: Any, *arguments: Any, **named: Any) -> Any:
    """`kind(...)`, a constraint; what it refuses is a 400 that names `param`."""
    try:
        return kind(*arguments, **named)
    except GrammarError as error:
        raise invalid(f"'{param}': {error}", param, "invalid_constraint") from None


def checked_tool_names(names: Sequence[str], tools: Sequence[ToolDefinition], param: str) -> frozenset[str]:
    """The names, if each is one of the tools'."""
    for name in names:
        if all(tool.name != name for tool in tools):
            raise invalid(f"'{param}' names '{name[:100]}', which is none of the tools", param)
    if not names:
        raise invalid(f"'{param}' is empty", param)
    return frozenset(names)


def check_unsupported(body: msgspec.Struct, allowed: dict[str, tuple[Any, ...]]) -> None:
    """Raises for a documented field that has a value other than null and those in `allowed`."""
    for name, values in allowed.items():
        value = getattr(body, name)
        if value is not None and value not in values:
            said = " or ".join(msgspec.json.encode(each).decode() for each in values)
            raise unsupported(
                name, f"can only be {said} on this server" if values else "is not supported by this server"
            )


def usage_body(usage: messages.Usage) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def remaining_context(context_length: int, prompt: Sequence[int], param: str) -> int:
    """The tokens an answer can have. ApiError when the prompt alone fills the context."""
    if len(prompt) >= context_length:
        text = f"{context_limit_message(context_length)}, the answer included; the prompt has {len(prompt)}"
        raise ApiError(400, text, param=param, code="context_length_exceeded")
    return context_length - len(prompt)


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class UsageBody(msgspec.Struct):
    """Tokens of the prompt, counted once however many answers it has, and of all answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


FinishReason = Literal["stop", "length", "tool_calls"]
