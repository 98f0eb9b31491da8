"""Sampling parameters and the one validator that every entry point uses.

Knows: names, ranges and units. Must not know: tensors, sessions, or who asked.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from plait.constrained.regex.incremental_search import MAX_EDGES, search_automaton
from plait.constrained.specs import GrammarError
from plait.runtime.errors import InputError

MAX_TOKENS_LIMIT = 1 << 20
MAX_STOP_STRINGS = 64
MAX_STOP_BYTES = 1024
MAX_STOP_PATTERNS = 16
MAX_STOP_TOKENS = 256
MAX_LOGIT_BIAS = 1024
MAX_TOP_LOGPROBS = 128


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the next tokens are chosen. Build it with `sampling_params(...)`, which checks every field.

    `complete`: the constrained value is whole when the call ends; tokens are chosen so that it can be closed
    within `max_tokens`. It takes no stop strings, patterns or tokens, which would cut the value. `if_it_fits`: where
    no whole value does, the call runs all the same and `max_tokens` cuts it; without it such a call fails.
    `stop_regex`: patterns in Python's syntax; the text ends where a match begins, as soon as one is complete.
    `prompt_logprobs_from`: the session's tokens from this position on get logprobs too (and `top_logprobs`); the very
    first has none. They are computed again where they were cached. Logprobs are natural logarithms of the model's own
    distribution, before temperature, penalties and masks.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    stop: Annotated[tuple[str, ...], Meta(max_length=MAX_STOP_STRINGS)] = ()
    stop_token_ids: Annotated[tuple[int, ...], Meta(max_length=MAX_STOP_TOKENS)] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logit_bias: Annotated[dict[int, float], Meta(max_length=MAX_LOGIT_BIAS)] = msgspec.field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: int = 0
    timeout_s: float | None = None
    complete: bool = False
    prompt_logprobs_from: int | None = None
    stop_regex: Annotated[tuple[str, ...], Meta(max_length=MAX_STOP_PATTERNS)] = ()
    if_it_fits: bool = False

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def needs_only_argmax(self) -> bool:
        """Whether the model's likeliest token is all that is wanted of its logits."""
        return self.is_greedy and not (self.logprobs or self.has_penalties_or_bias)

    @property
    def has_penalties_or_bias(self) -> bool:
        """Whether logits are bent before one is chosen."""
        return bool(self.logit_bias or self.frequency_penalty or self.presence_penalty)


# name: (type, lowest, highest, lowest itself allowed)
_RANGES: dict[str, tuple[type[Any], float, float, bool]] = {
    "max_tokens": (int, 0, MAX_TOKENS_LIMIT, True),
    "min_tokens": (int, 0, MAX_TOKENS_LIMIT, True),
    "temperature": (float, 0.0, 100.0, True),
    "top_p": (float, 0.0, 1.0, False),
    "min_p": (float, 0.0, 1.0, True),
    "frequency_penalty": (float, -2.0, 2.0, True),
    "presence_penalty": (float, -2.0, 2.0, True),
    "top_logprobs": (int, 0, MAX_TOP_LOGPROBS, True),
    "seed": (int, -(2**63), 2**63 - 1, True),
    "timeout_s": (float, 0.0, 7 * 24 * 3600.0, False),
    "prompt_logprobs_from": (int, 0, 1 << 24, True),
}


_FIELD_NAMES = frozenset(SamplingParams.__struct_fields__)


def sampling_params(**fields: Any) -> SamplingParams:
    """Checked `SamplingParams`; `None` means "the default".

    Raises InputError naming the field for an unknown name, a wrong type, NaN, or a value out of range.

    >>> sampling_params(max_tokens=8, stop="\\n").stop
    ('\\n',)
    """
    unknown = fields.keys() - _FIELD_NAMES
    if unknown:
        known = ", ".join(SamplingParams.__struct_fields__)
        raise InputError(f"unknown sampling parameter {sorted(unknown)[0]!r}; known are: {known}")
    given = {name: value for name, value in fields.items() if value is not None}
    for name in ("stop", "stop_regex", "stop_token_ids"):
        if isinstance(given.get(name), (str, int)):
            given[name] = (given[name],)
        elif isinstance(given.get(name), (list, set, frozenset)):
            given[name] = tuple(given[name])
    for name, value in given.items():
        if name in _RANGES:
            given[name] = _number(name, value)
    params = SamplingParams(**given)
    check_sampling(params)
    return params


_FIELDS = SamplingParams.__struct_fields__
_DEFAULTS = msgspec.structs.astuple(SamplingParams())
_BOOL_FIELDS = ("ignore_eos", "logprobs", "complete", "if_it_fits")


