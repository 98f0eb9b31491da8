"""Rewrites JSON schemas: for constraints (closed objects, patterns, finite numbers) and for prompts (shorter)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plait.lang.typed import patterns

MAX_SAFE_INTEGER = 2**53 - 1  # the largest integer that every JSON parser represents exactly (RFC 8259, section 6)


class UnknownType(TypeError):
    """The type has no JSON schema here."""


def close_schema(schema: Any) -> Any:
    """Returns a schema from elsewhere, such as Pydantic, as a constraint: objects are closed, formats become patterns,
    numbers get bounds, and `discriminator` (a hint of OpenAPI without effect) is dropped.

    Raises UnknownType for formats, such as those of bytes, whose texts cannot all be read.
    """
    if isinstance(schema, list):
        return [close_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _rewrite_value(close_schema, key, value) for key, value in schema.items() if key != "discriminator"}
    if schema.get("type") == "object" and "properties" in schema:
        closed.setdefault("additionalProperties", False)
    if isinstance(schema.get("format"), str) and schema.get("type", "string") == "string":
        closed |= _pattern_of_format(closed.pop("format"), "pattern" in schema)
    return with_finite_bounds(closed) if schema.get("type") in ("number", "integer") else closed


def _pattern_of_format(name: str, has_pattern: bool) -> dict[str, str]:
    """Returns the keywords that replace a `format`; a schema that has a pattern keeps it alone."""
    if has_pattern or name in patterns.FREE_FORMATS:
        return {}
    if name == "binary":
        raise UnknownType("bytes cannot be written as JSON here")
    if name not in patterns.FORMATS:
        raise UnknownType(f"a constraint cannot ensure that a text of the format {name!r} can be read; use str")
    return patterns.text_schema(patterns.FORMATS[name])


def schema_for_prompt(schema: Any) -> Any:
    """Returns a schema as it is shown to a model: `format` names instead of patterns, no titles, no default bounds."""
    if isinstance(schema, list):
        return [schema_for_prompt(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    shown = {
        keyword: _rewrite_value(schema_for_prompt, keyword, value)
        for keyword, value in schema.items()
        if keyword != "title"
    }
    for name, pattern in patterns.FORMATS.items():
        if patterns.text_schema(pattern).items() <= schema.items():
            del shown["pattern"]
            shown["format"] = name
    if schema.get("type") in ("number", "integer"):
        default_bounds = with_finite_bounds({"type": schema["type"]})
        shown = {key: value for key, value in shown.items() if key == "type" or value != default_bounds.get(key)}
    return shown


def _rewrite_value(rewrite: Callable[[Any], Any], keyword: str, value: Any) -> Any:
    """Applies `rewrite` to the schemas in `value`, the value of `keyword`."""
    if keyword in ("default", "enum", "const", "examples"):
        return value
    if keyword in ("properties", "$defs", "patternProperties") and isinstance(value, dict):
        return {name: rewrite(schema) for name, schema in value.items()}
    return rewrite(value)


def with_finite_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a number's schema with a lower and an upper bound: 1e999 is valid JSON but not a float, and a small model
    may write digits without end."""
    limit = MAX_SAFE_INTEGER if schema["type"] == "integer" else 1e15
    low = {} if {"minimum", "exclusiveMinimum"} & schema.keys() else {"minimum": -limit}
    high = {} if {"maximum", "exclusiveMaximum"} & schema.keys() else {"maximum": limit}
    return schema | low | high
