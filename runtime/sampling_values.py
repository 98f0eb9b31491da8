"""Checks of single values of sampling parameters. `field` is the field of `SamplingParams`, `name` the protocol's."""

from __future__ import annotations

import math
from typing import Any

from plait.constrained.regex.incremental_search import MAX_EDGES, search_automaton
from plait.constrained.specs import GrammarError
from plait.runtime.errors import InputError

MAX_STOP_STRINGS = 64
MAX_STOP_BYTES = 1024
MAX_STOP_PATTERNS = 16
MAX_STOP_TOKENS = 256
MAX_LOGIT_BIAS = 1024


def checked_number(
    field: str, name: str, value: Any, kind: type[Any], low: float, high: float, *, above_low: bool
) -> Any:
    """Returns `value` as `kind`, int or float. Raises InputError unless it is from `low` (or above it) to `high`."""
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        text = f"{name} must be {'an integer' if kind is int else 'a number'}, not {value!r}"
        raise InputError(text, field=field)
    if not math.isfinite(value):
        raise InputError(f"{name} must be finite, not {value!r}", field=field)
    if value > high or value < low or (value == low and above_low):
        bounds = f"{'above' if above_low else 'from'} {low} to {high}"
        raise InputError(f"{name} must be {bounds}, not {value!r}", field=field)
    return kind(value)


def check_top_k(name: str, top_k: Any) -> None:
    if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < -1 or top_k == 0 or top_k > 1 << 30:
        raise InputError(f"{name} must be -1 (all tokens) or at least 1, not {top_k!r}", field="top_k")


def check_stop_strings(name: str, stops: Any) -> None:
    if not isinstance(stops, tuple) or len(stops) > MAX_STOP_STRINGS:
        raise InputError(f"{name} takes a string or at most {MAX_STOP_STRINGS} of them", field="stop")
    for text in stops:
        if not isinstance(text, str) or not text:
            raise InputError(f"stop strings must be non-empty text, not {text!r}", field="stop")
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise InputError("a stop string has a lone surrogate, which is not a character", field="stop") from None
        if size > MAX_STOP_BYTES:
            raise InputError(f"a stop string has {size} bytes; the limit is {MAX_STOP_BYTES}", field="stop")


def check_stop_patterns(name: str, patterns: Any) -> None:
    if not isinstance(patterns, tuple) or len(patterns) > MAX_STOP_PATTERNS:
        raise InputError(f"{name} takes a pattern or at most {MAX_STOP_PATTERNS} of them", field="stop_regex")
    num_edges = 0
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise InputError(f"{name} has {pattern!r:.80}, which is not text", field="stop_regex")
        try:
            num_edges += search_automaton(pattern).num_edges
        except GrammarError as error:
            text = f"{name} has {pattern!r:.80}, which cannot be used: {error}"
            raise InputError(text, field="stop_regex") from None
    if num_edges > MAX_EDGES:
        text = f"the patterns of {name} together need an automaton with more than {MAX_EDGES} edges"
        raise InputError(text, field="stop_regex")


def check_token_ids(field: str, name: str, ids: Any, max_count: int, vocab_size: int | None) -> None:
    if not isinstance(ids, tuple) or len(ids) > max_count:
        raise InputError(f"{name} takes at most {max_count} token ids", field=field)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise InputError(f"{name} has {token!r}, which is not a token id", field=field)
        if vocab_size is not None and token >= vocab_size:
            raise InputError(f"{name} has {token}, but the vocabulary ends at {vocab_size - 1}", field=field)


def check_logit_bias(name: str, bias: Any, vocab_size: int | None) -> None:
    if not isinstance(bias, dict):
        raise InputError(f"{name} must be a dict of token id to number", field="logit_bias")
    if not bias:
        return
    check_token_ids("logit_bias", name, tuple(bias), MAX_LOGIT_BIAS, vocab_size)
    for token, value in bias.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -100 <= value <= 100:
            text = f"{name} of token {token} must be from -100 to 100, not {value!r}"
            raise InputError(text, field="logit_bias")
