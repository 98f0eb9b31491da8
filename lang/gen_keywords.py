"""The keywords of `gen` and `run` as types, for type checkers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypedDict, TypeVar

from plait.constrained.specs import Spec
from plait.lang.choices import ChoicesMethod
from plait.lang.tools.make_tools import ToolSource
from plait.lang.tools.tool import Tool

Stop = str | Collection[str]
F = TypeVar("F", bound=Callable[..., Any])


class UnstoppedKeywords(TypedDict, total=False):
    """The sampling keywords that gens and `run` share, without those that may be given by position."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    typical_p: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | None
    token_healing: bool | None
    ignore_eos: bool | None
    seed: int | None
    same_seed: bool | None
    timeout: float | None
    return_logprob: bool | None
    top_logprobs_num: int | None
    return_text_in_logprobs: bool | None
    exact: bool | None
    particles: int | None
    logprob_start_len: int | None


class SampledKeywords(UnstoppedKeywords, total=False):
    """The sampling keywords that gens and `run` share, without max_tokens, min_tokens and n."""

    stop: Stop | None
    stop_token_ids: Collection[int] | None
    stop_regex: Stop | None


class RunKeywords(SampledKeywords, total=False):
    """The sampling keywords of `run`: defaults of all gens of a program."""

    max_tokens: int | None
    max_new_tokens: int | None
    min_tokens: int | None
    n: int | None
    sampling: Mapping[str, object] | None


class ValueKeywords(TypedDict, total=False):
    """The keywords of `gen` that typed and other values share."""

    complete: bool | None
    retries: int | None
    think: bool | str | None
    think_tokens: int | None
    draft_then_constrain: bool | None
    draft_tokens: int | None
    adapter: str | None


class TypedGenKeywords(SampledKeywords, ValueKeywords, total=False):
    """The keywords of `gen(type=...)`, without name, max_tokens, min_tokens, n and type."""


class GenKeywords(UnstoppedKeywords, ValueKeywords, total=False):
    """The keywords of a `gen` without a type, but for those that may be given by position."""

    regex: str | None
    json_schema: str | dict[str, Any] | type | None
    schemas: Mapping[str, str | dict[str, Any] | bool | type] | None
    ebnf: str | None
    lark: str | None
    constraint: Spec | None
    choices: Iterable[str] | None
    choices_method: ChoicesMethod | None
    dtype: object
    tools: Iterable[ToolSource] | None
    tool_choice: str | Callable[..., Any] | Tool | None


class RegexGenKeywords(SampledKeywords, total=False):
    """The keywords of `gen_int` and `gen_string`."""

    max_tokens: int | None
    min_tokens: int | None
    n: int | None
    complete: bool | None


FORM_KEYWORDS = tuple(name for name in GenKeywords.__annotations__ if name not in UnstoppedKeywords.__annotations__)
"""The keywords of `gen` that are no sampling parameters, without name and type."""


def declares(keywords: type) -> Callable[[F], F]:
    """Returns a decorator that shows the keywords of a TypedDict in the signature of a function, by which `help` and
    the reference describe it, in place of its `**keywords`. They are None by default."""

    def declare(function: F) -> F:
        signature = inspect.signature(function)
        shown = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint.__forward_arg__)
            for name, hint in keywords.__annotations__.items()
        ]
        named = list(signature.parameters.values())[:-1]
        function.__signature__ = signature.replace(parameters=[*named, *shown])  # type: ignore[attr-defined]
        return function

    return declare
