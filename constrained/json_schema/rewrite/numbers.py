"""Rewrite rule for numbers that llguidance would round: it reads every number of a schema as a double.

{"type": "integer", "exclusiveMinimum": 9007199254740992} means {"type": "integer", "minimum": 9007199254740993}. The
latter bound is not a double, so the schema is refused; it is never rounded to 9007199254740992.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

from plait.constrained.json_schema.rewrite.base import SchemaObject, UnsupportedKeywords
from plait.constrained.json_schema.rewrite.document import SchemaDocument

_EXACT = 1 << 53  # every integer up to here is a double
_HIGHEST = (1 << 63) - 1  # larger maxima are clamped to this; it is not a double but is handled exactly
_LOWEST = -(1 << 63)  # as both bounds of an integer it crashes the compiler
_ROUNDED = "it is beyond 2^53 and would be rounded"


def exact_bounds(schema: SchemaObject, document: SchemaDocument) -> SchemaObject | None:
    """Keeps bounds and listed numbers that a double represents. Raises UnsupportedKeywords for others.

    Proof: for an integer x, x > b is x >= floor(b) + 1, and x < b is x <= ceil(b) - 1, which are integers; the compiler
    itself adds 1 to a double, to which that is nothing from 2^53 on.

    >>> exact_bounds({"type": "integer", "exclusiveMaximum": 9007199254740994}, SchemaDocument("{}"))
    Traceback (most recent call last):
    plait.constrained.json_schema.rewrite.base.UnsupportedKeywords: it is beyond 2^53 and would be rounded
    >>> exact_bounds({"type": "integer", "exclusiveMaximum": 9007199254740995}, SchemaDocument("{}"))
    {'type': 'integer', 'maximum': 9007199254740994}
    """
    if not all(map(_is_exact, schema.get("enum", ()))):
        raise UnsupportedKeywords(
            "it lists an integer that is outside of 64 bits or would be rounded, as most beyond 2^53 are", "enum"
        )
    rewritten = dict(schema)
    for closed, sign in (("minimum", 1), ("maximum", -1)):
        exclusive = "exclusive" + closed.capitalize()
        if _is_large(rewritten.get(exclusive)):
            if not _wants_integers(schema):
                raise UnsupportedKeywords(_ROUNDED, exclusive)
            outside = rewritten.pop(exclusive)
            inside = (math.floor(outside) if sign > 0 else math.ceil(outside)) + sign
            rewritten[closed] = (max if sign > 0 else min)(inside, rewritten.get(closed, inside))
        bound = rewritten.get(closed)
        if bound is not None and (bound <= _LOWEST or (sign > 0 and bound > _HIGHEST)):
            raise UnsupportedKeywords(
                "it is outside of 64 bits, which cannot be compiled", closed if closed in schema else exclusive
            )
        counts_as_highest = sign < 0 and _wants_integers(schema) and bound is not None and bound >= _HIGHEST
        shortened = not _wants_integers(schema) and _is_shortened(bound)
        if shortened or (_is_rounded(bound) and not counts_as_highest):
            raise UnsupportedKeywords(_ROUNDED, closed if closed in schema else exclusive)
    return rewritten if rewritten != schema else None


def _wants_integers(schema: SchemaObject) -> bool:
    type_ = schema.get("type", ())
    kinds = {type_} if isinstance(type_, str) else set(type_)
    return "integer" in kinds and "number" not in kinds


def _is_large(bound: Any) -> bool:
    return isinstance(bound, int | float) and math.isfinite(bound) and abs(bound) >= _EXACT


def _is_rounded(value: Any) -> bool:
    """Returns whether no double equals this number."""
    return isinstance(value, int) and abs(value) > _EXACT and (abs(value) >= 1 << 1023 or int(float(value)) != value)


def _is_shortened(bound: Any) -> bool:
    """Returns whether the shortest text of the double, as the compiler reads bounds of fractions, differs."""
    return (
        isinstance(bound, int) and abs(bound) > _EXACT and (_is_rounded(bound) or Decimal(repr(float(bound))) != bound)
    )


def _is_exact(value: Any) -> bool:
    """Returns whether every number in a JSON value is represented exactly."""
    if isinstance(value, dict):
        return all(map(_is_exact, value.values()))
    if isinstance(value, list):
        return all(map(_is_exact, value))
    if isinstance(value, int | float) and value <= _LOWEST:
        return False
    if isinstance(value, int) and value > _HIGHEST:  # written as the shortest digits of a double, padded with zeros
        return False
    return not _is_rounded(value) or value == _HIGHEST
