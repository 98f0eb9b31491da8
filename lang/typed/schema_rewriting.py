"""Schemas made fit: closed objects, our patterns for formats, numbers with an end; and as a model is told of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plait.lang.typed import patterns

MAX_SAFE_INTEGER = 2**53 - 1  # what every reader of JSON holds exactly (RFC 8259, section 6)


class UnknownType(TypeError):
    """A type without a JSON schema."""


def close_schema(schema: Any) -> Any:
    """A foreign schema, such as Pydantic's, with objects closed, our patterns for formats, finite numbers, and no
    `discriminator` (OpenAPI's hint, which constrains nothing)."""
    if isinstance(schema, list):
        return [close_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    fresh = {key: _rewrite_value(close_schema, key, each) for key, each in schema.items() if key != "discriminator"}
    if schema.get("type") == "object" and "properties" in schema:
        fresh.setdefault("additionalProperties", False)
    pattern = patterns.FORMATS.get(str(schema.get("format")))
    if pattern is not None and schema.get("type", "string") == "string":
        del fresh["format"]
        fresh |= patterns.text_schema(pattern)
    if schema.get("format") == "binary":
        raise UnknownType("bytes have no JSON form here")
    return with_finite_bounds(fresh) if schema.get("type") in ("number", "integer") else fresh


def schema_for_prompt(schema: Any) -> Any:
    """A schema as a model is told of it: formats by their names, no titles, and no bounds that stand for none."""
    if isinstance(schema, list):
        return [schema_for_prompt(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    fresh = {
        keyword: _rewrite_value(schema_for_prompt, keyword, each)
        for keyword, each in schema.items()
        if keyword != "title"
    }
    for name, pattern in patterns.FORMATS.items():
        if patterns.text_schema(pattern).items() <= schema.items():
            del fresh["pattern"]
            fresh["format"] = name
    if schema.get("type") in ("number", "integer"):
        without = with_finite_bounds({"type": schema["type"]})
        fresh = {key: value for key, value in fresh.items() if key == "type" or value != without.get(key)}
    return fresh


def _rewrite_value(change: Callable[[Any], Any], keyword: str, value: Any) -> Any:
    """`value`, which stands under `keyword`, with the schemas in it changed."""
    if keyword in ("default", "enum", "const", "examples"):
        return value
    if keyword in ("properties", "$defs", "patternProperties") and isinstance(value, dict):
        return {name: change(each) for name, each in value.items()}
    return change(value)


def with_finite_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """A number's schema with a bound on each side: 1e999 is JSON, but no float, and a small model may write digits
    without end."""
    most = MAX_SAFE_INTEGER if schema["type"] == "integer" else 1e15
    low = {} if {"minimum", "exclusiveMinimum"} & schema.keys() else {"minimum": -most}
    high = {} if {"maximum", "exclusiveMaximum"} & schema.keys() else {"maximum": most}
    return schema | low | high
