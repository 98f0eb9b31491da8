"""Sampling keywords of `gen` and `run`: checked where they are written, merged where they are used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.runtime.errors import InputError
from plait.runtime.sampling_params import MAX_TOKENS_LIMIT, NAMES, SamplingParams, check_sampling, sampling_params

MAX_N = 128

KEYWORD_OF_FIELD = NAMES["gen"]
"""Field of `SamplingParams` -> the keyword that programs write."""
_FIELD_OF_KEYWORD = {keyword: field for field, keyword in KEYWORD_OF_FIELD.items()} | {"max_new_tokens": "max_tokens"}
GEN_SAMPLING_KEYWORDS = tuple(KEYWORD_OF_FIELD.values())
"""The keywords of `gen` that are sampling parameters."""
SAMPLING_KEYWORDS = (*(name for name in _FIELD_OF_KEYWORD if name != "complete"), "n", "return_text_in_logprobs")
"""The keywords of `run`, defaults of its gens. `gen` has the same, without max_new_tokens and with `complete`."""

NO_STOP: dict[str, Any] = {"stop": (), "stop_token_ids": (), "stop_regex": ()}
"""No stop of `run`'s defaults applies; for constrained values, which end by themselves."""


@dataclass(frozen=True)
class Options:
    """Sampling options: of `run` the defaults, of one `gen` the values that override them.

    `fields` has only the options that were given, by the field names of `SamplingParams`; `n` is the number of samples.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    n: int | None = None

    def merged_over(self, defaults: Options) -> tuple[SamplingParams, int]:
        """The parameters of one call, and n. Raises InputError if the two contradict each other."""
        params = _checked({**defaults.fields, **self.fields})
        return params, self.n or defaults.n or 1

    def check_as_defaults(self, vocab_size: int) -> None:
        """Raises InputError for a default that no gen of a model with this vocabulary can have."""
        check_sampling(_checked(_with_neutral_fields(self.fields)), vocab_size=vocab_size)


def make_options(where: str, *, n: int | None = None, **given: Any) -> Options:
    """Checked options; None means "not given". Raises InputError naming `where` (such as "gen('x')") and the keyword.

    Lists are copied to tuples.

    >>> make_options("gen", stop=["\\n"], temperature=0).fields
    {'stop': ('\\n',), 'temperature': 0.0}
    """
    try:
        fields = _fields_of_keywords(given)
        _check_n(n)
        params = _checked(_with_neutral_fields(fields))
    except InputError as error:
        raise InputError(f"{where}: {error}", field=error.field) from None
    return Options({name: getattr(params, name) for name in fields}, n)


def run_options(where: str, given: Mapping[str, Any]) -> Options:
    """The options of `run(...)`: `given` has names of SAMPLING_KEYWORDS only."""
    keywords = dict(given)
    check_text_in_logprobs(where, keywords.pop("return_text_in_logprobs", None))
    return make_options(where, **keywords)


def check_text_in_logprobs(where: str, value: object) -> None:
    if value is not None and value is not True:
        raise InputError(f"{where}: return_text_in_logprobs must be True or None; the texts are always there")


def _fields_of_keywords(given: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        field_name = _FIELD_OF_KEYWORD[name]
        if field_name in fields and fields[field_name] != value:
            raise InputError("max_tokens and max_new_tokens are two names of one setting; give one")
        fields[field_name] = value
    return fields


def _with_neutral_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` with values for the fields they depend on, which `run` or `gen` may still set."""
    completed = dict(fields)
    if "min_tokens" in completed:
        completed.setdefault("max_tokens", MAX_TOKENS_LIMIT)
    if completed.get("top_logprobs"):
        completed.setdefault("logprobs", True)
    return completed


def _checked(fields: Mapping[str, Any]) -> SamplingParams:
    return sampling_params("gen", **fields)


def _check_n(n: object) -> None:
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_N):
        raise InputError(f"n must be an integer from 1 to {MAX_N}, not {n!r}")
