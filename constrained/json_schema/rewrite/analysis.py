"""Proofs about schemas: the types they allow, the values they list, and that two schemas have no common value.

A result of False or None means "not proved", never "disproved". All work is bounded by depth.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any

from plait.constrained.json_schema.rewrite.document import Schema, SchemaDocument
from plait.constrained.json_schema.rewrite.keywords import ASSERTIONS
from plait.constrained.json_schema.rewrite.numbers import number_range
from plait.constrained.json_schema.rewrite.patterns.conversion import ecma_to_plain_patterns
from plait.constrained.json_schema.rewrite.patterns.operations import are_disjoint as are_patterns_disjoint
from plait.constrained.json_schema.rewrite.patterns.operations import is_narrowed, matches
from plait.constrained.regex.char_classes import write_literal
from plait.constrained.specs import GrammarError

KINDS = frozenset(("null", "boolean", "object", "array", "string", "integer", "fraction"))
FRACTIONS: dict[str, Any] = {"type": "number", "not": {"type": "integer"}}  # has no simpler form
MAX_DEPTH = 6
MAX_VALUES = 1000
MAX_BRANCHES = 32
_MAX_VALIDATED_VALUES = 60  # listed values that are validated to prove an enum disjoint from another schema
_OF_OBJECTS = "properties patternProperties additionalProperties propertyNames required minProperties maxProperties"
_OF_OBJECTS += " dependentRequired dependentSchemas dependencies unevaluatedProperties"
_OF_ARRAYS = "items prefixItems additionalItems contains minContains maxContains minItems maxItems uniqueItems"
_OF_ARRAYS += " unevaluatedItems"
_OF_NUMBERS = "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf"
_KEYWORDS = {  # those that only values of one kind can violate
    kind: frozenset(names.split())
    for kind, names in {
        "object": _OF_OBJECTS,
        "array": _OF_ARRAYS,
        "string": "format pattern minLength maxLength",
        "integer": _OF_NUMBERS,
        "fraction": _OF_NUMBERS,
    }.items()
}
_OF_ANY_KIND = ASSERTIONS - frozenset[str]().union(*_KEYWORDS.values())


def allowed_kinds(schema: Schema) -> frozenset[str]:
    """Returns the kinds of value that `type` allows; "number" is "integer" and "fraction", which are disjoint.

    >>> sorted(allowed_kinds({"type": "number"}))
    ['fraction', 'integer']
    """
    if isinstance(schema, bool):
        return KINDS if schema else frozenset()
    type_ = schema.get("type")
    if type_ is None:
        return KINDS
    listed = {type_} if isinstance(type_, str) else set(type_)
    return frozenset(listed - {"number"} | ({"integer", "fraction"} if "number" in listed else set()))


def conjuncts(schema: Schema, document: SchemaDocument, depth: int = 0) -> list[Schema]:
    """Returns the schemas that every value of `schema` matches: itself, its $ref target, and its allOf."""
    if isinstance(schema, bool) or depth > MAX_DEPTH:
        return [schema] if depth <= MAX_DEPTH else []
    schemas: list[Schema] = []
    if "$ref" in schema:
        schemas += conjuncts(document.resolve_reference(schema["$ref"], ""), document, depth + 1)
        if document.draft <= 7:
            return schemas
    schemas.append(schema)
    for inner in schema.get("allOf", ()):
        schemas += conjuncts(inner, document, depth + 1)
    return schemas


def holds_for_kind(kind: str, schema: Schema, document: SchemaDocument, names: Set[str] = frozenset()) -> bool:
    """Returns whether all values of a kind match a schema, objects if they have `names`; False if that is not proved.

    >>> holds_for_kind("null", {"required": ["a"]}, SchemaDocument("{}"))
    True
    """
    return _holds(kind, schema, document, names, 0)


def _holds(kind: str, schema: Schema, document: SchemaDocument, names: Set[str], depth: int) -> bool:
    if isinstance(schema, bool) or depth > MAX_DEPTH:
        return schema is True
    for keyword, value in schema.items():
        match keyword:
            case "type":
                is_met = kind in allowed_kinds(schema)
            case "required":
                is_met = kind != "object" or names >= set(value)
            case "$ref":
                is_met = _holds(kind, document.resolve_reference(value, ""), document, names, depth + 1)
            case "allOf":
                is_met = all(_holds(kind, inner, document, names, depth + 1) for inner in value)
            case "anyOf":
                is_met = any(_holds(kind, inner, document, names, depth + 1) for inner in value)
            case _:
                is_met = keyword not in _OF_ANY_KIND and keyword not in _KEYWORDS.get(kind, ())
        if not is_met:
            return False
    return True


def listed_values(schema: Schema, document: SchemaDocument) -> list[Any] | None:
    """Returns a finite list that contains every value of `schema`; None if none is apparent.

    >>> listed_values({"const": 3}, SchemaDocument("{}"))
    [3]
    """
    for part in conjuncts(schema, document):
        if isinstance(part, dict):
            if "const" in part:
                return [part["const"]]
            if isinstance(part.get("enum"), list):
                return list(part["enum"])
            for name in ("anyOf", "oneOf"):
                branches = part.get(name)
                if isinstance(branches, list) and all(isinstance(one, dict) and "const" in one for one in branches):
                    return [branch["const"] for branch in branches]
    kinds = frozenset.intersection(*(allowed_kinds(part) for part in conjuncts(schema, document)), KINDS)
    if kinds <= {"null", "boolean"}:
        return [value for kind, value in (("null", None), ("boolean", True), ("boolean", False)) if kind in kinds]
    return None


def are_disjoint(left: Schema, right: Schema, document: SchemaDocument, depth: int = 0) -> bool:
    """Returns whether no value can match both schemas; False if that is not proved.

    >>> are_disjoint({"type": "string"}, {"type": "number"}, SchemaDocument("{}"))
    True
    """
    if depth > MAX_DEPTH:
        return False
    xs, ys = conjuncts(left, document), conjuncts(right, document)
    if False in xs or False in ys:
        return True
    shared = frozenset.intersection(*(allowed_kinds(part) for part in (*xs, *ys)), KINDS)
    if not shared or _are_enums_disjoint(left, right, document) or _are_enums_disjoint(right, left, document):
        return True
    if _are_branches_disjoint(xs, right, document, depth) or _are_branches_disjoint(ys, left, document, depth):
        return True
    return all(_are_disjoint_for_kind(kind, xs, ys, document, depth) for kind in shared)


def discriminators(branches: list[Schema], document: SchemaDocument, named: str | None = None) -> list[str]:
    """Returns properties whose listed texts differ between all branches; such that all require, or the one `named`.

    Every branch must be of type object. Takes time in proportion to the branches, where comparing all pairs takes its
    square.

    >>> cat, dog = ({"type": "object", "required": ["a"], "properties": {"a": {"const": c}}} for c in ("cat", "dog"))
    >>> discriminators([cat, dog], SchemaDocument("{}"))
    ['a']
    """
    parts_of = [[part for part in conjuncts(branch, document) if isinstance(part, dict)] for branch in branches]
    if not all(any(part.get("type") == "object" for part in parts) for parts in parts_of):
        return []
    required = [
        {name for part in parts for name in part.get("required", ()) if isinstance(name, str)} for parts in parts_of
    ]
    names = [named] if named is not None else sorted(set.intersection(*required))[:8]
    return [name for name in names if _have_different_texts(parts_of, name, document)]


def _have_different_texts(parts_of: list[list[dict[str, Any]]], name: str, document: SchemaDocument) -> bool:
    seen: set[str] = set()
    for parts in parts_of:
        inner = next((part["properties"][name] for part in parts if name in part.get("properties", {})), True)
        values = listed_values(inner, document)
        if values is None or not all(isinstance(value, str) and value not in seen for value in values):
            return False
        seen.update(values)
    return True


def _are_enums_disjoint(listed: Schema, other: Schema, document: SchemaDocument) -> bool:
    values = listed_values(listed, document)
    if values is None or len(values) > MAX_VALUES:
        return False
    other_values = listed_values(other, document)
    if other_values is not None and len(values) > _MAX_VALIDATED_VALUES:
        return not {repr(value) for value in values} & {repr(value) for value in other_values} and all(
            isinstance(value, str) for value in (*values, *other_values)
        )
    return len(values) <= _MAX_VALIDATED_VALUES and not any(document.is_valid(other, value) for value in values)


def _are_branches_disjoint(parts: list[Schema], other: Schema, document: SchemaDocument, depth: int) -> bool:
    """Returns whether all branches of one `anyOf` or `oneOf` of a conjunction of `parts` are disjoint from `other`."""
    for part in parts:
        for name in ("anyOf", "oneOf") if isinstance(part, dict) else ():
            branches = part.get(name)  # type: ignore[union-attr]
            if not branches or len(branches) > MAX_BRANCHES:
                continue
            beside = [_without_branches(other_part) for other_part in parts]
            if all(are_disjoint({"allOf": [b, *beside]}, other, document, depth + 1) for b in branches):
                return True
    return False


def _without_branches(schema: Schema) -> Schema:
    """Returns what a schema says beside its `$ref`, `allOf` and alternatives."""
    if isinstance(schema, bool):
        return schema
    return {name: value for name, value in schema.items() if name not in ("$ref", "allOf", "anyOf", "oneOf")}


def _are_disjoint_for_kind(kind: str, xs: list[Schema], ys: list[Schema], document: SchemaDocument, depth: int) -> bool:
    a = [part for part in xs if isinstance(part, dict)]
    b = [part for part in ys if isinstance(part, dict)]
    required = {name for part in a + b for name in part.get("required", ()) if isinstance(name, str)}
    if any("not" in part and holds_for_kind(kind, part["not"], document, required) for part in a + b):
        return True
    match kind:
        case "string":
            return _do_bounds_cross(a + b, "minLength", "maxLength") or _are_texts_disjoint(a, b, document)
        case "integer" | "fraction":
            return number_range(a + b).is_empty
        case "array":
            return _do_bounds_cross(a + b, "minItems", "maxItems") or _are_items_disjoint(a, b, document, depth)
        case "object":
            counted = [*a, *b, {"minProperties": len(required)}]
            crossed = _do_bounds_cross(counted, "minProperties", "maxProperties")
            return crossed or _are_properties_disjoint(a, b, document, depth)
    return False


def _do_bounds_cross(parts: list[dict[str, Any]], low: str, high: str) -> bool:
    lows, highs = ([part[name] for part in parts if name in part] for name in (low, high))
    return bool(lows) and bool(highs) and max(lows) > min(highs)


def _are_texts_disjoint(a: list[dict[str, Any]], b: list[dict[str, Any]], document: SchemaDocument) -> bool:
    return any(are_patterns_disjoint(x, y) for x in _plain_patterns(a) for y in _plain_patterns(b))


def _plain_patterns(parts: list[dict[str, Any]]) -> Iterator[str]:
    for part in parts:
        if "pattern" in part and not is_narrowed(part["pattern"]):
            try:
                yield from (plain.pattern for plain in ecma_to_plain_patterns(part["pattern"]))
            except GrammarError:
                continue
        listed = [part["const"]] if "const" in part else part.get("enum", [])
        if listed and len(listed) <= _MAX_VALIDATED_VALUES and all(isinstance(text, str) for text in listed):
            yield "|".join(map(write_literal, listed))


def _are_items_disjoint(a: list[dict[str, Any]], b: list[dict[str, Any]], document: SchemaDocument, depth: int) -> bool:
    min_items = max((int(part.get("minItems", 0)) for part in a + b), default=0)
    return any(
        are_disjoint(x, y, document, depth + 1)
        for index in range(min(min_items, 16))
        for x in _items_at(a, index)
        for y in _items_at(b, index)
    )


def _items_at(parts: list[dict[str, Any]], index: int) -> Iterator[Schema]:
    for part in parts:
        listed = part.get("prefixItems", part["items"] if isinstance(part.get("items"), list) else [])
        if index < len(listed):
            yield listed[index]
        elif not isinstance(part.get("items", True), list):
            yield part.get("items", True)


def _are_properties_disjoint(
    a: list[dict[str, Any]], b: list[dict[str, Any]], document: SchemaDocument, depth: int
) -> bool:
    """Returns whether a required property has disjoint values in the two schemas."""
    names = {name for part in a + b for name in part.get("required", ()) if isinstance(name, str)}
    return any(
        are_disjoint(x, y, document, depth + 1)
        for name in sorted(names)[:64]
        for x in _property(a, name)
        for y in _property(b, name)
    )


def property_schemas(part: dict[str, Any], name: str) -> Iterator[Schema]:
    """Yields the schemas that one schema applies to the property `name`, as far as they are known.

    >>> list(property_schemas({"patternProperties": {"^a": {"type": "null"}}, "additionalProperties": False}, "ab"))
    [{'type': 'null'}]
    """
    found = [(inner, _matching(pattern, name)) for pattern, inner in part.get("patternProperties", {}).items()]
    yield from (inner for inner, is_matching in found if is_matching)
    if name in part.get("properties", {}):
        yield part["properties"][name]
    elif "additionalProperties" in part and all(is_matching is False for _, is_matching in found):
        yield part["additionalProperties"]


def _property(parts: list[dict[str, Any]], name: str) -> list[Schema]:
    return [inner for part in parts for inner in property_schemas(part, name)] or [True]


def _matching(pattern: str, name: str) -> bool | None:
    """Returns whether a pattern matches a name; None if that cannot be decided."""
    try:
        return matches(pattern, name)
    except GrammarError:
        return None
