"""Rewrite rules for keywords about all properties of an object."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, permutations
from math import comb
from typing import Any, NamedTuple

from plait.constrained.json_schema.rewrite.base import SchemaObject, UnsupportedKeywords, with_all_of, without_keywords
from plait.constrained.json_schema.rewrite.document import SchemaDocument
from plait.constrained.json_schema.rewrite.patterns.operations import matches

MAX_DEPENDENT = 12
MAX_SUBSETS = 64
MAX_ORDERED = 3
MAX_APPLIED = 8  # schemas for the same value, one within another
_NAME_SENSITIVE_KEYWORDS = frozenset(("patternProperties", "propertyNames", "minProperties", "maxProperties", "anyOf"))
_NOT_AN_OBJECT = {"type": ["array", "boolean", "null", "number", "string"]}


class Beside(NamedTuple):
    """What applies to the same value as a schema. references: the ids of the `$ref` targets through which the value is
    being checked; a reference to one of them is an endless loop. names: the optional ones that are listed there."""

    references: frozenset[int] = frozenset()
    names: frozenset[str] = frozenset()

    def and_names_of(self, document: SchemaDocument, schema: SchemaObject, *but: str) -> Beside:
        """Adds the names that a schema lists without some of its keywords, if the document counts properties."""
        if not document.has_counts:
            return self
        return self._replace(names=self.names | optional_names(without_keywords(schema, *but), document))


def dependent_required(schema: SchemaObject, document: SchemaDocument) -> SchemaObject | None:
    """Replaces `dependentRequired` {a: names} by: no a, or names; for each entry.

    Proof: by cases on whether an object has a; neither side constrains other values. Before that, up to three of its
    names that `properties` does not list are added there, in every order, since listed names are generated in the
    order of `properties`.

    >>> dependent_required({"properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}}, SchemaDocument("{}"))
    {'properties': {'a': {}, 'b': {}}, 'allOf': [{'anyOf': [{'properties': {'a': False}}, {'required': ['b']}]}]}
    """
    if "dependentRequired" not in schema:
        return None
    entries = {name: needed for name, needed in schema["dependentRequired"].items() if set(needed) - {name}}
    if len(entries) > MAX_DEPENDENT:
        raise UnsupportedKeywords(f"more than {MAX_DEPENDENT} entries are not expanded", "dependentRequired")
    cases = [{"anyOf": [_without_property(name), {"required": needed}]} for name, needed in entries.items()]
    rest = without_keywords(schema, "dependentRequired")
    orders = _listed_in_every_order(rest, [name for item in entries.items() for name in (item[0], *item[1])])
    if orders is not None:
        return {"anyOf": [with_all_of(ordered, *cases) for ordered in orders]}
    return with_all_of(rest, *cases) if cases else rest


def _listed_in_every_order(schema: SchemaObject, names: list[str]) -> list[SchemaObject] | None:
    """Returns equivalent schemas that list `names` as well, one for each order of them; None if there are none.

    Proof: a name that is not listed and matches no pattern has the schema of additional properties, so
    listing it with that schema changes nothing. Not applied beside counts or `propertyNames`, because later rewrite
    rules treat listed and other names differently.
    """
    listed = schema.get("properties", {})
    new = [name for name in dict.fromkeys(names) if name not in listed]
    if not 2 <= len(new) <= MAX_ORDERED or schema.keys() & _NAME_SENSITIVE_KEYWORDS:
        return None
    inner = schema.get("additionalProperties", True)
    return [{**schema, "properties": {**listed, **dict.fromkeys(order, inner)}} for order in permutations(new)]


def dependent_schemas(schema: SchemaObject, document: SchemaDocument) -> SchemaObject | None:
    """Replaces `dependentSchemas` {a: S} by: no a, or S; for each entry.

    Proof: by cases on whether an object has a. The first case holds for a value that is not an object, as the keyword
    does.

    >>> dependent_schemas({"dependentSchemas": {"a": False}}, SchemaDocument("{}"))
    {'allOf': [{'anyOf': [{'properties': {'a': False}}, False]}]}
    """
    if "dependentSchemas" not in schema:
        return None
    entries = schema["dependentSchemas"]
    if len(entries) > MAX_DEPENDENT:
        raise UnsupportedKeywords(f"more than {MAX_DEPENDENT} entries are not expanded", "dependentSchemas")
    rest = without_keywords(schema, "dependentSchemas")
    return (
        with_all_of(rest, *({"anyOf": [_without_property(name), needed]} for name, needed in entries.items()))
        if entries
        else rest
    )


def count_properties(schema: SchemaObject, document: SchemaDocument) -> SchemaObject | None:
    """Replaces `minProperties` and `maxProperties` by cases over the listed names, if they are few.

    Proof: with n names listed, no patterns and no additional ones, an object has at least m properties exactly
    if it has all of some m of them, and at most m if it lacks all of some n - m. Required names always count;
    `minProperties` up to their number has no effect. With additional names there is a case for each set of listed names
    that are optional, here or in the schemas beside this one. Additional names are counted by the compiler; where a
    minimum needs two of them, no name is repeated, since it would be counted twice.
    """
    min_count, max_count = int(schema.get("minProperties", 0)), schema.get("maxProperties")
    if not min_count and max_count is None:
        return None
    listed = {name for name, inner in schema.get("properties", {}).items() if inner is not False}
    required = set(schema.get("required", ()))
    rest = without_keywords(schema, "minProperties", "maxProperties")
    if min_count <= len(required):
        min_count = 0
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if closed:
        return _count_in_closed_object(rest, sorted(listed), required, min_count, max_count)
    if max_count is not None and int(max_count) == 0:
        return with_all_of(
            rest, {"properties": {}, "additionalProperties": False}, *([_NOT_AN_OBJECT] if min_count else [])
        )
    names = document.names_beside | optional_names(rest, document)
    optional = sorted(names - required - (set(rest.get("properties", {})) - listed))
    if optional and (min_count or max_count is not None):
        return _count_in_open_object(rest, optional, sorted(required), min_count, max_count, document)
    bounds = {"minProperties": min_count} if min_count else {}
    bounds |= {"maxProperties": int(max_count)} if max_count is not None else {}
    rewritten = rest | bounds
    return rewritten if rewritten != schema else None


def _count_in_open_object(
    rest: SchemaObject, optional: list[str], required: list[str], least: int, most: Any, document: SchemaDocument
) -> SchemaObject:
    """Returns a case for each set of optional names: exactly these, and so many additional ones as the bounds allow.

    Without a maximum the objects that need no additional name are one case for each set of as many as are needed. If
    there are too many cases, the smallest sets are left out, but not those that need at most one additional name.
    """
    keyword = "minProperties" if most is None else "maxProperties"
    needed, room = max(0, least - len(required)), len(optional) if most is None else int(most) - len(required)
    sizes = range(min(len(optional), needed if most is None else room) + 1)
    while sum(comb(len(optional), size) for size in sizes) > MAX_SUBSETS:
        sizes = sizes[1:]
        if sizes.start >= needed:
            raise UnsupportedKeywords(f"more than {MAX_SUBSETS} cases", keyword)
    if sizes.start:
        too_many = needed - sizes.start + 1
        document.narrow(f"objects with {too_many} or more additional properties are left out", keyword)
    listed = rest.get("properties", {})
    additional = {name: _additional_schema(rest, name) for name in optional if name not in listed}
    bounds: SchemaObject = {} if most is None else {"maxProperties": int(most)}
    cases: list[SchemaObject] = []
    for size in sizes:
        for names in combinations(optional, size):
            case = {**rest, **bounds, "required": [*required, *names]}
            if most is not None or size < needed:
                others = {n: additional[n] for n in names if n in additional}  # behind those in the schema's order
                case["properties"] = {**listed, **others, **{n: False for n in optional if n not in names}}
            cases.append({**case, "minProperties": least} if size < needed else case)
    return {"anyOf": cases} if cases else with_all_of(rest, _NOT_AN_OBJECT)


def _additional_schema(schema: SchemaObject, name: str) -> Any:
    """Returns what a schema says of a name that it does not list, but for its patterns, which hold for listed names."""
    is_named = any(matches(pattern, name) for pattern in schema.get("patternProperties", {}))
    return True if is_named else schema.get("additionalProperties", True)


def optional_names(schema: SchemaObject, document: SchemaDocument) -> frozenset[str]:
    """Returns the names that a schema lists and allows, also in the schemas that apply to the same value.

    >>> optional_names({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": False}}]}, SchemaDocument("{}"))
    frozenset({'a'})
    """
    listed = (part.get("properties", {}).items() for part in _applied(schema, document, set()))
    return frozenset(name for items in listed for name, inner in items if inner is not False)


def has_counts(schema: SchemaObject, document: SchemaDocument) -> bool:
    """Returns whether a schema, or one that applies to the same value, counts the properties of objects.

    >>> has_counts({"anyOf": [{"maxProperties": 1}, True]}, SchemaDocument('{"maxProperties": 1}'))
    True
    """
    counting = {"minProperties", "maxProperties"}
    return document.has_counts and any(part.keys() & counting for part in _applied(schema, document, set()))


def _applied(schema: SchemaObject, document: SchemaDocument, seen: set[int], depth: int = 0) -> Iterator[SchemaObject]:
    """Yields a schema and, once each, those that apply to the same value."""
    if isinstance(schema, bool) or depth > MAX_APPLIED or id(schema) in seen:
        return
    seen.add(id(schema))
    yield schema
    inner = [one for name in ("allOf", "anyOf", "oneOf") for one in schema.get(name, ())]
    inner += [schema[name] for name in ("if", "then", "else", "not") if name in schema]
    inner += schema.get("dependentSchemas", {}).values()
    inner += [one for one in schema.get("dependencies", {}).values() if isinstance(one, dict)]
    inner += [document.resolve_reference(schema["$ref"], "")] if "$ref" in schema else []
    for one in inner:
        yield from _applied(one, document, seen, depth + 1)


def _count_in_closed_object(
    rest: SchemaObject, listed: list[str], required: set[str], least: int, most: Any
) -> SchemaObject:
    most = len(listed) if most is None else int(most)
    if least > len(listed) or most < len(required) or least > most:
        return with_all_of(rest, _NOT_AN_OBJECT)
    optional = [name for name in listed if name not in required]
    more, fewer = least - len(required), len(listed) - most
    if max(comb(len(optional), max(0, more)), comb(len(optional), max(0, fewer))) > MAX_SUBSETS:
        raise UnsupportedKeywords(f"more than {MAX_SUBSETS} cases", "minProperties" if more > 0 else "maxProperties")
    rewritten = rest
    if more > 0:
        present = [{"required": list(names)} for names in combinations(optional, more)]
        rewritten = with_all_of(rewritten, {"anyOf": present})
    if fewer > 0:
        lacking = [{"properties": dict.fromkeys(names, False)} for names in combinations(optional, fewer)]
        rewritten = with_all_of(rewritten, {"anyOf": lacking})
    return rewritten


def _without_property(name: str) -> SchemaObject:
    return {"properties": {name: False}}
