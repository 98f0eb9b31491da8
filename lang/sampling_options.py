"""Sampling keywords as programs write them, checked where they are written and merged where they are used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.runtime.errors import InputError
from plait.runtime.sampling_params import MAX_TOKENS_LIMIT, SamplingParams, check_sampling, sampling_params

MAX_N = 128

# what a program writes: what the wire calls it
_FIELD_OF_KEYWORD = {
    "max_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "stop_regex": "stop_regex",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "ignore_eos": "ignore_eos",
    "seed": "seed",
    "return_logprob": "logprobs",
    "top_logprobs_num": "top_logprobs",
    "timeout": "timeout_s",
    "complete": "complete",
    "logprob_start_len": "prompt_logprobs_from",
}
SAMPLING_KEYWORDS = (*(name for name in _FIELD_OF_KEYWORD if name != "complete"), "n", "return_text_in_logprobs")
"""What `run` takes as defaults; a gen takes the same, but for max_new_tokens, and `complete`."""

NO_STOP: dict[str, Any] = {"stop": (), "stop_token_ids": (), "stop_regex": ()}
"""For values that end themselves, whatever `run`'s defaults are."""

KEYWORD_OF_FIELD = {
    "prompt_logprobs_from": "logprob_start_len",
    "logprobs": "return_logprob",
    "top_logprobs": "top_logprobs_num",
    "timeout_s": "timeout",
}


@dataclass(frozen=True)
class Options:
    """What was said of sampling: of `run` the defaults, of one `gen` what overrides them.

    `fields` holds only what was given, under the names of `SamplingParams`; `n` is the number of samples.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    n: int | None = None

    def merged_over(self, defaults: Options) -> tuple[SamplingParams, int]:
        """The parameters of one call, and n. Raises InputError where the two contradict each other."""
        params = _checked({**defaults.fields, **self.fields})
        return params, self.n or defaults.n or 1

    def check_as_defaults(self, vocab_size: int) -> None:
        """InputError for a default that no gen of a model with this vocabulary can have."""
        check_sampling(_checked(_with_neutral_fields(self.fields)), vocab_size=vocab_size)


def make_options(where: str, *, n: int | None = None, **given: Any) -> Options:
    """Checked options; None means "not said". InputError names `where` (such as "gen('x')") and the field.

    Lists are copied into tuples: nothing of the caller's is kept or changed.

    >>> make_options("gen", stop=["\\n"], temperature=0).fields
    {'stop': ('\\n',), 'temperature': 0.0}
    """
    try:
        fields = _wire_fields(given)
        _check_n(n)
        params = _checked(_with_neutral_fields(fields))
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return Options({name: getattr(params, name) for name in fields}, n)


def run_options(where: str, given: Mapping[str, Any]) -> Options:
    """The options of `run(...)`: `given` has names of SAMPLING_KEYWORDS only."""
    said = dict(given)
    check_text_in_logprobs(where, said.pop("return_text_in_logprobs", None))
    return make_options(where, **said)


def check_text_in_logprobs(where: str, value: object) -> None:
    if value is not None and value is not True:
        raise InputError(f"{where}: return_text_in_logprobs must be True or None; the texts are always there")


def _wire_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        wire = _FIELD_OF_KEYWORD[name]
        if wire in fields and fields[wire] != value:
            raise InputError("max_tokens and max_new_tokens are two names of one setting; give one")
        fields[wire] = value
    return fields


def _with_neutral_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` with neutral partners: what was said here is not held against what may be said elsewhere."""
    whole = dict(fields)
    if "min_tokens" in whole:
        whole.setdefault("max_tokens", MAX_TOKENS_LIMIT)
    if whole.get("top_logprobs"):
        whole.setdefault("logprobs", True)
    return whole


def _checked(fields: Mapping[str, Any]) -> SamplingParams:
    try:
        return sampling_params(**fields)
    except InputError as error:
        first, _, rest = str(error).partition(" ")  # the validator's sentences begin with the field's name
        if first in KEYWORD_OF_FIELD:
            raise InputError(f"{KEYWORD_OF_FIELD[first]} {rest}") from None
        raise


def _check_n(n: object) -> None:
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_N):
        raise InputError(f"n must be an integer from 1 to {MAX_N}, not {n!r}")
