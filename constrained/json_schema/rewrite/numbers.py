"""Rewrite rule for numbers that llguidance would round: it reads every number of a schema as a double.

{"type": "integer", "exclusiveMinimum": 9007199254740992} means {"type": "integer", "minimum": 9007199254740993}. The
latter bound is not a double, so the schema is refused; it is never rounded to 9007199254740992. A bound of fractions is
rounded towards the inside of the range, which leaves out the numbers between the two.
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
_LARGEST = (1 << 63) - 1024  # the largest bound of fractions that is compiled
_OUTSIDE = "it is outside of 64 bits, which cannot be compiled"
_ROUNDED = "it is beyond 2^53 and would be rounded"


def exact_bounds(schema: SchemaObject, document: SchemaDocument) -> SchemaObject | None:
    """Keeps bounds and listed numbers that a double represents, and rounds other bounds of fractions inwards.

    Larger bounds of fractions become +-`_LARGEST`. Raises UnsupportedKeywords for other bounds of integers. Proof: for
    an integer x, x > b is x >= floor(b) + 1, and x < b is x <= ceil(b) - 1, which are integers; the compiler itself
    adds 1 to a double, to which that is nothing from 2^53 on. A number within the rounded bound is within the bound.

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
        try:
            if _wants_integers(schema):
                _bound_integers(rewritten, closed, exclusive, sign)
            else:
                _bound_fractions(rewritten, closed, exclusive, sign)
        except ValueError as error:
            raise UnsupportedKeywords(str(error), closed if closed in schema else exclusive) from None
    return rewritten if rewritten != schema else None


def _bound_integers(schema: SchemaObject, closed: str, exclusive: str, sign: int) -> None:
    """Makes a large exclusive bound a closed one. Raises ValueError if a bound cannot be compiled."""
    if _is_large(schema.get(exclusive)):
        outside = schema.pop(exclusive)
        inside = (math.floor(outside) if sign > 0 else math.ceil(outside)) + sign
        schema[closed] = (max if sign > 0 else min)(inside, schema.get(closed, inside))
    bound: Any = schema.get(closed)
    if bound is not None and (bound <= _LOWEST or (sign > 0 and bound > _HIGHEST)):
        raise ValueError(_OUTSIDE)
    if _is_rounded(bound) and not (sign < 0 and bound >= _HIGHEST):
        raise ValueError(_ROUNDED)


def _bound_fractions(schema: SchemaObject, closed: str, exclusive: str, sign: int) -> None:
    """Rounds large bounds to the next double within, at most `_LARGEST` from 0. Raises ValueError if there is none."""
    bounds = [(schema[name], name == exclusive) for name in (closed, exclusive) if _is_large(schema.get(name))]
    if not bounds:
        return
    inside = [_rounded_inwards(bound, sign, is_exclusive) for bound, is_exclusive in bounds]
    inside += [] if _is_large(schema.get(closed)) or closed not in schema else [schema[closed]]
    bound = (max if sign > 0 else min)(inside)
    if bound * sign > _LARGEST:
        raise ValueError(_OUTSIDE)
    if _is_large(schema.get(exclusive)):
        del schema[exclusive]
    schema[closed] = bound if bound * sign >= -_LARGEST else -_LARGEST * sign


def _wants_integers(schema: SchemaObject) -> bool:
    type_ = schema.get("type", ())
    kinds = {type_} if isinstance(type_, str) else set(type_)
    return "integer" in kinds and "number" not in kinds


def _is_large(bound: Any) -> bool:
    return isinstance(bound, int | float) and math.isfinite(bound) and abs(bound) >= _EXACT


def _is_rounded(value: Any) -> bool:
    """Returns whether no double equals this number."""
    return isinstance(value, int) and abs(value) > _EXACT and (abs(value) >= 1 << 1023 or int(float(value)) != value)


def _rounded_inwards(bound: Any, sign: int, is_exclusive: bool) -> Any:
    """Returns the nearest double whose shortest text, as the compiler reads it, is at least the bound (`sign` 1) or at
    most (-1), and not equal to an exclusive one."""
    if abs(bound) >= 1 << 1023:
        return bound
    rounded = float(bound)
    while (distance := (Decimal(repr(rounded)) - Decimal(bound)) * sign) < 0 or (is_exclusive and not distance):
        rounded = math.nextafter(rounded, math.inf * sign)
    return int(rounded)


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