def check_sampling(params: SamplingParams, *, vocab_size: int | None = None) -> None:
    """Raises InputError unless every field is finite, typed and in range (and ids fit `vocab_size`)."""
    values = zip(_FIELDS, msgspec.structs.astuple(params), _DEFAULTS, strict=True)
    given = {name: value for name, value, usual in values if value is not usual}  # few are: most need no look
    for name, value in given.items():
        if name in _RANGES:
            kind, lowest, highest, _ = _RANGES[name]
            if value is not None and not (type(value) is kind and lowest < value < highest):  # NaN is not
                _number(name, value)
        elif name in _BOOL_FIELDS and not isinstance(value, bool):
            raise InputError(f"{name} must be True or False, not {value!r}")
    _check_top_k(params.top_k)
    if params.min_tokens > params.max_tokens:
        raise InputError(f"min_tokens ({params.min_tokens}) is above max_tokens ({params.max_tokens})")
    if params.top_logprobs and not params.logprobs and params.prompt_logprobs_from is None:
        raise InputError("top_logprobs needs logprobs (return_logprob in the language) to be on")
    if params.if_it_fits and not params.complete:
        raise InputError("if_it_fits says something of complete, which is off")
    if params.complete and (params.stop or params.stop_token_ids or params.stop_regex):
        raise InputError("complete cannot be had with stop, stop_regex or stop_token_ids, which would cut the value")
    if "stop" in given:
        _check_stops(params.stop)
    if "stop_regex" in given:
        _check_stop_patterns(params.stop_regex)
    if "stop_token_ids" in given:
        _check_ids("stop_token_ids", params.stop_token_ids, MAX_STOP_TOKENS, vocab_size)
    _check_bias(params.logit_bias, vocab_size)


def _number(name: str, value: Any) -> Any:
    kind, lowest, highest, closed = _RANGES[name]
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        raise InputError(f"{name} must be {'an integer' if kind is int else 'a number'}, not {value!r}")
    if not math.isfinite(value):
        raise InputError(f"{name} must be finite, not {value!r}")
    if value > highest or value < lowest or (value == lowest and not closed):
        raise InputError(f"{name} must be {'from' if closed else 'above'} {lowest} to {highest}, not {value!r}")
    return kind(value)


def _check_top_k(top_k: Any) -> None:
    if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < -1 or top_k == 0 or top_k > 1 << 30:
        raise InputError(f"top_k must be -1 (all tokens) or at least 1, not {top_k!r}")


def _check_stops(stops: Any) -> None:
    if not isinstance(stops, tuple) or len(stops) > MAX_STOP_STRINGS:
        raise InputError(f"stop takes a string or at most {MAX_STOP_STRINGS} of them")
    for text in stops:
        if not isinstance(text, str) or not text:
            raise InputError(f"stop strings must be non-empty text, not {text!r}")
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise InputError("a stop string holds a lone surrogate, which is no character") from None
        if size > MAX_STOP_BYTES:
            raise InputError(f"a stop string has {size} bytes; the limit is {MAX_STOP_BYTES}")


def _check_stop_patterns(patterns: Any) -> None:
    if not isinstance(patterns, tuple) or len(patterns) > MAX_STOP_PATTERNS:
        raise InputError(f"stop_regex takes a pattern or at most {MAX_STOP_PATTERNS} of them")
    num_edges = 0
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise InputError(f"stop_regex holds {pattern!r:.80}, which is no pattern as text")
        try:
            num_edges += search_automaton(pattern).num_edges
        except GrammarError as error:
            raise InputError(f"stop_regex holds {pattern!r:.80}, which cannot be used: {error}") from None
    if num_edges > MAX_EDGES:
        raise InputError("stop_regex holds patterns that together may go on in too many ways at once")


def _check_ids(name: str, ids: Any, most: int, vocab_size: int | None) -> None:
    if not isinstance(ids, tuple) or len(ids) > most:
        raise InputError(f"{name} takes at most {most} token ids")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise InputError(f"{name} holds {token!r}, which is no token id")
        if vocab_size is not None and token >= vocab_size:
            raise InputError(f"{name} holds {token}, but the vocabulary ends at {vocab_size - 1}")


def _check_bias(bias: Any, vocab_size: int | None) -> None:
    if not isinstance(bias, dict):
        raise InputError("logit_bias must be a dict of token id to number")
    if not bias:
        return
    _check_ids("logit_bias", tuple(bias), MAX_LOGIT_BIAS, vocab_size)
    for token, value in bias.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -100 <= value <= 100:
            raise InputError(f"logit_bias of token {token} must be from -100 to 100, not {value!r}")
