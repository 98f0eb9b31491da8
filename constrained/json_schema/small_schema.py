"""Recognizes JSON schemas that certainly compile within a few milliseconds, by the keywords that they use."""

from __future__ import annotations

import json
from typing import Any

from plait.constrained.specs import JsonObject, JsonSchema

MAX_CHARS = 4096
MAX_SUBSCHEMAS = 40
MAX_NESTING = 6
MAX_LISTED_VALUES = 32
MAX_COUNTS = {"minLength": 64, "maxLength": 64, "minItems": 8, "maxItems": 8}
MAX_BOUND = 1_000_000_000
BOUND_COST = 4  # subschemas that one with a minimum or maximum counts for: its range becomes a pattern
_ANNOTATIONS = frozenset(("$schema", "title", "description", "default", "$comment"))
_TYPES = frozenset(("null", "boolean", "object", "array", "string", "integer", "number"))


def is_small_schema(spec: JsonSchema | JsonObject) -> bool:
    """Returns whether the spec has few subschemas, and only keywords that are written as they are into a grammar.

    No keyword needs a proof, a validator or a pattern, and no counted repeat is large.

    >>> is_small_schema(JsonSchema({"type": "integer"})), is_small_schema(JsonSchema({"pattern": "a"}))
    (True, False)
    """
    if isinstance(spec, JsonObject):
        return True
    if spec.lenient or spec.schemas or len(spec.text) > MAX_CHARS:
        return False
    try:
        schema = json.loads(spec.text)
    except (ValueError, RecursionError):
        return False
    return 0 < _count_subschemas(schema, MAX_NESTING) <= MAX_SUBSCHEMAS


def _count_subschemas(schema: Any, nesting: int) -> int:
    """Returns the weighted number of subschemas, itself included; over MAX_SUBSCHEMAS if it has other keywords."""
    too_many = MAX_SUBSCHEMAS + 1
    if not isinstance(schema, dict) or nesting == 0:
        return too_many
    inner: list[Any] = []
    for name, value in schema.items():
        match name:
            case "properties" if isinstance(value, dict):
                inner += value.values()
            case "items":
                inner.append(value)
            case "anyOf" if isinstance(value, list):
                inner += value
            case _ if not _is_plain(name, value):
                return too_many
    if ("enum" in schema or "const" in schema) and not schema.keys() <= {"enum", "const", "type", *_ANNOTATIONS}:
        return too_many
    if len(inner) > MAX_SUBSCHEMAS:
        return too_many
    cost = BOUND_COST if {"minimum", "maximum"} & schema.keys() else 1
    return cost + sum(_count_subschemas(part, nesting - 1) for part in inner)


def _is_plain(name: str, value: Any) -> bool:
    """Returns whether a keyword without subschemas is one of those that cost little."""
    if name in _ANNOTATIONS:
        return True
    match name:
        case "type":
            return isinstance(value, str) and value in _TYPES
        case "required":
            return isinstance(value, list) and all(isinstance(entry, str) for entry in value)
        case "additionalProperties":
            return isinstance(value, bool)
        case "enum":
            return isinstance(value, list) and len(value) <= MAX_LISTED_VALUES and all(map(_is_scalar, value))
        case "const":
            return _is_scalar(value)
        case "minimum" | "maximum":
            return type(value) is int and abs(value) <= MAX_BOUND
    return name in MAX_COUNTS and type(value) is int and 0 <= value <= MAX_COUNTS[name]


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | bool) or (type(value) is int and abs(value) <= MAX_BOUND)
