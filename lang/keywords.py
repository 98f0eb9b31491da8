"""The keywords of `gen` and `run` as types, for type checkers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypedDict

Stop = str | Collection[str]


class SampledKeywords(TypedDict, total=False):
    """The sampling keywords that gens and `run` share, without max_tokens, min_tokens and n."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    typical_p: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    repetition_penalty: float | None
    stop: Stop | None
    stop_token_ids: Collection[int] | None
    stop_regex: Stop | None
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


class RunKeywords(SampledKeywords, total=False):
    """The sampling keywords of `run`: defaults of all gens of a program."""

    max_tokens: int | None
    max_new_tokens: int | None
    min_tokens: int | None
    n: int | None
    sampling: Mapping[str, object] | None


class TypedGenKeywords(SampledKeywords, total=False):
    """The keywords of `gen(type=...)`, without name, max_tokens, min_tokens, n and type."""

    complete: bool | None
    retries: int | None
    think: bool | str | None
    think_tokens: int | None
    draft_then_constrain: bool | None
    draft_tokens: int | None


class RegexGenKeywords(SampledKeywords, total=False):
    """The keywords of `gen_int` and `gen_string`."""

    max_tokens: int | None
    min_tokens: int | None
    n: int | None
    complete: bool | None
