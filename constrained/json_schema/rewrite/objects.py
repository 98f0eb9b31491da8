"""Rewrite rules for keywords about all properties of an object."""

from __future__ import annotations

import json
from itertools import combinations, permutations
from math import comb
from typing import Any

from plait.constrained.json_schema.rewrite.analysis import conjuncts, listed_values
from plait.constrained.json_schema.rewrite.base import SchemaObject, UnsupportedKeywords, with_all_of, without_keywords
from plait.constrained.json_schema.rewrite.document import Schema, SchemaDocument
from plait.constrained.json_schema.rewrite.formats import FORMATS
from plait.constrained.json_schema.rewrite.keywords import ASSERTIONS
from plait.constrained.json_schema.rewrite.patterns import ANY, ecma_to_plain_pattern, is_narrowed, literal, matches
from plait.constrained.regex.pattern_algebra import NO_TEXT, intersect
from plait.constrained.specs import GrammarError

MAX_DEPENDENT = 12
MAX_NAMES_DEPTH = 4
MAX_SUBSETS = 64
MAX_ORDERED = 3
MAX_APPLIED = 8  # schemas for the same value, one within another
_NAME_SENSITIVE_KEYWORDS = frozenset(("patternProperties", "propertyNames", "minProperties", "maxProperties", "anyOf"))
_NOT_OF_TEXTS = frozenset(
    ("minimum", "maximum", "multipleOf", "minItems", "maxItems", "required", "properties", "items")
)
_NOT_OF_TEXTS |= {"minLength", "maxLength"}
_NOT_AN_OBJECT = {"type": ["array", "boolean", "null", "number", "string"]}


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


def property_names(schema: SchemaObject, document: SchemaDocument) -> SchemaObject | None:
    """Replaces `propertyNames` by a pattern for the names that are not listed.

    Proof: a listed name that violates `propertyNames` may not occur, so its schema is false. Any other name must match
    the pattern of the valid names. `patternProperties` with that pattern and the schema of additional properties, and
    `additionalProperties: false`, express just that; the other patterns are narrowed to the valid names, and the first
    one does without the names that another pattern or a listed name matches.

    >>> property_names({"propertyNames": {"enum": ["a"]}}, SchemaDocument("{}"))
    {'additionalProperties': False, 'patternProperties': {'^(?:a)$': True}, 'properties': {}}
    """
    if "propertyNames" not in schema:
        return None
    rest, names = without_keywords(schema, "propertyNames"), schema["propertyNames"]
    if names is True or (rest.get("additionalProperties", True) is False and "patternProperties" not in rest):
        return _forbid_failing_names(rest, names, document)
    if names is False:
        return with_all_of(rest, {"maxProperties": 0})
    try:
        allowed = _names_pattern(names, document)
        rewritten = _forbid_failing_names(rest, names, document)
        additional, listed = rest.get("additionalProperties", True), rewritten["properties"]
        others, patterns = allowed, dict[str, Schema]()
        for pattern, inner in rest.get("patternProperties", {}).items():
            if is_narrowed(pattern):
                raise GrammarError("a pattern without complement beside it is not supported")
            plain = ecma_to_plain_pattern(pattern).pattern
            patterns[_whole_ecma(intersect(allowed, plain).pattern)] = inner
            others = intersect(others, plain, negated=True).pattern
        if additional is not True and (same := [name for name in listed if matches(_whole_ecma(others), name)]):
            others = intersect(others, "|".join(map(literal, same)), negated=True).pattern
    except GrammarError as error:
        raise UnsupportedKeywords(error.reason, "propertyNames") from None
    rewritten["additionalProperties"] = False
    rewritten["patternProperties"] = {**patterns, _whole_ecma(others): additional}
    return dict(sorted(rewritten.items()))


def _whole_ecma(plain: str) -> str:
    return f"^(?:{_to_ecma(plain)})$"


def _forbid_failing_names(rest: SchemaObject, names: Schema, document: SchemaDocument) -> SchemaObject:
    """Returns `rest` with the listed names that violate `propertyNames` made impossible."""
    listed = rest.get("properties", {})
    return {**rest, "properties": {n: s if document.is_valid(names, n) else False for n, s in listed.items()}}


def _names_pattern(names: Schema, document: SchemaDocument, depth: int = 0) -> str:
    """Returns the plain pattern of the names that match `names`. Raises UnsupportedKeywords if there is none."""
    parts = [part for part in conjuncts(names, document) if isinstance(part, dict)]
    if depth >= MAX_NAMES_DEPTH or False in conjuncts(names, document):
        raise UnsupportedKeywords("its alternatives are nested too deeply or allow nothing", "propertyNames")
    listed = next((values for part in parts if (values := listed_values(part, document)) is not None), None)
    if listed is not None:
        texts = [text for text in listed if isinstance(text, str) and document.is_valid(names, text)]
        return "|".join(map(literal, texts)) or NO_TEXT
    low = max((int(part["minLength"]) for part in parts if "minLength" in part), default=0)
    high = min((int(part["maxLength"]) for part in parts if "maxLength" in part), default=None)
    patterns = [f"{ANY}{{{low},{'' if high is None else high}}}"] if low or high is not None else []
    for part in parts:
        for keyword, value in part.items():
            pattern = _names_pattern_of(keyword, value, document, depth)
            patterns += [] if pattern is None else [pattern]
    whole = patterns[0] if patterns else f"{ANY}*"
    for pattern in patterns[1:]:
        whole = intersect(whole, pattern).pattern
    return whole


