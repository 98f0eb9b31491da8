"""Rewrite rules for `unevaluatedProperties` and `unevaluatedItems`, by cases over the alternatives beside them.

A property is evaluated if a schema that applies to the object names it. Which schemas apply depends on the alternatives
that the object matches, so there is a case for each choice of alternatives. A case requires the chosen ones, and S of
everything that these and the schemas without alternatives do not evaluate.

    anyOf: [{properties: {a}}, {properties: {b}}], unevaluatedProperties: false
    is   {properties: {a}} and no others,  or  {properties: {b}} and no others,  or  both and no others
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import combinations
from typing import Any

from plait.constrained.json_schema.rewrite.base import SchemaObject, UnsupportedKeywords, with_all_of, without_keywords
from plait.constrained.json_schema.rewrite.document import Schema, SchemaDocument

MAX_CASES = 64
MAX_DEPTH = 8
MAX_COMBINED = 3  # branches of `anyOf` of which any number together may be chosen; of more, one is


@dataclass(frozen=True)
class _Case:
    """required: the chosen alternatives. names, patterns, num_items, contained: what they evaluate. is_all: they
    evaluate everything."""

    required: tuple[Schema, ...] = ()
    names: dict[str, bool] = field(default_factory=dict)
    patterns: dict[str, bool] = field(default_factory=dict)
    num_items: int = 0
    contained: tuple[Schema, ...] = ()
    is_all: bool = False

    def joined(self, other: _Case) -> _Case:
        return _Case(
            self.required + other.required,
            self.names | other.names,
            self.patterns | other.patterns,
            max(self.num_items, other.num_items),
            self.contained + other.contained,
            self.is_all or other.is_all,
        )

    def adds_to(self, other: _Case) -> bool:
        """Returns whether something is evaluated here that `other` does not evaluate."""
        has_more_names = bool(self.names.keys() - other.names.keys() or self.patterns.keys() - other.patterns.keys())
        has_more_items = self.num_items > other.num_items or bool(self.contained)
        return not other.is_all and (has_more_names or has_more_items or self.is_all)


def unevaluated_properties(schema: SchemaObject, document: SchemaDocument) -> SchemaObject | None:
    """Replaces `unevaluatedProperties` S by `additionalProperties` S, in each case of the alternatives beside it.

    Proof: if a value matches the alternatives of a case, all that these evaluate is evaluated. More may be, which only
    exempts more properties from S; so each value of a case is valid. For `oneOf`, `if` and up to three branches of
    `anyOf` the cases cover every value; of more branches, values whose properties are evaluated only by several
    of them together are left out.

    >>> unevaluated_properties({"properties": {"a": True}, "unevaluatedProperties": False}, SchemaDocument("{}"))
    {'properties': {'a': True}, 'allOf': [{'properties': {'a': True}, 'patternProperties': {}, \
'additionalProperties': False}]}
    """
    if "unevaluatedProperties" not in schema:
        return None
    rest, others = without_keywords(schema, "unevaluatedProperties"), schema["unevaluatedProperties"]
    if others is True:
        return rest

    def closed(case: _Case) -> SchemaObject:
        return {"properties": case.names, "patternProperties": case.patterns, "additionalProperties": others}

    return _in_cases(rest, "unevaluatedProperties", document, closed)


def unevaluated_items(schema: SchemaObject, document: SchemaDocument) -> SchemaObject | None:
    """Replaces `unevaluatedItems` S by `items` S behind the longest prefix, in each case of the alternatives beside it.

    Proof: as for `unevaluated_properties`. From draft 2020-12 on, an item that matches a `contains` is evaluated, so
    each item behind the prefix must match S or that schema.

    >>> unevaluated_items({"prefixItems": [True], "unevaluatedItems": False}, SchemaDocument("{}"))
    {'prefixItems': [True], 'allOf': [{'prefixItems': [True], 'items': False}]}
    """
    if "unevaluatedItems" not in schema:
        return None
    rest, others = without_keywords(schema, "unevaluatedItems"), schema["unevaluatedItems"]
    if others is True:
        return rest

    def closed(case: _Case) -> SchemaObject:
        items = {"anyOf": [*case.contained, others]} if case.contained else others
        return {"prefixItems": [True] * case.num_items, "items": items}

    return _in_cases(rest, "unevaluatedItems", document, closed)


def _in_cases(rest: SchemaObject, keyword: str, document: SchemaDocument, closed: Any) -> SchemaObject:
    found = _Cases(document, keyword).of(rest, 0, _Case())
    if len(found) == 1 and not found[0].required:
        return rest if found[0].is_all else with_all_of(rest, closed(found[0]))
    listed = [[*case.required, *([] if case.is_all else [closed(case)])] for case in found]
    return with_all_of(rest, {"anyOf": [{"allOf": parts} if parts else True for parts in listed]})


class _Cases:
    def __init__(self, document: SchemaDocument, keyword: str) -> None:
        self._document, self._keyword = document, keyword
        self._of_items = keyword == "unevaluatedItems"

    def of(self, schema: Schema, depth: int, known: _Case) -> list[_Case]:
        """Returns the cases of one schema; beyond some depth, one case that evaluates nothing.

        `known`: what is evaluated in all of them by the schemas around it.
        """
        if isinstance(schema, bool) or depth > MAX_DEPTH:
            return [_Case()]
        known = known.joined(self._always(schema, depth))
        choices = [[self._own(schema)]]
        if "$ref" in schema:
            choices.append(self.of(self._document.resolve_reference(schema["$ref"], ""), depth + 1, known))
        choices += [self.of(inner, depth + 1, known) for inner in schema.get("allOf", ())]
        choices += self._alternatives(schema, depth + 1, known)
        return reduce(self._product, choices)

    def _always(self, schema: Schema, depth: int) -> _Case:
        """Returns what a schema evaluates whatever is chosen."""
        if isinstance(schema, bool) or depth > MAX_DEPTH:
            return _Case()
        inner = list(schema.get("allOf", ()))
        inner += [self._document.resolve_reference(schema["$ref"], "")] if "$ref" in schema else []
        return reduce(_Case.joined, (self._always(one, depth + 1) for one in inner), self._own(schema))

    def _product(self, some: list[_Case], others: list[_Case]) -> list[_Case]:
        if len(some) * len(others) > MAX_CASES:
            raise UnsupportedKeywords("it is combined with too many alternatives", self._keyword)
        joined = [one.joined(other) for one in some for other in others]
        free = [case for case in joined if case.is_all and not case.required]
        return free[:1] or joined

    def _own(self, schema: SchemaObject) -> _Case:
        if not self._of_items:
            is_all = bool(schema.keys() & {"additionalProperties", "unevaluatedProperties"})
            names, patterns = (
                dict.fromkeys(schema.get(name, {}), True) for name in ("properties", "patternProperties")
            )
            return _Case(names=names, patterns=patterns, is_all=is_all)
        items, prefix = schema.get("items"), schema.get("prefixItems", ())
        is_all = "unevaluatedItems" in schema or (items is not None and not isinstance(items, list))
        if isinstance(items, list):  # drafts up to 2019-09
            prefix, is_all = items, is_all or "additionalItems" in schema
        has_contained = self._document.draft >= 2020 and "contains" in schema
        return _Case(num_items=len(prefix), contained=(schema["contains"],) if has_contained else (), is_all=is_all)

    def _alternatives(self, schema: SchemaObject, depth: int, known: _Case) -> list[list[_Case]]:
        """Returns the cases of each keyword with alternatives, without those that make no difference."""
        found: list[list[_Case]] = []
        if "anyOf" in schema:
            found.append(self._of_any(schema["anyOf"], depth, known))
        if "oneOf" in schema:
            found.append([case for one in schema["oneOf"] for case in self._requiring(one, depth, known)])
        if "if" in schema:
            condition = self._requiring(schema["if"], depth, known)
            then = self._requiring(schema.get("then", True), depth, known)
            otherwise = self._requiring(schema.get("else", True), depth, known)
            fails = _Case(required=({"not": schema["if"]},))
            found.append(self._product(condition, then) + [fails.joined(case) for case in otherwise])
        dependent = schema.get("dependentSchemas", {}) | {
            name: inner for name, inner in schema.get("dependencies", {}).items() if isinstance(inner, dict | bool)
        }
        for name, inner in dependent.items():
            present = _Case(required=({"type": "object", "required": [name]},))
            found.append([_Case(), *(present.joined(case) for case in self._requiring(inner, depth, known))])
        return [_reduced(cases, known) for cases in found]

    def _of_any(self, branches: list[Schema], depth: int, known: _Case) -> list[_Case]:
        cases = [self._requiring(branch, depth, known) for branch in branches]
        found = [case for of_branch in cases for case in of_branch]
        if len(branches) <= MAX_COMBINED:
            several = [some for size in range(2, len(cases) + 1) for some in combinations(cases, size)]
            found += [case for some in several for case in reduce(self._product, some)]
        else:
            self._document.narrow("values that only several branches together evaluate may be left out", self._keyword)
        return found

    def _requiring(self, schema: Schema, depth: int, known: _Case) -> list[_Case]:
        return [replace(case, required=(schema, *case.required)) for case in self.of(schema, depth, known)]


def _reduced(cases: list[_Case], known: _Case) -> list[_Case]:
    """Replaces the cases that evaluate nothing but what is known by one that requires nothing."""
    kept = [case for case in cases if case.adds_to(known)]
    return kept if len(kept) == len(cases) else [_Case(), *kept]
