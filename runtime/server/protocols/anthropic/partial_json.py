"""Parses JSON that was cut off: complete members are kept, an incomplete one is dropped."""

from __future__ import annotations

import json
from typing import Any

_CLOSERS = {"{": "}", "[": "]"}


def read_partial_object(text: str) -> dict[str, Any]:
    """The object that `text` is or begins; members that are not complete are left out.

    >>> read_partial_object('{"a": [1, 2, {"b": "x"'), read_partial_object('{"a": 1, "b')
    ({'a': [1, 2, {'b': 'x'}]}, {'a': 1})
    """
    try:
        value = json.loads(text)
    except ValueError:
        value = json.loads(_closed(text))
    return value if isinstance(value, dict) else {}


def _closed(text: str) -> str:
    """The longest prefix of `text` that closing brackets make valid JSON, with these brackets."""
    best, open_brackets = "{}", ""
    is_key_next = False
    in_string = escaped = False
    for index, letter in enumerate(text):
        if in_string:
            if escaped:
                escaped = False
            elif letter == "\\":
                escaped = True
            elif letter == '"':
                in_string = False
                if not is_key_next:
                    best = text[: index + 1] + _closers(open_brackets)
            continue
        if letter == '"':
            in_string = True
        elif letter in "{[":
            open_brackets += letter
            is_key_next = letter == "{"
            best = text[: index + 1] + _closers(open_brackets)
        elif letter in "}]":
            open_brackets = open_brackets[:-1]
            best = text[: index + 1] + _closers(open_brackets)
        elif letter == ",":
            is_key_next = open_brackets.endswith("{")
            best = text[:index] + _closers(open_brackets)
        elif letter == ":":
            is_key_next = False
    return best


def _closers(open_brackets: str) -> str:
    return "".join(_CLOSERS[letter] for letter in reversed(open_brackets))
