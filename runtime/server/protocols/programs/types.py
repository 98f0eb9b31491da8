"""The bodies of `/v1/programs`: nodes and their options, the request and the answer. See docs/programs-api.md.

A node has exactly one of text, var, gen, select, role and fork; `index` belongs to var, `content` to role.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from plait.constrained.specs import Spec
from plait.runtime.messages import SelectMethod
from plait.runtime.server.chat.template_settings import TemplateVariables
from plait.runtime.server.generation.cache_miss import CacheMissReport
from plait.runtime.server.generation.sampling_fields import sampling_fields
from plait.runtime.server.protocols.shared import ImportanceWeight, Priority, StrictStruct

MAX_TEXT = 1 << 20  # characters of one text

VariableName = Annotated[str, Meta(min_length=1, max_length=256)]
NodeList = Annotated[list["Node"], Meta(max_length=4096)]


if TYPE_CHECKING:

    class _ProgramSampling(msgspec.Struct):
        seed: int | None = None

else:
    _ProgramSampling = sampling_fields("programs")


class ProgramSamplingFields(_ProgramSampling, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters, under the names that `gen` in the language has for them. Null: the value of `defaults`."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    same_seed: bool | None = None
    timeout: float | None = None


class Gen(ProgramSamplingFields, kw_only=True):
    """Samples text and keeps it as variable `name`. Takes at most one of regex, json_schema, ebnf, lark, choices and
    constraint.

    `choices`: one of them is sampled; `select` scores them instead. `constraint`: any spec of plait.constrained.
    `following_nodes`: how many of the next nodes belong to the constraint: texts, and variables that are texts, which
    must be able to follow the value. Behind the last node of a role, the end of the turn counts as one. By default all
    text nodes and request variables right behind the gen, and the end of the turn. 0: none, as without a constraint.
    `complete`: the value is complete within `max_tokens`. `n` above 1: the variable is a list, and the text goes on
    with the first.
    """

    name: VariableName | None = None
    regex: str | None = None
    json_schema: str | dict[str, Any] | None = None
    ebnf: str | None = None
    lark: str | None = None
    choices: list[str] | None = None
    constraint: Spec | None = None
    following_nodes: Annotated[int, Meta(ge=0, le=4096)] | None = None
    complete: bool | None = None


class Select(StrictStruct, kw_only=True):
    """Scores `choices` and keeps the likeliest as variable `name`; with the method "exact", one drawn with `seed`."""

    choices: Annotated[list[str], Meta(min_length=1, max_length=1024)]
    name: VariableName | None = None
    choices_method: SelectMethod = "token_length_normalized"
    timeout: float | None = None
    seed: int | None = None


class Fork(StrictStruct, kw_only=True):
    """Runs branches in parallel, each from the text so far, and joins them.

    "gather": each variable that is new in a branch becomes a list of the branches' values. "append": the texts that the
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
    """`variables`: texts, or lists of texts, that the program may use. `defaults`: sampling parameters of every gen.

    `chat_template_kwargs`, `enable_thinking`: further variables of the chat template, for all turns.
    """

    field_table: ClassVar[str] = "programs"
    program: Annotated[list[Node], Meta(min_length=1, max_length=4096)]
    model: str = "default"
    variables: Annotated[dict[VariableName, str | list[str]], Meta(max_length=1024)] | None = None
    defaults: ProgramSamplingFields | None = None
    stream: bool | None = None
    cache_salt: str | None = None
    priority: Priority | None = None
    chat_template_kwargs: TemplateVariables | None = None
    enable_thinking: bool | None = None


class CallUsage(msgspec.Struct):
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    forced_tokens: int


class ProgramUsage(msgspec.Struct):
    """Sums over all calls. A prefix that two calls share counts as prompt of both, and as cached in the second."""

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
    """The result of one gen or select. `path`: its place in the program; `scores`: of a select, one per choice.

    `warnings`: what the constraint does not enforce. `weight`: of a gen with `particles` or `exact`.
    `cache_miss`: on request.
    """

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
    warnings: list[str] | UnsetType = UNSET
    weight: ImportanceWeight | UnsetType = UNSET
    cache_miss: CacheMissReport | UnsetType = UNSET


class TurnAnswer(msgspec.Struct):
    role: str
    content: str


class ProgramAnswer(msgspec.Struct, kw_only=True):
    """`variables`: those outside forks, with those of the request. `text`: the whole text, `messages`: its turns.

    `warnings`: fields of the request that have no effect.
    """

    id: str
    object: Literal["program"] = "program"
    created: int
    model: str
    variables: dict[str, Any]
    text: str
    messages: list[TurnAnswer]
    calls: list[CallAnswer]
    usage: ProgramUsage
    warnings: list[str] | UnsetType = UNSET
