"""What several protocols need: strict structs, constraints, tools, counts and logprobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from plait.constrained.specs import GrammarError
from plait.runtime.call_reports import TokenLogprob
from plait.runtime.client.call import CallResult
from plait.runtime.client.client import Client
from plait.runtime.messages import MAX_PRIORITY
from plait.runtime.server.chat.conversation import NO_PARAMETERS, ToolDefinition
from plait.runtime.server.errors import ApiError, context_limit_message, invalid
from plait.runtime.server.generation.cache_miss import CacheMissReport, cache_miss_report
from plait.runtime.server.generation.logprobs import MIN_LOGPROB
from plait.runtime.server.http.response import encoded

Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]


class StrictStruct(msgspec.Struct, forbid_unknown_fields=True):
    """Base of the parts of a request: an unknown field is an error."""


# -- checks of requests ---------------------------------------------------------------------------


def checked_count(n: int | None, max_count: int, *, name: str = "n") -> int:
    """The number of answers; null is one. Raises ApiError 400 unless it is from 1 to `max_count`."""
    if n is not None and not 1 <= n <= max_count:
        raise invalid(f"'{name}' must be from 1 to {max_count}, not {n}", name)
    return n or 1


def timeout_of(body: msgspec.Struct | None) -> float | None:
    """The field `timeout` of a request whose sampling fields are made from the table of parameters."""
    timeout_s: float | None = getattr(body, "timeout", None)
    return timeout_s


def remaining_context(context_length: int, prompt: Sequence[int], param: str) -> int:
    """The number of tokens that an answer can have. Raises ApiError 400 if the prompt alone fills the context."""
    if len(prompt) >= context_length:
        text = f"{context_limit_message(context_length)}, the answer included; the prompt has {len(prompt)}"
        raise ApiError(400, text, param=param, code="context_length_exceeded")
    return context_length - len(prompt)


def check_token_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises ApiError 400 for a token id outside the vocabulary."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise invalid(f"'{param}' has a token id that is not from 0 to {vocab_size - 1}", param)


def token_lists(ids: list[int | list[int]], param: str) -> list[list[int]]:
    """One list of token ids for each text. Raises ApiError 400 for a mix of ids and lists.

    >>> token_lists([1, 2], "tokens"), token_lists([[1], [2]], "tokens")
    ([[1, 2]], [[1], [2]])
    """
    kinds = set(map(type, ids))
    if len(kinds) > 1:
        raise invalid(f"'{param}' mixes token ids with lists of them", param)
    lists: Any = ids if kinds == {list} else [ids]
    return list(lists)


def build_constraint(param: str, kind: Any, *arguments: Any, **options: Any) -> Any:
    """`kind(...)`, a constraint. Raises ApiError 400 that names `param` where it cannot be used."""
    try:
        return kind(*arguments, **options)
    except GrammarError as error:
        raise invalid(f"'{param}': {error}", param, "invalid_constraint") from None


# -- tools ----------------------------------------------------------------------------------------


def build_tools(functions: Iterable[Any], path: str, schema_field: str = "parameters") -> tuple[ToolDefinition, ...]:
    """Tool definitions from a protocol's structs; see `tool_definition`.

    `path`: JSON path of the struct of tool {}, such as "tools[{}].function". Raises ApiError 400 for a repeated name.
    """
    places = [(path.format(index), function) for index, function in enumerate(functions)]
    return distinct_tools([(place, tool_definition(function, place, schema_field)) for place, function in places])


def tool_definition(function: Any, place: str, schema_field: str = "parameters") -> ToolDefinition:
    """The definition of a function from a struct at `place` with `name`, `description`, `schema_field` and, if any,
    `strict`."""
    schema = getattr(function, schema_field)
    return ToolDefinition(
        function.name,
        function.description or "",
        NO_PARAMETERS if schema is None else schema,
        f"{place}.{schema_field}",
        bool(getattr(function, "strict", None)),
    )


def distinct_tools(tools: Iterable[tuple[str, ToolDefinition]]) -> tuple[ToolDefinition, ...]:
    """The tools of pairs (place of a tool's struct, tool). Raises ApiError 400 for a repeated name."""
    found: dict[str, ToolDefinition] = {}
    for place, tool in tools:
        if tool.name in found:
            raise invalid(f"two tools are called '{tool.name}'", f"{place}.name")
        found[tool.name] = tool
    return tuple(found.values())


def checked_tool_names(names: Sequence[str], tools: Sequence[ToolDefinition], param: str) -> frozenset[str]:
    """The names. Raises ApiError 400 if there are none, or one is not the name of a tool."""
    known = {tool.name for tool in tools}
    for name in names:
        if name not in known:
            raise invalid(f"'{param}' names '{name[:100]}', which is none of the tools", param)
    if not names:
        raise invalid(f"'{param}' is empty", param)
    return frozenset(names)


def unnamed_choice(choice: object, *, has_tools: bool) -> tuple[frozenset[str] | None, bool, bool]:
    """What `tool_choice` none, auto (None) or required means: (names of tools that may be called, None for all; whether
    a call is required; whether only one is allowed). Raises ApiError 400 for any other choice without tools.

    >>> unnamed_choice("required", has_tools=True)
    (None, True, False)
    """
    if not has_tools and choice not in (None, "none", "auto"):
        raise invalid("'tool_choice' needs 'tools'", "tool_choice")
    return None if has_tools and choice != "none" else frozenset(), choice == "required", False


# -- weights of drawn values ----------------------------------------------------------------------


class ImportanceWeight(msgspec.Struct):
    """How a value with `particles` or `exact` was drawn: an extension field of an answer. Natural logarithms.

    log_weight: of the probability that unconstrained text is a valid value: with `particles` an unbiased estimate Z,
    which is the importance weight of the value; with `exact` the middle of the known bounds. logprob: of the value
    without the constraint. constrained_logprob: of the value given that the text is valid, logprob - log_weight.
    model_steps: prefixes that the model computed. effective_sample_size: of the particles.
    """

    log_weight: float
    logprob: float
    constrained_logprob: float
    model_steps: int
    effective_sample_size: float | UnsetType = UNSET


def importance_weight(result: CallResult) -> ImportanceWeight | UnsetType:
    """The weight of a call's value; UNSET for a value that was sampled token by token."""
    if (particles := result.particles) is not None:
        return ImportanceWeight(
            particles.log_weight,
            particles.logprob,
            particles.logprob - particles.log_weight,
            particles.model_steps,
            particles.effective_sample_size,
        )
    if (exact := result.exact) is None:
        return UNSET
    log_weight = sum(exact.log_mass_bounds) / 2
    return ImportanceWeight(log_weight, exact.logprob, exact.logprob - log_weight, exact.model_steps)


def extensions(
    client: Client, result: CallResult, prompt_ids: Sequence[int] | None = None
) -> tuple[ImportanceWeight | UnsetType, CacheMissReport | UnsetType]:
    """The fields `weight` and `cache_miss` of an answer; see `importance_weight` and `cache_miss_report`."""
    return importance_weight(result), cache_miss_report(client, result, prompt_ids)


# -- logprobs, as OpenAI and Ollama write them ----------------------------------------------------


class TopLogprob(msgspec.Struct):
    """A token's text, its bytes, and its natural logarithm of probability."""

    token: str
    bytes: list[int]
    logprob: float


class ContentLogprob(TopLogprob):
    """One token of the answer, with the likeliest tokens at its position."""

    top_logprobs: list[TopLogprob]


def token_logprobs(client: Client, entries: Sequence[TokenLogprob]) -> list[ContentLogprob]:
    """The entries in OpenAI's shape (`logprobs.content` of a chat completion), each `encoded`."""
    token_bytes = client.tokenizer.vocabulary.token_bytes

    def fields(token: int, logprob: float) -> tuple[str, list[int], float]:
        data = token_bytes[token]
        return data.decode("utf-8", "replace"), list(data), max(logprob, MIN_LOGPROB)

    return [
        encoded(
            ContentLogprob(
                *fields(entry.token_id, entry.logprob),
                [TopLogprob(*fields(token, value)) for token, value in entry.top],
            )
        )
        for entry in entries
    ]


def as_written(text: str) -> Any:
    """A complete JSON object, to be sent as it was written; None for any other text.

    Reading its numbers and writing them again would change those that no float64 holds, such as 1e999.

    >>> msgspec.json.encode({"input": as_written('{"a": 1e999}')})
    b'{"input":{"a": 1e999}}'
    """
    encoded_text = text.encode()
    try:
        msgspec.json.decode(encoded_text, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return None
    return msgspec.Raw(encoded_text)
