"""Complements of schemas, written without `not` where possible.

The negation of a conjunction of keywords is the disjunction of their negations (De Morgan). If one keyword has no
complement, neither has the schema.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from plait.constrained.json_schema.rewrite.analysis import KINDS, allowed_kinds
from plait.constrained.json_schema.rewrite.document import Schema, SchemaDocument
from plait.constrained.json_schema.rewrite.keywords import ASSERTIONS
from plait.constrained.json_schema.rewrite.patterns import ANY, complement_pattern, ecma_to_plain_pattern
from plait.constrained.regex.pattern_algebra import NO_TEXT, intersect
from plait.constrained.specs import GrammarError

MAX_DEPTH = 8
MAX_LISTED = 200


def negate(schema: Schema, document: SchemaDocument, depth: int = 0) -> Schema | None:
    """Returns a schema of exactly the values that do not match `schema`; None if none is known.

    >>> negate({"required": ["a"]}, SchemaDocument("{}"))
    {'anyOf': [{'type': ['object'], 'properties': {'a': False}}]}
    """
    if isinstance(schema, bool):
        return not schema
    if depth > MAX_DEPTH:
        return None
    if "$ref" in schema and document.draft <= 7:
        return negate(document.resolve_reference(schema["$ref"], ""), document, depth + 1)
    alternatives: list[Schema] = []
    for name, value in schema.items():
        negations = [] if name not in ASSERTIONS else _negate_keyword(name, value, schema, document, depth + 1)
        if negations is None:
            return None
        alternatives += negations
    if any(alternative is True for alternative in alternatives):
        return True
    alternatives = [alternative for alternative in alternatives if alternative is not False]
    return {"anyOf": alternatives} if alternatives else False


def _negate_keyword(
    name: str, value: Any, schema: dict[str, Any], document: SchemaDocument, depth: int
) -> list[Schema] | None:
    """Returns schemas of the values that violate one keyword; [] if there are none, None if they cannot be written.

    type: the other kinds of value. const, enum: see `_negate_enum`. minLength n: shorter texts; likewise the other
    bounds, each of which constrains one kind of value, so only values of that kind violate it. required: an object
    without one of the names. pattern: a text that does not match, by automata. properties: an object that has one of
    them, with a value that violates its schema. allOf: a violation of any branch; anyOf: of all branches; not: the
    schema itself; $ref: a violation of its target.
    """
    match name:
        case "type":
            return _negate_type(schema)
        case "const" | "enum":
            return _negate_enum([value] if name == "const" else value)
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
            return _negate_pattern(value)
        case "properties":
            return _negate_properties(value, document, depth)
        case "allOf" | "anyOf" | "not" | "$ref":
            return _negate_subschemas(name, value, document, depth)
    return None


def _negate_type(schema: dict[str, Any]) -> list[Schema] | None:
    kinds = KINDS - allowed_kinds(schema)
    if "fraction" in kinds and "integer" not in kinds:
        return None  # no schema expresses "a number but not an integer"
    names = sorted(kinds - {"fraction", "integer"}) + (["number"] if "fraction" in kinds else [])
    return [{"type": names}] if names else []


def _negate_enum(listed: list[Any]) -> list[Schema] | None:
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
    rest.append(
        {"type": "string", "pattern": f"^(?:{_to_ecma(complement_pattern(texts))})$"} if texts else {"type": "string"}
    )
    if not numbers:
        return [*rest, {"type": "number"}]
    rest.append({"type": "number", "exclusiveMaximum": numbers[0]})
    rest.append({"type": "number", "exclusiveMinimum": numbers[-1]})
    for low, high in pairwise(numbers):
        rest.append({"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high})
    return rest


def _negate_pattern(pattern: str) -> list[Schema] | None:
    try:
        rest = intersect(f"{ANY}*", ecma_to_plain_pattern(pattern).pattern, negated=True).pattern
    except GrammarError:
        return None
    return [{"type": "string", "pattern": f"^(?:{_to_ecma(rest)})$"}] if rest != NO_TEXT else []


def _to_ecma(plain: str) -> str:
    """Returns a plain pattern with ECMA's escapes: `\\U00000061` is `\\u{000061}` there."""
    return "".join(
        part if index == 0 else f"\\u{{{part[2:8]}}}{part[8:]}" for index, part in enumerate(plain.split("\\U"))
    )


def _negate_properties(properties: dict[str, Schema], document: SchemaDocument, depth: int) -> list[Schema] | None:
    alternatives: list[Schema] = []
    for key, inner in properties.items():
        failing = negate(inner, document, depth)
        if failing is None:
            return None
        if failing is not False:
            alternatives.append({"type": "object", "required": [key], "properties": {key: failing}})
    return alternatives


def _negate_subschemas(name: str, value: Any, document: SchemaDocument, depth: int) -> list[Schema] | None:
    if name == "not":
        return [value]
    inner = [document.resolve_reference(value, "")] if name == "$ref" else value
    negations = [negate(branch, document, depth) for branch in inner]
    known = [negation for negation in negations if negation is not None]
    if len(known) < len(negations):
        return None
    return [{"allOf": known}] if name == "anyOf" else known
