"""Scalars of rewritten schemas as Lark terminals, and which numbers need a pattern of our own."""

from __future__ import annotations

import json
from typing import Any

from plait.constrained.guidance.subschemas import with_inner
from plait.constrained.json_schema.emptiness import kinds_of
from plait.constrained.json_schema.rewrite.document import Schema
from plait.constrained.json_schema.rewrite.numbers import BOUNDS, closed_bounds, needs_pattern, number_range

OF_SCALARS = frozenset(("enum", "pattern", "multipleOf", "minLength", "maxLength", *BOUNDS))
_NUMERIC = frozenset(("type", *BOUNDS))
STRING_BYTE = r'([^"\\\x00-\x1F\x7F]|\\["\\bfnrt])'  # as llguidance writes the characters of a string
PLAIN_BYTE = r'[^"\\\x00-\x1F\x7F]'  # of a string that has no escape
_SIMPLE = {
    "null": '"null"',
    "boolean": "/true|false/",
    "integer": "/-?(0|[1-9][0-9]*)/",
    "number": r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
    "string": f'/"{STRING_BYTE}*"/',
}


def with_closed_bounds(schema: Any) -> Any:
    """Returns a rewritten schema whose bounds llguidance reads right, though it leaves out some numbers within them.

    >>> with_closed_bounds({"items": {"exclusiveMinimum": 0}})
    {'items': {'minimum': 1e-22}}
    """
    if not isinstance(schema, dict):
        return schema
    return with_inner(closed_bounds(schema), with_closed_bounds)


def simple_terminal(schema: dict[str, Any]) -> str | None:
    """Returns the terminal of a schema that is about one scalar type, or lists texts; None for any other.

    >>> simple_terminal({"type": "integer"}), simple_terminal({"type": "array"})
    ('/-?(0|[1-9][0-9]*)/', None)
    """
    if schema.keys() == {"enum"} and all(isinstance(value, str) for value in schema["enum"]):
        return f"/{'|'.join(regex_literal(json.dumps(text, ensure_ascii=False)) for text in schema['enum'])}/"
    kinds = kinds_of([schema])
    return _SIMPLE.get(kinds[0]) if schema.keys() == {"type"} and len(kinds) == 1 else None


def is_bounded_number(schema: dict[str, Any]) -> bool:
    """Returns whether a schema is only about numbers of one type, with bounds.

    >>> is_bounded_number({"type": "integer", "minimum": 1}), is_bounded_number({"type": "integer"})
    (True, False)
    """
    is_number = schema.get("type") in ("integer", "number", ["integer"], ["number"])
    return is_number and len(schema) > 1 and schema.keys() <= _NUMERIC


def has_own_pattern(schema: dict[str, Any]) -> bool:
    """Returns whether the numbers of a schema must be written as a pattern of our own.

    >>> has_own_pattern({"type": "number", "exclusiveMinimum": 0}), has_own_pattern({"type": "string", "minimum": 0})
    (True, False)
    """
    if schema.keys().isdisjoint((*BOUNDS, "multipleOf")):
        return False
    kinds = ["number"] if schema.get("type") == "number" else kinds_of([schema])
    return any(kind in kinds and needs_pattern(schema, is_integer=kind == "integer") for kind in ("integer", "number"))


def listed_within_bounds(schema: dict[str, Any], parts: list[dict[str, Any]]) -> Schema:
    """Returns a schema with listed values without its bounds, and without the values that violate them.

    >>> listed_within_bounds({"enum": [1, 2, "a"], "minimum": 2}, [{"enum": [1, 2, "a"], "minimum": 2}])
    {'enum': [2, 'a'], 'allOf': []}
    """
    numbers = number_range(parts)
    listed = next(part["enum"] for part in parts if "enum" in part)
    kept = [
        value
        for value in listed
        if isinstance(value, bool) or not isinstance(value, int | float) or numbers.contains(value)
    ]
    if not kept:
        return False
    without = [
        {name: value for name, value in part.items() if name not in BOUNDS and name != "allOf"} for part in parts
    ]
    return {**without[0], "enum": kept, "allOf": without[1:]}


def quoted(text: str) -> str:
    """Returns a text as a JSON string, which is a literal of Lark too.

    >>> quoted("é")
    '"é"'
    """
    return json.dumps(text, ensure_ascii=False)


def regex_literal(text: str) -> str:
    """Returns a pattern of Lark of exactly this text.

    >>> regex_literal("a.")
    'a\\\\u{2e}'
    """
    return "".join(c if c.isascii() and c.isalnum() else f"\\u{{{ord(c):x}}}" for c in text)
