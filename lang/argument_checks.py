"""Checks arguments of gen and select (names, patterns, lists, grammars) at the line where the program writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any, cast

from plait.constrained.specs import Choices, Ebnf, GrammarError, JsonSchema, Lark, Regex, Spec
from plait.runtime.errors import InputError


def call_label(function: str, name: object) -> str:
    """Returns the call as text for messages, such as "gen('x')". Raises InputError for an invalid variable name."""
    if name is None:
        return function
    if not isinstance(name, str) or not name:
        raise InputError(f"{function}: the name of a variable must be non-empty text, not {name!r:.80}")
    return f"{function}({name!r})"


def checked_int(what: str, value: object, lowest: int, highest: int) -> int:
    """Returns `value`. Raises InputError, which begins with `what`, unless it is an integer in this range."""
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise InputError(f"{what} must be an integer from {lowest} to {highest}, not {value!r:.80}")
    return value


def checked_regex(where: str, pattern: object) -> Regex:
    """Returns the pattern as a spec. Raises InputError for anything but a valid pattern."""
    if not isinstance(pattern, str):
        hint = "; write regex=pattern.pattern" if isinstance(pattern, re.Pattern) else ""
        raise InputError(f"{where}: regex must be a pattern as text, not {type(pattern).__name__}{hint}")
    try:
        re.compile(pattern)
        return Regex(pattern)
    except (re.error, GrammarError, OverflowError, RecursionError) as error:
        raise InputError(f"{where}: the regex {pattern!r:.80} is not valid: {error}") from None


def checked_choices(where: str, choices: object, max_count: int | None = None) -> Choices:
    """Returns the choices as a spec. Raises InputError for anything but distinct, non-empty texts."""
    if isinstance(choices, (str, bytes)) or not isinstance(choices, Iterable):
        raise InputError(f"{where}: choices must be a list of texts, not {choices!r:.80}")
    try:
        texts = tuple(choices)
        if max_count is not None and not 1 <= len(texts) <= max_count:
            raise InputError(f"{where}: there must be 1 to {max_count} choices to score, not {len(texts)}")
        spec = Choices(texts)
    except GrammarError as error:
        place = "" if error.where is None else f" (choice {error.where})"
        if not all(isinstance(text, str) for text in texts):
            place += "; for values of other types write a Literal, such as Literal[1, 2], or str(...)"
        raise InputError(f"{where}: {error.reason}{place}") from None
    return spec


_SPEC_OF_KEYWORD: dict[str, Callable[[Any], Spec]] = {"json_schema": JsonSchema, "ebnf": Ebnf, "lark": Lark}


CONSTRAINT_KEYWORDS = ("regex", *_SPEC_OF_KEYWORD, "constraint")


def keyword_of(spec: Spec) -> tuple[str, Any] | None:
    """Returns the keyword of a gen with this constraint, and its value; None if only `constraint` can express it."""
    match spec:
        case Regex(pattern):
            return "regex", pattern
        case Choices(choices):
            return "choices", list(choices)
        case Ebnf(grammar):
            return "ebnf", grammar
        case Lark(grammar):
            return "lark", grammar
        case JsonSchema() if spec == JsonSchema(spec.text):
            return "json_schema", spec.text
    return None


def checked_constraint(where: str, schemas: object = None, **constraints: object) -> Spec | None:
    """Returns the one of regex, json_schema, ebnf, lark and constraint that is not None, as a spec. `schemas`: the
    other documents of json_schema, by URI. Raises InputError if there are two, or if it is invalid."""
    given = {name: value for name, value in constraints.items() if value is not None}
    if len(given) > 1:
        raise InputError(f"{where}: {' and '.join(given)} exclude each other; give one of them")
    if schemas is not None and "json_schema" not in given:
        raise InputError(f"{where}: schemas needs json_schema, which refers to them")
    for name, value in given.items():
        if name == "regex":
            return checked_regex(where, value)
        if name == "constraint":
            return _checked_spec(where, value)
        try:
            if name == "json_schema" and isinstance(value, str):
                _check_is_json(where, value)
            if name == "json_schema" and isinstance(value, type) and not hasattr(value, "model_json_schema"):
                raise InputError(
                    f"{where}: json_schema takes a dict, JSON text or a Pydantic model; write type={value.__name__}"
                )
            if schemas is not None:
                return JsonSchema(cast("Any", value), schemas=cast("Any", schemas))
            return _SPEC_OF_KEYWORD[name](value)
        except InputError:
            raise
        except (GrammarError, TypeError, ValueError, RecursionError) as error:
            raise InputError(f"{where}: the {name} cannot be used: {error}") from None
    return None


def _check_is_json(where: str, text: str) -> None:
    try:
        json.loads(text)
    except ValueError as error:
        raise InputError(f"{where}: the json_schema cannot be used: {text!r:.80} is not JSON: {error}") from None


def _checked_spec(where: str, value: object) -> Spec:
    if not isinstance(value, Spec):
        raise InputError(
            f"{where}: constraint takes a spec of plait.constrained, such as JsonObject(), not {type(value).__name__}"
        )
    return value
