"""Complements of keywords without subschemas: type, const, enum, pattern, and the number of properties."""

from __future__ import annotations

from itertools import combinations, pairwise
from math import comb
from typing import Any

from plait.constrained.json_schema.rewrite.analysis import FRACTIONS, KINDS, allowed_kinds
from plait.constrained.json_schema.rewrite.document import Schema
from plait.constrained.json_schema.rewrite.negation.context import Context
from plait.constrained.json_schema.rewrite.patterns.conversion import ANY, ecma_to_plain_pattern
from plait.constrained.json_schema.rewrite.patterns.operations import complement_pattern, is_narrowed, to_ecma
from plait.constrained.regex.automaton_writer import NO_TEXT
from plait.constrained.regex.pattern_algebra import intersect
from plait.constrained.specs import GrammarError

MAX_LISTED = 200
MAX_SUBSETS = 64


def negate_type(schema: dict[str, Any], context: Context) -> list[Schema]:
    kinds = frozenset.intersection(*(allowed_kinds(part) for part in context.parts), KINDS) - allowed_kinds(schema)
    if "fraction" in kinds and "integer" not in kinds and "integer" in allowed_kinds(schema):
        names = sorted(kinds - {"fraction"})
        return [*([{"type": names}] if names else []), FRACTIONS]
    numbers = ["number"] if "fraction" in kinds else ["integer"] if "integer" in kinds else []
    names = sorted(kinds - {"fraction", "integer"}) + numbers
    return [{"type": names}] if names else []


def negate_enum(listed: list[Any]) -> list[Schema] | None:
    """Returns the complement of listed values: the other kinds of value, and the rest of each listed kind.

    Texts: the pattern of every other text. Numbers: the open ranges between them.
    """
    if len(listed) > MAX_LISTED or any(isinstance(value, dict | list) for value in listed):
        return None
    texts = [value for value in listed if isinstance(value, str)]
    numbers = sorted({value for value in listed if isinstance(value, int | float) and not isinstance(value, bool)})
    rest: list[Schema] = [{"type": ["array", "object"]}]
    rest += [] if None in listed else [{"type": "null"}]
    flags = [flag for flag in (True, False) if not any(value is flag for value in listed)]
    rest += [{"enum": flags}] if flags else []
    rest.append({"type": "string", "pattern": to_ecma(complement_pattern(texts))} if texts else {"type": "string"})
    if not numbers:
        return [*rest, {"type": "number"}]
    rest.append({"type": "number", "exclusiveMaximum": numbers[0]})
    rest.append({"type": "number", "exclusiveMinimum": numbers[-1]})
    for low, high in pairwise(numbers):
        rest.append({"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high})
    return rest


def negate_pattern(pattern: str) -> list[Schema] | None:
    if is_narrowed(pattern):
        return None
    try:
        rest = intersect(f"{ANY}*", ecma_to_plain_pattern(pattern).pattern, negated=True).pattern
    except GrammarError:
        return None
    return [{"type": "string", "pattern": to_ecma(rest)}] if rest != NO_TEXT else []


def negate_count(name: str, count: int, context: Context) -> list[Schema] | None:
    """Returns objects with more of the names that they may have, or that lack more of them."""
    names = context.names()[0]
    required = {key for part in context.parts for key in part.get("required", ())}
    optional = [key for key in names if key not in required]
    size = count + 1 - len(required) if name == "maxProperties" else len(names) - count + 1
    if size <= 0 or size > len(optional):
        return [{"type": "object"}] if size <= 0 else []
    if comb(len(optional), size) > MAX_SUBSETS:
        return None
    if name == "maxProperties":
        return [{"type": "object", "required": list(some)} for some in combinations(optional, size)]
    return [{"type": "object", "properties": dict.fromkeys(some, False)} for some in combinations(optional, size)]
