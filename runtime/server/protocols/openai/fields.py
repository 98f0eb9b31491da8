"""What OpenAI's endpoints share: fields of requests that sample, constraints, the usage object, streams of chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from plait.constrained.specs import Choices, Ebnf, JsonObject, JsonSchema, Lark, Regex, Spec
from plait.runtime.call_reports import Usage
from plait.runtime.server.errors import invalid
from plait.runtime.server.generation.sampling_fields import sampling_fields
from plait.runtime.server.generation.submission import RequestHandle
from plait.runtime.server.http.response import sse_event
from plait.runtime.server.protocols.answer import DONE, AnswerWriter
from plait.runtime.server.protocols.shared import Priority, StrictStruct, build_constraint
from plait.runtime.server.protocols.structural_tag import structural_constraint

# -- structured outputs ---------------------------------------------------------------------------
# vLLM's `structured_outputs` of completions and chat completions: one constraint on the answer.
#
# Source: https://docs.vllm.ai/en/latest/features/structured_outputs.html (0.12).


class StructuredOutputs(StrictStruct):
    """One of `json` (a schema, or its text), `regex`, `choice`, `grammar` (EBNF or Lark), `json_object`, and
    `structural_tag`. `disable_any_whitespace` is our `compact`."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_fallback: bool | None = None
    disable_additional_properties: Literal[False] | None = None


def structured_constraints(body: StructuredOutputs, *, strict_formats: bool) -> Iterator[tuple[str, Spec]]:
    """Yields the constraints and their parameters. Raises ApiError 400 for one that cannot be used."""
    path, compact = "structured_outputs", body.disable_any_whitespace
    if body.json is not None:
        options = {"annotations": True, "compact": compact, "strict_formats": strict_formats}
        yield f"{path}.json", build_constraint(f"{path}.json", JsonSchema, body.json, **options)
    grammar_kind = Ebnf if "::=" in (body.grammar or "") else Lark
    for name, kind in (("regex", Regex), ("choice", Choices), ("grammar", grammar_kind)):
        if (value := getattr(body, name)) is not None:
            yield f"{path}.{name}", build_constraint(f"{path}.{name}", kind, value)
    if body.json_object:
        yield f"{path}.json_object", JsonObject(compact=compact)
    if body.structural_tag is not None:
        yield f"{path}.structural_tag", structural_constraint(body.structural_tag, f"{path}.structural_tag")


# -- fields ---------------------------------------------------------------------------------------

FinishReason = Literal["stop", "length", "tool_calls"]


class StreamOptions(StrictStruct):
    """`include_usage`: a last chunk with the usage."""

    field_table: ClassVar[str] = "stream_options"
    include_usage: bool | None = None


class UsageOption(StrictStruct):
    """OpenRouter's `usage`: `include` is `include_usage` of a stream."""

    include: bool | None = None


class Schema(StrictStruct):
    """A named JSON schema. The answer fits it whether `strict` is set or not. `schemas`: the documents that it refers
    to, by URI."""

    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    schemas: dict[str, dict[str, Any] | bool] | None = None


class TextFormat(StrictStruct, tag_field="type", tag="text"):
    """Free text."""


class JsonObjectFormat(StrictStruct, tag_field="type", tag="json_object"):
    """Any JSON object."""


class JsonSchemaFormat(StrictStruct, tag_field="type", tag="json_schema"):
    """A JSON value that fits the schema."""

    json_schema: Schema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat

if TYPE_CHECKING:
    _OpenAISampling = msgspec.Struct
else:  # logprobs: a flag of chat, a number of completions
    _OpenAISampling = sampling_fields("openai", leave_out=("logprobs", "top_logprobs"))


