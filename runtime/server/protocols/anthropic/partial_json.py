"""JSON that was cut off, closed: what is whole in it stays, what was begun is dropped.

Knows: JSON texts. Must not know: who cut them.
"""

from __future__ import annotations

import json
from typing import Any

_CLOSERS = {"{": "}", "[": "]"}


def read_partial_object(text: str) -> dict[str, Any]:
    """The object that `text` is, or is the beginning of; members that are not whole are left out.

    >>> read_partial_object('{"a": [1, 2, {"b": "x"'), read_partial_object('{"a": 1, "b')
    ({'a': [1, 2, {'b': 'x'}]}, {'a': 1})
    """
    try:
        value = json.loads(text)
    except ValueError:
        value = json.loads(_closed(text))
    return value if isinstance(value, dict) else {}


def _closed(text: str) -> str:
    """`text` up to its last place where all that is open can be closed, and closed there."""
    best, open_now = "{}", ""
    is_key_next = False
    in_string = escaped = False
    for at, letter in enumerate(text):
        if in_string:
            if escaped:
                escaped = False
            elif letter == "\\":
                escaped = True
            elif letter == '"':
                in_string = False
                if not is_key_next:
                    best = text[: at + 1] + _closers(open_now)
            continue
        if letter == '"':
            in_string = True
        elif letter in "{[":
            open_now += letter
            is_key_next = letter == "{"
            best = text[: at + 1] + _closers(open_now)
        elif letter in "}]":
            open_now = open_now[:-1]
            best = text[: at + 1] + _closers(open_now)
        elif letter == ",":
            is_key_next = open_now.endswith("{")
            best = text[:at] + _closers(open_now)
        elif letter == ":":
            is_key_next = False
    return best


def _closers(open_now: str) -> str:
    return "".join(_CLOSERS[letter] for letter in reversed(open_now))
