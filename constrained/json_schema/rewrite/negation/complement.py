"""Complements of schemas, written without `not` where possible: of all values, or of the values of other schemas.

The negation of a conjunction of keywords is the disjunction of their negations (De Morgan). If one keyword has no
complement, neither has the schema. Where the value is known to match other schemas, a keyword that these imply is never
violated, and violations that they exclude are left out.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

from plait.constrained.json_schema.rewrite.analysis import are_disjoint, listed_values
from plait.constrained.json_schema.rewrite.document import Schema, SchemaDocument
from plait.constrained.json_schema.rewrite.keywords import ASSERTIONS
from plait.constrained.json_schema.rewrite.negation.context import Context, flattened
from plait.constrained.json_schema.rewrite.negation.simple_keywords import (
    MAX_LISTED,
    negate_count,
    negate_enum,
    negate_pattern,
    negate_type,
)
from plait.constrained.json_schema.rewrite.patterns.operations import matches
from plait.constrained.specs import GrammarError

MAX_DEPTH = 8
MAX_ONE_OF = 16
MAX_NAMES = 200


def subtract(branch: list[Schema], other: Schema, document: SchemaDocument) -> tuple[Schema | None, bool]:
    """Returns a schema that, together with all of `branch`, has the values that do not match `other`, None if unknown;
    and whether it has all of them. If not, values are left out that violate `other` only by what has no complement.

    >>> a, b = ({"type": "object", "additionalProperties": False, "properties": {n: {"format": "uri"}}} for n in "ab")
    >>> subtract([a], b, SchemaDocument("{}"))
    ({'anyOf': [{'type': 'object', 'required': ['a']}]}, False)
    """
    listed = listed_values({"allOf": branch}, document)
    if listed is not None and len(listed) <= MAX_LISTED:
        rest = [value for value in listed if not document.is_valid(other, value)]
        return {"enum": rest} if rest else False, True
    context = Context(document, flattened(branch, document))
    exact = _negate(other, context)
    if exact is not None:
        return exact, True
    partial = _negate(other, replace(context, is_partial=True))
    return None if partial is False else partial, False


def negate(schema: Schema, document: SchemaDocument) -> Schema | None:
    """Returns a schema of exactly the values that do not match `schema`; None if none is known.

    >>> negate({"required": ["a"]}, SchemaDocument("{}"))
    {'anyOf': [{'type': ['object'], 'properties': {'a': False}}]}
    """
    return _negate(schema, Context(document))


def _negate(schema: Schema, context: Context) -> Schema | None:
    if isinstance(schema, bool):
        return not schema
    if context.depth > MAX_DEPTH:
        return None
    context = replace(context, depth=context.depth + 1)
    if context.excludes(schema):
        return True
    if "$ref" in schema and context.document.draft <= 7:
        if context.implies(schema, "$ref"):
            return False
        return _negate(context.document.resolve_reference(schema["$ref"], ""), context)
    alternatives: list[Schema] = []
    for name, value in schema.items():
        if name not in ASSERTIONS or context.implies(schema, name):
            continue
        negations = _negate_keyword(name, value, schema, context)
        if negations is not None:
            alternatives += negations
        elif not context.is_partial:
            return None
    if any(alternative is True for alternative in alternatives):
        return True
    alternatives = [one for one in alternatives if one is not False and not context.excludes(one)]
    if not any({"minProperties", "maxProperties"} & part.keys() for part in context.parts):
        alternatives = _merge_absent(alternatives)
    return {"anyOf": alternatives} if alternatives else False


def _merge_absent(alternatives: list[Schema]) -> list[Schema]:
    """Joins two alternatives into one: objects without a name, and objects in which it has another schema.

    Each that is joined halves the number of cases that the compiler has to combine.
    """
    absent = {_absent_name(one) for one in alternatives}
    present = {name: one for one in alternatives if (name := _required_name(one)) is not None and name in absent}
    joined = [
        one
        for one in alternatives
        if _absent_name(one) not in present and not any(one is other for other in present.values())
    ]
    return [*joined, *({"type": "object", "properties": _properties(one)} for one in present.values())]


def _properties(schema: Schema) -> Any:
    return {} if isinstance(schema, bool) else schema.get("properties", {})


def _absent_name(schema: Schema) -> str | None:
    """Returns the name if `schema` is about objects without a property, as `required` is negated."""
    if not isinstance(schema, dict) or schema.keys() != {"type", "properties"} or len(schema["properties"]) != 1:
        return None
    if schema["type"] not in ("object", ["object"]):
        return None
    return next((name for name, inner in schema["properties"].items() if inner is False), None)


def _required_name(schema: Schema) -> str | None:
    """Returns the name if `schema` is about objects with a certain property, as `_violating_properties` writes them."""
    if not isinstance(schema, dict) or schema.get("type") != "object" or len(schema.get("required", ())) != 1:
        return None
    name = schema["required"][0]
    has_others = schema.keys() - {"type", "required", "properties"} or schema.get("properties", {}).keys() - {name}
    return None if has_others else name


def _negate_keyword(name: str, value: Any, schema: dict[str, Any], context: Context) -> list[Schema] | None:
    """Returns schemas of the values that violate one keyword; [] if there are none, None if they cannot be written.

    type: the other kinds of value. const, enum: see `negate_enum`. minLength n: shorter texts; likewise the other
    bounds, each of which constrains one kind of value, so only values of that kind violate it. required: an object
    without one of the names. pattern: a text that does not match, by automata. Properties, items: see the functions.
    allOf: a violation of any branch; anyOf: of all branches, and oneOf too if they are disjoint; not: the schema
    itself; $ref: a violation of its target; if, then, else: of `then` where the condition holds, of `else` elsewhere.
    """
    match name:
        case "type":
            return negate_type(schema, context)
        case "const" | "enum":
            return negate_enum([value] if name == "const" else value)
        case "minProperties" | "maxProperties" if context.names()[1]:
            return negate_count(name, int(value), context)
        case "minLength" | "minItems" | "minProperties":
            kind = {"minLength": "string", "minItems": "array", "minProperties": "object"}[name]
            return [{"type": kind, name.replace("min", "max"): int(value) - 1}] if value >= 1 else []
        case "maxLength" | "maxItems" | "maxProperties":
            kind = {"maxLength": "string", "maxItems": "array", "maxProperties": "object"}[name]
            return [{"type": kind, name.replace("max", "min"): int(value) + 1}]
        case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
            if isinstance(value, bool) or isinstance(schema.get("exclusive" + name.capitalize()), bool):
                return None
            other = {"minimum": "exclusiveMaximum", "maximum": "exclusiveMinimum"}
            other |= {"exclusiveMinimum": "maximum", "exclusiveMaximum": "minimum"}
            return [{"type": "number", other[name]: value}]
        case "required":
            return [{"type": ["object"], "properties": {key: False}} for key in value]
        case "pattern":
            return negate_pattern(value)
        case "uniqueItems":
            return [] if not value else None
        case "properties" | "patternProperties" | "additionalProperties" | "propertyNames" | "dependentRequired":
            return _negate_object_keyword(name, value, schema, context)
        case "items" | "prefixItems" | "additionalItems" | "contains" | "minContains" | "maxContains":
            return _negate_array_keyword(name, value, schema, context)
        case "allOf" | "anyOf" | "oneOf" | "not" | "$ref":
            return _negate_subschemas(name, value, context)
        case "if" | "then" | "else":
            return _negate_condition(schema, context) if name == "if" else []
    return None


def _negate_object_keyword(name: str, value: Any, schema: dict[str, Any], context: Context) -> list[Schema] | None:
    """properties: an object has one of them, with a value that violates its schema. patternProperties,
    additionalProperties: it has a name to which one applies, with such a value. propertyNames: it has a name that
    violates it. dependentRequired: it has the name and lacks another one. The names are those that the context
    lists; if it allows others, their violations are unknown."""
    if name == "properties":
        return _violating_properties(list(value.items()), context)
    if name == "dependentRequired":
        return [
            {"type": "object", "required": [key], "properties": {other: False}}
            for key, needed in value.items()
            for other in needed
        ]
    names, is_closed = context.names()
    if value is True or value == {}:
        return []
    if (not is_closed and not context.is_partial) or len(names) > MAX_NAMES:
        return None
    try:
        if name == "propertyNames":
            failing = [key for key in names if not context.document.is_valid(value, key)]
            return [{"type": "object", "required": [key]} for key in failing]
        patterns = schema.get("patternProperties", {})
        if name == "patternProperties":
            applied = [(key, inner) for pattern, inner in value.items() for key in names if matches(pattern, key)]
        else:
            others = [key for key in names if key not in schema.get("properties", {})]
            applied = [(key, value) for key in others if not any(matches(pattern, key) for pattern in patterns)]
    except GrammarError:
        return None
    return _violating_properties(applied, context)


def _violating_properties(applied: list[tuple[str, Schema]], context: Context) -> list[Schema] | None:
    alternatives: list[Schema] = []
    for key, inner in applied:
        failing = _negate(inner, context.of_property(key))
        if failing is None and not context.is_partial:
            return None
        if failing is True:
            alternatives.append({"type": "object", "required": [key]})
        elif failing is not None and failing is not False:
            alternatives.append({"type": "object", "required": [key], "properties": {key: failing}})
    return alternatives


def _negate_array_keyword(name: str, value: Any, schema: dict[str, Any], context: Context) -> list[Schema] | None:
    """items: an array contains an item that violates it; a list of them, prefixItems: the array reaches to one of these
    places, with an item that violates its schema. contains: all items violate it."""
    unknown: list[Schema] | None = [] if context.is_partial else None
    if name == "prefixItems" or isinstance(value, list):
        failing = [_negate(inner, replace(context, parts=())) for inner in value]
        if None in failing and not context.is_partial:
            return None
        return [
            {"type": "array", "minItems": at + 1, "prefixItems": [True] * at + [inner]}
            for at, inner in enumerate(failing)
            if inner is not None and inner is not False
        ]
    if name == "items" and "prefixItems" not in schema:
        inner = _negate(value, context.of_items())
        if inner is None:
            return unknown
        return [] if inner is False else [{"type": "array", "contains": inner}]
    if name == "contains" and not {"minContains", "maxContains"} & schema.keys():
        inner = _negate(value, context.of_items())
        return None if inner is None else [{"type": "array", "items": inner}]
    if name in ("minContains", "maxContains") and "contains" not in schema:
        return []
    places = len(schema.get("prefixItems", schema["items"] if isinstance(schema.get("items"), list) else ()))
    if name in ("items", "additionalItems") and value is False and (places or name == "items"):
        return [{"type": "array", "minItems": places + 1}]
    return [] if name == "additionalItems" and not isinstance(schema.get("items"), list) else unknown


def _negate_subschemas(name: str, value: Any, context: Context) -> list[Schema] | None:
    if name == "not":
        return [value]
    inner = [context.document.resolve_reference(value, "")] if name == "$ref" else value
    if name == "oneOf":
        parts = list(context.parts)
        if len(inner) > MAX_ONE_OF or not all(
            are_disjoint({"allOf": [*parts, one]}, other, context.document) for one, other in combinations(inner, 2)
        ):
            return None
    negations = [_negate(branch, context) for branch in inner]
    known = [negation for negation in negations if negation is not None]
    if len(known) < len(negations):
        return None
    return [{"allOf": known}] if name in ("anyOf", "oneOf") else known


def _negate_condition(schema: dict[str, Any], context: Context) -> list[Schema] | None:
    condition = schema["if"]
    otherwise, then = _negate(condition, context), _negate(schema.get("then", True), context)
    unless = _negate(schema.get("else", True), context)
    if otherwise is None or then is None or unless is None:
        return None
    cases = [(condition, then), (otherwise, unless)]
    return [{"allOf": [one, other]} for one, other in cases if one is not False and other is not False]
