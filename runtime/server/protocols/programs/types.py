"""A program as JSON: nodes, their options, and the request and answer around them. docs/programs-api.md explains it.

A node has exactly one of text, var, gen, select, role and fork; `index` belongs to var, `content` to role.

Knows: shapes. Must not know: what is done with them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from plait.constrained.specs import Spec
from plait.runtime.messages import SelectMethod

MAX_TEXT = 1 << 20  # characters of one text

VariableName = Annotated[str, Meta(min_length=1, max_length=256)]
NodeList = Annotated[list["Node"], Meta(max_length=4096)]


class StrictStruct(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of all parts of a request."""


class ProgramSamplingFields(StrictStruct, kw_only=True):
    """How tokens are chosen, under the names that `gen` in the language has for it. Null: what `defaults` says."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    return_logprob: bool | None = None
    top_logprobs_num: int | None = None
    timeout: float | None = None


class Gen(ProgramSamplingFields, kw_only=True):
    """Sampled text, kept as variable `name`. At most one of regex, json_schema, ebnf, lark, choices and constraint.

    `choices` samples one of them; `select` scores them. `constraint`: any spec of plait.constrained. `complete`: the
    value is whole, however short `max_tokens` is. `n` above 1: the variable is a list, the text goes on with the first.
    """

    name: VariableName | None = None
    regex: str | None = None
    json_schema: str | dict[str, Any] | None = None
    ebnf: str | None = None
    lark: str | None = None
    choices: list[str] | None = None
    constraint: Spec | None = None
    complete: bool | None = None


class Select(StrictStruct, kw_only=True):
    """The likeliest of `choices`, kept as variable `name`."""

    choices: Annotated[list[str], Meta(min_length=1, max_length=1024)]
    name: VariableName | None = None
    choices_method: SelectMethod = "token_length_normalized"
    timeout: float | None = None


class Fork(StrictStruct, kw_only=True):
    """Branches that each go on from the text so far, side by side, and what is left of them.

    "gather": each variable new in a branch becomes a list of the branches' values. "append": the texts that the
    branches added are appended, in order.
    """

    branches: Annotated[list[NodeList], Meta(min_length=1, max_length=1024)]
    join: Literal["gather", "append"] = "gather"


class Node(StrictStruct, kw_only=True):
    """One step. `var` adds a variable's value as plain text; of a list, the item at `index`."""

    text: Annotated[str, Meta(max_length=MAX_TEXT)] | UnsetType = UNSET
    var: VariableName | UnsetType = UNSET
    index: int | list[int] | UnsetType = UNSET
    gen: Gen | UnsetType = UNSET
    select: Select | UnsetType = UNSET
    role: Literal["system", "user", "assistant"] | UnsetType = UNSET
    content: NodeList | UnsetType = UNSET
    fork: Fork | UnsetType = UNSET


class ProgramRequest(StrictStruct, kw_only=True):
    """`variables`: texts, or lists of texts, that the program may use. `defaults`: for every gen."""

    program: Annotated[list[Node], Meta(min_length=1, max_length=4096)]
    model: str = "default"
    variables: Annotated[dict[VariableName, str | list[str]], Meta(max_length=1024)] | None = None
    defaults: ProgramSamplingFields | None = None
    stream: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None


class CallUsage(msgspec.Struct):
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    forced_tokens: int


class ProgramUsage(msgspec.Struct):
    """Sums over all calls: text that two calls stand on is a prompt of both, and cached in the second."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    total_tokens: int


class TokenLogprobBody(msgspec.Struct):
    token_id: int
    token: str
    logprob: float
    top: list[tuple[int, float]]


class CallAnswer(msgspec.Struct):
    """One gen or select: where it stands, its value, how it ended. `scores` are a select's, one for each choice."""

    name: str | None
    path: str
    sample: int
    value: str
    finish_reason: str
    matched: str | int | None
    violation: str | None
    scores: list[float] | None
    logprobs: list[TokenLogprobBody] | None
    usage: CallUsage


class TurnAnswer(msgspec.Struct):
    role: str
    content: str


class ProgramAnswer(msgspec.Struct, kw_only=True):
    """`variables`: of the program's own text, those given included. `text`: that text, `messages`: its turns."""

    id: str
    object: Literal["program"] = "program"
    created: int
    model: str
    variables: dict[str, Any]
    text: str
    messages: list[TurnAnswer]
    calls: list[CallAnswer]
    usage: ProgramUsage
