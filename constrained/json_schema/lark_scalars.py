"""Scalars of rewritten schemas as Lark terminals, and which numbers need a pattern of our own."""

from __future__ import annotations

import json
import re
from typing import Any

from plait.constrained.json_schema.emptiness import Emptiness, kinds_of
from plait.constrained.json_schema.number_patterns import fractions
from plait.constrained.json_schema.rewrite.document import Schema
from plait.constrained.json_schema.rewrite.enums import has_control_character
from plait.constrained.json_schema.rewrite.numbers import (
    BOUNDS,
    NumberRange,
    closed_bounds,
    needs_pattern,
    number_range,
)
from plait.constrained.json_schema.subschemas import parts_of, with_inner
from plait.constrained.specs import GrammarError

OF_SCALARS = frozenset(("enum", "pattern", "multipleOf", "minLength", "maxLength", *BOUNDS))
_NUMERIC = frozenset(("type", *BOUNDS))
STRING_BYTE = r'([^"\\\x00-\x1F\x7F]|\\["\\bfnrt])'  # as llguidance writes the characters of a string
PLAIN_BYTE = r'[^"\\\x00-\x1F\x7F]'  # of a string that has no escape
_CODE = r"\\U000000(?:0[0-7bef]|1[0-9a-f]|7f)"  # of a control character without a short escape
_UNWRITABLE = re.compile(rf"\[{_CODE}\]|(?P<other>\[[^\]]*\])|{_CODE}")
_UNWRITABLE_IN_JSON = re.compile(rf"\\{_CODE}")
_NO_CHARACTER = r"[\U00000000-\U00000001]"  # no string has one of them
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


def may_have_unwritable(text: str) -> bool:
    """Returns whether a rewritten schema, as JSON, may have patterns that `with_writable_patterns` changes."""
    return _UNWRITABLE_IN_JSON.search(text) is not None


def with_writable_patterns(schema: Any) -> Any:
    """Returns a rewritten schema in whose patterns a control character that no string can have matches nothing.

    Where it is no member of a larger class, llguidance would leave it out and go on with what follows it.

    >>> with_writable_patterns({"pattern": r"^(?:\\U00000000a|[\\U00000000b])$"})["pattern"]
    '^(?:[\\\\U00000000-\\\\U00000001]a|[\\\\U00000000b])$'
    """
    if not isinstance(schema, dict):
        return schema
    out = with_inner(schema, with_writable_patterns)
    if "pattern" in out:
        out["pattern"] = _writable(out["pattern"])
    if "patternProperties" in out:
        out["patternProperties"] = {_writable(name): inner for name, inner in out["patternProperties"].items()}
    return out


def _writable(pattern: str) -> str:
    return _UNWRITABLE.sub(lambda found: found[0] if found["other"] else _NO_CHARACTER, pattern)


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
    """Returns whether a schema is only about numbers of one type, with bounds or for fractions.

    >>> is_bounded_number({"type": "integer", "minimum": 1}), is_bounded_number({"type": "integer"})
    (True, False)
    """
    kinds = kinds_of([schema]) if "type" in schema and schema.keys() <= _NUMERIC else []
    return kinds == ["fraction"] or (len(schema) > 1 and kinds in (["integer"], ["number"]))


def has_own_pattern(schema: dict[str, Any]) -> bool:
    """Returns whether the numbers or listed texts of a schema must be written as a pattern of our own.

    >>> has_own_pattern({"type": "number", "exclusiveMinimum": 0}), has_own_pattern({"type": "string", "minimum": 0})
    (True, False)
    """
    if is_beyond_llguidance(schema):
        return True
    if schema.keys().isdisjoint((*BOUNDS, "multipleOf")):
        return False
    kinds = ["number"] if schema.get("type") == "number" else kinds_of([schema])
    return any(kind in kinds and needs_pattern(schema, is_integer=kind == "integer") for kind in ("integer", "number"))


def is_beyond_llguidance(schema: dict[str, Any]) -> bool:
    """Returns whether a schema, those in it left aside, has fractions or listed texts that only we can write."""
    type_ = schema.get("type", ())
    return type_ == "fraction" or "fraction" in type_ or any(map(has_control_character, schema.get("enum", ())))


def check_fallback(schema: dict[str, Any], reason: str) -> None:
    """Raises GrammarError, with the reason why no rules were written, if llguidance alone cannot write the values."""
    for body in (schema, *schema.get("$defs", {}).values()):
        if any(map(is_beyond_llguidance, parts_of(body))):
            raise GrammarError(reason, "")


def number_terminal(parts: list[dict[str, Any]], kind: str) -> str | None:
    """Returns the expression, as part of a terminal, of the numbers of one type within bounds; None if there are none.

    >>> number_terminal([{"minimum": 8}], "integer")
    '/([8-9]|[1-9][0-9]+)/'
    """
    numbers = number_range(parts)
    pattern = numbers.pattern(is_integer=kind == "integer")
    if pattern is None or kind != "fraction":
        return pattern and f"/{pattern}/"
    if numbers == NumberRange():
        return f"/{fractions()}/"
    return f"/{pattern}/ & /{fractions()}/" if numbers.has_fraction() else None


def listed_within_bounds(schema: dict[str, Any], parts: list[dict[str, Any]]) -> Schema:
    """Returns a schema with listed values without its bounds and type, and without the values that violate them.

    Of a schema without listed arrays and objects only the values are left.

    >>> listed_within_bounds({"enum": [1, 2, "a"], "minimum": 2}, [{"enum": [1, 2, "a"], "minimum": 2}])
    {'enum': [2, 'a']}
    """
    listed = next(part["enum"] for part in parts if "enum" in part)
    known = Emptiness({})
    about = [{name: value for name, value in part.items() if name != "allOf"} for part in parts]
    kept = [value for value in listed if all(known.admits(part, value) for part in about)]
    if not kept:
        return False
    if not any(isinstance(value, list | dict) for value in kept):
        return {"enum": kept}
    without = [
        {name: value for name, value in part.items() if name not in _NUMERIC and name != "allOf"} for part in parts
    ]
    return {**without[0], "enum": kept, "allOf": without[1:]}


def quoted(text: str) -> str:
    """Returns a text as a literal of Lark: a JSON string, in which llguidance takes no DEL as it is.

    >>> quoted("é")
    '"é"'
    """
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def regex_literal(text: str) -> str:
    """Returns a pattern of Lark of exactly this text.

    >>> regex_literal("a.")
    'a\\\\u{2e}'
    """
    return "".join(c if c.isascii() and c.isalnum() else f"\\u{{{ord(c):x}}}" for c in text)
