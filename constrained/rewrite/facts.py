"""What can be proved of schemas: the types they leave, the values they list, and that two share no value.

Knows: single keywords, and the conjunction of schemas. Must not know: how anything is rewritten. "False" and
"None" mean "not proved", never "disproved"; all work is bounded by depth.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from plait.constrained.rewrite.document import Document, Schema
from plait.constrained.rewrite.patterns import disjoint as patterns_disjoint
from plait.constrained.rewrite.patterns import literal, matches, plain_of
from plait.constrained.specs import GrammarError

KINDS = frozenset(("null", "boolean", "object", "array", "string", "integer", "fraction"))
MAX_DEPTH = 6
MAX_VALUES = 1000
_TRIES = 60  # values that are shown to a full validator to tell an enum from another schema


def kinds(schema: Schema) -> frozenset[str]:
    """The kinds of value that `type` leaves; "number" is "integer" and "fraction", which share no value.

    >>> sorted(kinds({"type": "number"}))
    ['fraction', 'integer']
    """
    if isinstance(schema, bool):
        return KINDS if schema else frozenset()
    named = schema.get("type")
    if named is None:
        return KINDS
    listed = {named} if isinstance(named, str) else set(named)
    return frozenset(listed - {"number"} | ({"integer", "fraction"} if "number" in listed else set()))


def conjuncts(schema: Schema, document: Document, depth: int = 0) -> list[Schema]:
    """Schemas that each value of `schema` is valid by: itself, what it refers to, and all of its allOf."""
    if isinstance(schema, bool) or depth > MAX_DEPTH:
        return [schema] if depth <= MAX_DEPTH else []
    found: list[Schema] = []
    if "$ref" in schema:
        found += conjuncts(document.target(schema["$ref"], ""), document, depth + 1)
        if document.draft <= 7:
            return found
    found.append(schema)
    for inner in schema.get("allOf", ()):
        found += conjuncts(inner, document, depth + 1)
    return found


def values(schema: Schema, document: Document) -> list[Any] | None:
    """A finite list that holds every value of `schema`; None where there is none to be seen.

    >>> values({"const": 3}, Document("{}"))
    [3]
    """
    for part in conjuncts(schema, document):
        if isinstance(part, dict):
            if "const" in part:
                return [part["const"]]
            if isinstance(part.get("enum"), list):
                return list(part["enum"])
    left = frozenset.intersection(*(kinds(part) for part in conjuncts(schema, document)), KINDS)
    if left <= {"null", "boolean"}:
        return [value for kind, value in (("null", None), ("boolean", True), ("boolean", False)) if kind in left]
    return None


def disjoint(left: Schema, right: Schema, document: Document, depth: int = 0) -> bool:
    """Whether it is proved that no value is valid by both.

    >>> disjoint({"type": "string"}, {"type": "number"}, Document("{}"))
    True
    """
    if depth > MAX_DEPTH:
        return False
    xs, ys = conjuncts(left, document), conjuncts(right, document)
    if False in xs or False in ys:
        return True
    shared = frozenset.intersection(*(kinds(part) for part in (*xs, *ys)), KINDS)
    if not shared or _listed_apart(left, right, document) or _listed_apart(right, left, document):
        return True
    if _branches_apart(xs, right, document, depth) or _branches_apart(ys, left, document, depth):
        return True
    return all(_kind_apart(kind, xs, ys, document, depth) for kind in shared)


def _listed_apart(listed: Schema, other: Schema, document: Document) -> bool:
    found = values(listed, document)
    if found is None or len(found) > MAX_VALUES:
        return False
    against = values(other, document)
    if against is not None and len(found) > _TRIES:
        return not {repr(value) for value in found} & {repr(value) for value in against} and all(
            isinstance(value, str) for value in (*found, *against)
        )
    return len(found) <= _TRIES and not any(document.is_valid(other, value) for value in found)


def _branches_apart(parts: list[Schema], other: Schema, document: Document, depth: int) -> bool:
    for part in parts:
        for name in ("anyOf", "oneOf") if isinstance(part, dict) else ():
            branches = part.get(name)  # type: ignore[union-attr]
            if branches and len(branches) <= 16 and all(disjoint(b, other, document, depth + 1) for b in branches):
                return True
    return False


def _kind_apart(kind: str, xs: list[Schema], ys: list[Schema], document: Document, depth: int) -> bool:
    a = [part for part in xs if isinstance(part, dict)]
    b = [part for part in ys if isinstance(part, dict)]
    match kind:
        case "string":
            return _crossed(a + b, "minLength", "maxLength") or _texts_apart(a, b, document)
        case "integer" | "fraction":
            return _ranges_apart(a + b)
        case "array":
            return _crossed(a + b, "minItems", "maxItems") or _items_apart(a, b, document, depth)
        case "object":
            crossed = _crossed(a + b, "minProperties", "maxProperties")
            return crossed or _properties_apart(a, b, document, depth)
    return False


def _crossed(parts: list[dict[str, Any]], low: str, high: str) -> bool:
    lows, highs = ([part[name] for part in parts if name in part] for name in (low, high))
    return bool(lows) and bool(highs) and max(lows) > min(highs)


def _ranges_apart(parts: list[dict[str, Any]]) -> bool:
    lows = [(part["minimum"], False) for part in parts if "minimum" in part]
    highs = [(part["maximum"], False) for part in parts if "maximum" in part]
    for part in parts:
        for name, bounds, closed in (("exclusiveMinimum", lows, "minimum"), ("exclusiveMaximum", highs, "maximum")):
            bound = part.get(name)
            if bound is True and closed in part:
                bounds.append((part[closed], True))
            elif bound is not None and not isinstance(bound, bool):
                bounds.append((bound, True))
    return any(low > high or (low == high and (a or b)) for low, a in lows for high, b in highs)


def _texts_apart(a: list[dict[str, Any]], b: list[dict[str, Any]], document: Document) -> bool:
    return any(patterns_disjoint(x, y) for x in _plain_patterns(a) for y in _plain_patterns(b))


def _plain_patterns(parts: list[dict[str, Any]]) -> Iterator[str]:
    for part in parts:
        if "pattern" in part:
            try:
                yield plain_of(part["pattern"]).pattern
            except GrammarError:
                continue
        listed = [part["const"]] if "const" in part else part.get("enum", [])
        if listed and len(listed) <= _TRIES and all(isinstance(text, str) for text in listed):
            yield "|".join(literal(text) for text in listed)


def _items_apart(a: list[dict[str, Any]], b: list[dict[str, Any]], document: Document, depth: int) -> bool:
    least = max((int(part.get("minItems", 0)) for part in a + b), default=0)
    return any(
        disjoint(x, y, document, depth + 1)
        for index in range(min(least, 16))
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


def _properties_apart(a: list[dict[str, Any]], b: list[dict[str, Any]], document: Document, depth: int) -> bool:
    """A property that either side requires, and whose values on the two sides share none."""
    names = {name for part in a + b for name in part.get("required", ()) if isinstance(name, str)}
    return any(
        disjoint(x, y, document, depth + 1)
        for name in sorted(names)[:64]
        for x in _property(a, name)
        for y in _property(b, name)
    )


def _property(parts: list[dict[str, Any]], name: str) -> Iterator[Schema]:
    for part in parts:
        matching = [s for pattern, s in part.get("patternProperties", {}).items() if _may_match(pattern, name)]
        if name in part.get("properties", {}):
            yield part["properties"][name]
        elif not matching and "additionalProperties" in part:
            yield part["additionalProperties"]


def _may_match(pattern: str, name: str) -> bool:
    try:
        return matches(pattern, name)
    except GrammarError:
        return True