def _names_pattern_of(keyword: str, value: Any, document: SchemaDocument, depth: int) -> str | None:
    """Returns the plain pattern of the names that a keyword other than lengths and lists allows; None if all."""
    match keyword:
        case "pattern":
            return ecma_to_plain_pattern(value).pattern
        case "format":
            return ecma_to_plain_pattern(f"^(?:{FORMATS[value]})$").pattern if value in FORMATS else None
        case "type":
            return None if "string" in ([value] if isinstance(value, str) else value) else NO_TEXT
        case "not" if _has_complement(value):
            return intersect(f"{ANY}*", _names_pattern(value, document, depth + 1), negated=True).pattern
        case "anyOf":
            return "|".join(f"(?:{_names_pattern(inner, document, depth + 1)})" for inner in value)
        case "oneOf" if len(value) <= MAX_NAMES_DEPTH and _has_complement(value):
            return _exactly_one([_names_pattern(inner, document, depth + 1) for inner in value])
    if keyword in ASSERTIONS - {"$ref", "allOf"} - _NOT_OF_TEXTS:
        raise UnsupportedKeywords(f"{keyword} in it is not supported", "propertyNames/" + keyword)
    return None


def _has_complement(names: Any) -> bool:
    """Returns whether the pattern of these schemas is exact, so that it may be negated."""
    text = json.dumps(names)
    return '"format"' not in text and "$ref" not in text and not is_narrowed(text)


def _exactly_one(patterns: list[str]) -> str:
    """Returns the plain pattern of the texts that match exactly one of the plain patterns."""
    cases = []
    for index, pattern in enumerate(patterns):
        for other in patterns[:index] + patterns[index + 1 :]:
            pattern = intersect(pattern, other, negated=True).pattern
        cases.append(f"(?:{pattern})")
    return "|".join(cases)


def _to_ecma(plain: str) -> str:
    return "".join(p if i == 0 else f"\\u{{{p[2:8]}}}{p[8:]}" for i, p in enumerate(plain.split("\\U")))


def count_properties(schema: SchemaObject, document: SchemaDocument) -> SchemaObject | None:
    """Replaces `minProperties` and `maxProperties` by cases over the listed names, if they are few.

    Proof: with n names listed, no patterns and no additional ones, an object has at least m properties exactly
    if it has all of some m of them, and at most m if it lacks all of some n - m. Required names always count;
    `minProperties` up to their number has no effect. With additional names there is a case for each listed name that is
    optional, here or in the schemas beside this one, and a case without these. Additional names are counted by the
    compiler, and refused from two of them on, since a repeated name would be counted twice.
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
    if min_count > len(required) + 1:
        raise UnsupportedKeywords(
            "a minimum of more than one property beyond the required ones is not supported", "minProperties"
        )
    optional = sorted(_optional_names(rest, document) - required - (set(rest.get("properties", {})) - listed))
    if optional and (min_count or max_count is not None):
        return _count_in_open_object(rest, optional, sorted(required), min_count, max_count)
    bounds = {"minProperties": min_count} if min_count else {}
    bounds |= {"maxProperties": int(max_count)} if max_count is not None else {}
    rewritten = rest | bounds
    return rewritten if rewritten != schema else None


def _count_in_open_object(
    rest: SchemaObject, optional: list[str], required: list[str], least: int, most: Any
) -> SchemaObject:
    """Returns cases: one more property, which is an optional listed one; or none of these, and additional ones."""
    if len(optional) > MAX_SUBSETS:
        raise UnsupportedKeywords(
            f"more than {MAX_SUBSETS} cases", "minProperties" if most is None else "maxProperties"
        )
    if most is not None and int(most) > len(required) + 1:
        raise UnsupportedKeywords("it is combined with optional and additional properties", "maxProperties")
    listed = rest.get("properties", {})
    none = {**listed, **dict.fromkeys(optional, False)}
    bounds: SchemaObject = {} if most is None else {"maxProperties": int(most)}
    cases = []
    for name in optional if most is None or int(most) > len(required) else ():
        others = listed if most is None else {**none, name: listed.get(name, rest.get("additionalProperties", True))}
        if most is not None and name not in listed and (rest.keys() & {"patternProperties", "additionalProperties"}):
            raise UnsupportedKeywords("it is combined with optional properties of other schemas", "maxProperties")
        cases.append({**rest, **bounds, "properties": others, "required": [*required, name]})
    if least:
        bounds["minProperties"] = least
    return {"anyOf": [*cases, {**rest, **bounds, "properties": none}]}


def _optional_names(schema: SchemaObject, document: SchemaDocument, depth: int = 0) -> set[str]:
    """Returns the names that a schema lists and allows, also in the schemas that apply to the same value."""
    if isinstance(schema, bool) or depth > MAX_APPLIED:
        return set()
    names = {name for name, inner in schema.get("properties", {}).items() if inner is not False}
    inner = [one for name in ("allOf", "anyOf", "oneOf") for one in schema.get(name, ())]
    inner += [schema[name] for name in ("if", "then", "else", "not") if name in schema]
    inner += schema.get("dependentSchemas", {}).values()
    inner += [one for one in schema.get("dependencies", {}).values() if isinstance(one, dict)]
    inner += [document.resolve_reference(schema["$ref"], "")] if "$ref" in schema else []
    return names.union(*(_optional_names(one, document, depth + 1) for one in inner))


def literal_ecma(text: str) -> str:
    """Returns `text` as an ECMA pattern."""
    return _to_ecma(literal(text))


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
