"""`Options`: the sampling keywords of `gen` and `run`, checked where they are written and merged for each call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from plait.lang.adapters import adapter_of_block
from plait.lang.argument_checks import checked_int
from plait.runtime.errors import InputError
from plait.runtime.programs.sampling import gen_fields
from plait.runtime.sampling_params import MAX_TOKENS_LIMIT, NAMES, SamplingParams, check_sampling, sampling_params

if TYPE_CHECKING:
    from plait.constrained.specs import Spec

MAX_N = 128

KEYWORD_OF_FIELD = NAMES["gen"]
"""Field of `SamplingParams` -> the keyword that programs write."""
_FIELD_OF_KEYWORD = {keyword: field for field, keyword in KEYWORD_OF_FIELD.items()} | {"max_new_tokens": "max_tokens"}
GEN_SAMPLING_KEYWORDS = tuple(KEYWORD_OF_FIELD.values())
"""The keywords of `gen` that are sampling parameters."""
SAMPLING_KEYWORDS = (
    *(name for name in _FIELD_OF_KEYWORD if name != "complete"),
    *("n", "same_seed", "return_text_in_logprobs"),
)
"""The keywords of `run`, defaults of its gens. `gen` has the same, without max_new_tokens and with `complete`."""

RUN_OPTION_KEYWORDS = (*SAMPLING_KEYWORDS, "chat_template_kwargs")
"""The keywords of `run` that the body does not get: the defaults of its gens, and variables of the chat template."""

NO_STOP: dict[str, Any] = {"stop": (), "stop_token_ids": (), "stop_regex": ()}
"""No stop of `run`'s defaults applies; for constrained values, which end by themselves."""


@dataclass(frozen=True)
class Options:
    """Sampling options: the defaults of a `run`, or those of one `gen`, which override them.

    `fields`: the given options only, by their names in `SamplingParams`. `n`: the number of samples. `same_seed`:
    whether the seed is used as it is, and not mixed with the place of the gen. `template_variables`: of a run only, the
    further variables of the chat template. `adapter`: of a run only, that of calls that name none.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    n: int | None = None
    same_seed: bool | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    adapter: str = ""

    def merged_over(self, defaults: Options, constraint: Spec | None = None) -> tuple[SamplingParams, int]:
        """Returns the parameters of one call, and n. Raises InputError if the options contradict the defaults."""
        params = _checked(gen_fields(self.fields, defaults.fields, constraint))
        if self.same_seed and params.seed is None:
            raise InputError("same_seed needs a seed, of this gen or of the run")
        return params, self.n or defaults.n or 1

    def keeps_seed(self, defaults: Options) -> bool:
        """Whether the call uses its seed as it is."""
        return bool(defaults.same_seed if self.same_seed is None else self.same_seed)

    def check_as_defaults(self, vocab_size: int) -> None:
        """Raises InputError for a default that is invalid for a model with this vocabulary size."""
        check_sampling(_checked(_with_neutral_fields(self.fields)), vocab_size=vocab_size)


def make_options(where: str, *, n: int | None = None, same_seed: bool | None = None, **given: Any) -> Options:
    """Returns checked options; a keyword that is None is not set. InputError names `where` ("gen('x')") and the
    keyword.

    Lists are copied into tuples, so later changes by the caller have no effect.

    >>> make_options("gen", stop=["\\n"], temperature=0).fields
    {'stop': ('\\n',), 'temperature': 0.0}
    """
    try:
        fields = _fields_of_keywords(given)
        if n is not None:
            checked_int("n", n, 1, MAX_N)
        _check_same_seed(same_seed)
        params = _checked(_with_neutral_fields(fields))
    except InputError as error:
        raise InputError(f"{where}: {error}", field=error.field) from None
    return Options({name: getattr(params, name) for name in fields}, n, same_seed)


def run_options(where: str, given: Mapping[str, Any]) -> Options:
    """Returns the options of `run(...)`. The keys of `given` are in RUN_OPTION_KEYWORDS."""
    keywords = dict(given)
    variables = keywords.pop("chat_template_kwargs", None)
    if variables is not None and (
        not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables)
    ):
        raise InputError(f"{where}: chat_template_kwargs must be a dict of variables, not {variables!r:.80}")
    check_text_in_logprobs(where, keywords.pop("return_text_in_logprobs", None))
    return replace(
        make_options(where, **keywords), template_variables=dict(variables or {}), adapter=adapter_of_block() or ""
    )


def check_text_in_logprobs(where: str, value: object) -> None:
    """Raises InputError unless `value`, SGLang's return_text_in_logprobs, is True or None."""
    if value is not None and value is not True:
        raise InputError(f"{where}: return_text_in_logprobs must be True or None; the texts are always there")


def _fields_of_keywords(given: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        field_name = _FIELD_OF_KEYWORD[name]
        if field_name in fields and fields[field_name] != value:
            raise InputError("max_tokens and max_new_tokens are two names of one setting; give one of them")
        fields[field_name] = value
    return fields


def _with_neutral_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `fields` with neutral values for fields that they are checked against, which may be given elsewhere."""
    completed = dict(fields)
    if "min_tokens" in completed:
        completed.setdefault("max_tokens", MAX_TOKENS_LIMIT)
    if completed.get("top_logprobs"):
        completed.setdefault("logprobs", True)
    return completed


def _checked(fields: Mapping[str, Any]) -> SamplingParams:
    return sampling_params("gen", **fields)


def _check_same_seed(same_seed: object) -> None:
    if same_seed is not None and not isinstance(same_seed, bool):
        raise InputError(f"same_seed must be True or False, not {same_seed!r:.40}")
