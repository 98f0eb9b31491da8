"""The JSON types of the values that a rewritten schema allows, case by case."""

from __future__ import annotations

from typing import Any

from plait.constrained.json_schema.conjunctions import combine_conjunctions
from plait.constrained.json_schema.emptiness import is_of_kind, kinds_of
from plait.constrained.json_schema.rewrite.document import Schema

Case = list[dict[str, Any]]  # of schemas that all apply
_CASES = frozenset(("$ref", "anyOf", "allOf"))


def value_cases(
    schema: Schema, definitions: dict[str, Any], kinds: frozenset[str] = frozenset(("string",))
) -> tuple[list[Case], dict[str, Any]]:
    """Returns the cases of a schema, one of which a value is, and the definitions that these refer to. It has one case
    if none of its values are of one of `kinds`."""
    if schema is False:
        return [], definitions
    whole: dict[str, Any] = {} if schema is True else dict(schema)
    if kinds.isdisjoint(case_kinds([whole])):
        return [[whole]], definitions
    if whole.keys() & _CASES:
        whole = combine_conjunctions({**whole, "$defs": definitions})
        definitions = whole.pop("$defs", {})
    return [[case, *case.get("allOf", ())] for case in whole.get("anyOf", [whole])], definitions


def value_kinds(schema: Schema, definitions: dict[str, Any]) -> frozenset[str]:
    """Returns the types of the values of a schema.

    >>> value_kinds({"anyOf": [{"type": "null"}, {"enum": [1]}]}, {}) == {"null", "number"}
    True
    """
    return frozenset(kind for case in value_cases(schema, definitions)[0] for kind in case_kinds(case))


def case_kinds(case: Case) -> list[str]:
    """Returns the types of the values of one case, which are few if they are listed."""
    kinds, listed = kinds_of(case), next((part["enum"] for part in case if "enum" in part), None)
    if listed is None:
        return kinds
    return [kind for kind in kinds if any(is_of_kind(value, [kind]) for value in listed)]