class SamplingRequest(_OpenAISampling, kw_only=True, forbid_unknown_fields=True):
    """Fields of completions and chat completions. The second half are extensions, under the names other servers use."""

    model: str
    max_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: str | None = None
    ebnf: str | None = None
    lark: str | None = None
    choices: list[str] | None = None
    cache_salt: str | None = None
    priority: Priority | None = None
    complete: bool | None = None
    compact: bool | None = None
    strict_formats: bool | None = None
    usage: UsageOption | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return any((self.stream_options and self.stream_options.include_usage, self.usage and self.usage.include))


def check_stream_options(body: SamplingRequest) -> None:
    """Raises ApiError 400 for `stream_options` without `stream`."""
    if body.stream_options is not None and not body.stream:
        raise invalid("'stream_options' is only for streams", "stream_options")


def constraint_of(body: SamplingRequest) -> tuple[Spec | None, str | None]:
    """The constraint of the answer and the parameter that has it. Raises ApiError 400 for more than one."""
    constraints: list[tuple[str, Spec]] = []
    for name, kind in (("regex", Regex), ("ebnf", Ebnf), ("lark", Lark), ("choices", Choices)):
        if (value := getattr(body, name)) is not None:
            constraints.append((name, build_constraint(name, kind, value)))
    if isinstance(body.response_format, JsonObjectFormat):
        constraints.append(("response_format", JsonObject(compact=bool(body.compact))))
    elif isinstance(body.response_format, JsonSchemaFormat):
        param, schema = "response_format.json_schema.schema", body.response_format.json_schema
        constraints.append((param, schema_constraint(param, schema, body.compact, body.strict_formats)))
    if body.structured_outputs is not None:
        constraints += structured_constraints(body.structured_outputs, strict_formats=bool(body.strict_formats))
    if len(constraints) > 1:
        first, second = constraints[0][0], constraints[1][0]
        raise invalid(f"'{first}' and '{second}' cannot both constrain the answer", second)
    return (constraints[0][1], constraints[0][0]) if constraints else (None, None)


def schema_constraint(param: str, schema: Any, compact: bool | None, strict_formats: bool | None) -> Spec:
    """The constraint of a struct at `param` with `schema`, `strict` and `schemas`, as `Schema`. Raises ApiError 400."""
    constraint: Spec = build_constraint(
        param,
        JsonSchema,
        schema.schema or {},
        annotations=not schema.strict,
        compact=bool(compact),
        strict_formats=bool(schema.strict or strict_formats),
        schemas=schema.schemas or "",
    )
    return constraint


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Only of answers whose request asked for reasoning before a constrained answer."""

    reasoning_tokens: int


class UsageBody(msgspec.Struct):
    """OpenAI's usage object: tokens of the prompt, counted once however many answers it has, and of all answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET

    @classmethod
    def of(cls, usage: Usage) -> UsageBody:
        prompt, completion = usage.prompt_tokens, usage.completion_tokens
        reasoning = CompletionTokensDetails(usage.reasoning_tokens) if usage.reasoning_tokens else UNSET
        return cls(prompt, completion, prompt + completion, PromptTokensDetails(usage.cached_tokens), reasoning)


# -- streams --------------------------------------------------------------------------------------


class ResponseHead(NamedTuple):
    """What a completion and each of its chunks begin with; `created` in seconds since 1970."""

    id: str
    created: int
    model: str


class ChunkWriter(AnswerWriter):
    """Writes the chunks of a stream; the last one has the usage, if it is requested. kind: the struct of a chunk."""

    kind: ClassVar[Any]

    def __init__(self, head: ResponseHead, includes_usage: bool, handle: RequestHandle) -> None:
        self.head, self.handle, self._includes_usage = head, handle, includes_usage

    def chunk(self, choices: Sequence[Any], warnings: list[str] | UnsetType = UNSET) -> bytes:
        """The event of one chunk."""
        usage = None if self._includes_usage else UNSET
        return sse_event(self.kind(*self.head, choices, usage, warnings=warnings))

    def finish(self) -> bytes:
        if not self._includes_usage:
            return DONE
        return sse_event(self.kind(*self.head, [], UsageBody.of(self.handle.usage()))) + DONE
