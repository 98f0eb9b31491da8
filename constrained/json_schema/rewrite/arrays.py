"""Rewrite rules for keywords about all items of an array."""

from __future__ import annotations

from itertools import combinations, permutations
from math import comb, perm
from typing import Any

from plait.constrained.json_schema.rewrite.analysis import allowed_kinds, conjuncts, listed_values
from plait.constrained.json_schema.rewrite.base import SchemaObject, UnsupportedKeywords, with_all_of, without_keywords
from plait.constrained.json_schema.rewrite.document import Schema, SchemaDocument
from plait.constrained.json_schema.rewrite.enums import canonical_json
from plait.constrained.json_schema.rewrite.negation.complement import subtract

MAX_ARRANGEMENTS = 400
MAX_PLACES = 16
OPEN_PLACES = 4  # in arrays of more items, or without a bound
MAX_CASES = 64


def unique_items(schema: SchemaObject, document: SchemaDocument) -> SchemaObject | None:
    """Drops `uniqueItems` over at most one item; lists the arrays of a few listed values; else the matcher sees to it.

    Proof: an array without repetition of k listed values is an arrangement of some of them, and there are at
    most 400 within the bounds; `fold_enum` then validates each against all other keywords, which stay. Values that
    are not arrays are unaffected.

    >>> unique_items({"uniqueItems": True, "maxItems": 1}, SchemaDocument("{}"))
    {'maxItems': 1}
    """
    if "uniqueItems" not in schema:
        return None
    rest = without_keywords(schema, "uniqueItems")
    max_items = int(schema.get("maxItems", 10**9))
    if not schema["uniqueItems"] or max_items <= 1 or "array" not in allowed_kinds(schema):
        return rest
    items, fixed = schema.get("items", True), schema.get("prefixItems", [])
    if isinstance(items, list):
        items, fixed = schema.get("additionalItems", True), items
    if items is False and len(fixed) <= 1:
        return rest
    listed = listed_values(items, document) if not fixed else None
    if listed is None:
        return None
    listed = [value for value in listed if document.is_valid(items, value)]
    max_items, min_items = min(max_items, len(listed)), int(schema.get("minItems", 0))
    if sum(perm(len(listed), size) for size in range(min_items, max_items + 1)) > MAX_ARRANGEMENTS:
        return None
    arrays = [
        list(arrangement) for size in range(min_items, max_items + 1) for arrangement in permutations(listed, size)
    ]
    unique_arrays = [array for array in arrays if len({canonical_json(value) for value in array}) == len(array)]
    others = sorted(allowed_kinds(rest) - {"array", "integer", "fraction"})
    others += (
        ["number"] if "fraction" in allowed_kinds(rest) else ["integer"] if "integer" in allowed_kinds(rest) else []
    )
    if not others and schema.get("type") == "array":
        return {"enum": unique_arrays, **without_keywords(rest, "type", "items", "minItems", "maxItems")}
    return {"anyOf": [{**rest, "type": "array", "enum": unique_arrays}, {**rest, "type": others}]}


def contains(schema: SchemaObject, document: SchemaDocument) -> SchemaObject | None:
    """Replaces `contains` S by cases over the places of the items that are valid by S.

    Proof: with at most n items, k of them are valid by S exactly if those at some k places are; with a maximum, the
    items at all other places are valid by the complement of S. Arrays in which such an item comes after the first 16
    places (4 without a bound on the items; fewer for several items) are left out. A minimum of 0 without a maximum has
    no effect; before draft 2019-09, neither has any; `contains: true` only bounds the number of items.

    >>> contains({"contains": True, "maxContains": 4}, SchemaDocument("{}"))
    {'minItems': 1, 'maxItems': 4}
    """
    if not {"contains", "minContains", "maxContains"} & schema.keys():
        return None
    rest = without_keywords(schema, "contains", "minContains", "maxContains")
    has_counts = document.draft >= 2019
    min_contains = int(schema.get("minContains", 1)) if has_counts else 1
    max_contains: Any = schema.get("maxContains") if has_counts else None
    if "contains" not in schema or (min_contains == 0 and max_contains is None):
        return rest
    inner = schema["contains"]
    if inner is True or inner == {}:
        rewritten = {**rest, "minItems": max(min_contains, int(rest.get("minItems", 0)))}
        if max_contains is not None:
            rewritten["maxItems"] = min(int(max_contains), int(rest.get("maxItems", max_contains)))
        return rewritten
    bounds = [int(part["maxItems"]) for part in conjuncts(schema, document)
              if isinstance(part, dict) and "maxItems" in part]  # fmt: skip
    places = min(bounds, default=MAX_PLACES + 1)
    cases: list[SchemaObject] = [{"type": ["null", "boolean", "object", "string", "number"]}]
    if max_contains is None:
        cases += _with_some(inner, min_contains, places, document)
    else:
        items = [schema.get("items", True)] if "prefixItems" not in schema else []
        others, is_exact = subtract(items, inner, document)
        if others is None:
            reason = "its schema has no complement that can be written without not"
            raise UnsupportedKeywords(reason, "maxContains", "contains", "minContains")
        if not is_exact:
            document.narrow("arrays are left out in which other items violate it by what has no complement", "contains")
        cases += _with_exactly(inner, others, range(min_contains, int(max_contains) + 1), places, document)
    return with_all_of(rest, {"anyOf": cases})


def _with_some(inner: Schema, count: int, places: int, document: SchemaDocument) -> list[SchemaObject]:
    """Returns arrays in which `count` of the first places have an item of `inner`."""
    first = places if places <= MAX_PLACES else OPEN_PLACES
    first = next((n for n in range(first, 0, -1) if comb(n, count) <= MAX_CASES), 0)
    _report_places(first, places, document)
    return [
        {"type": "array", "prefixItems": _at(taken, inner, True), "minItems": taken[-1] + 1}
        for taken in combinations(range(first), count)
    ]


def _with_exactly(
    inner: Schema, others: Schema, counts: range, places: int, document: SchemaDocument
) -> list[SchemaObject]:
    """Returns arrays in which a number of the first places have an item of `inner`, and no other item is of it."""
    first = places if places <= MAX_PLACES else OPEN_PLACES
    cases: list[SchemaObject] = []
    for count in counts:
        reached = next((n for n in range(first, 0, -1) if comb(n, count) <= MAX_CASES - len(cases)), 0)
        if count:
            _report_places(reached, places, document)
        cases += [
            {"type": "array", "prefixItems": _at(taken, inner, others), "items": others, "minItems": len(_at(taken))}
            for taken in combinations(range(reached), count)
        ]
    return cases


def _report_places(first: int, places: int, document: SchemaDocument) -> None:
    if first < places:
        document.narrow(f"arrays in which such an item comes after the first {first} are left out", "contains")


def _at(places: tuple[int, ...], inner: Schema = True, others: Schema = True) -> list[Schema]:
    return [inner if at in places else others for at in range(max(places, default=-1) + 1)]
