"""Rewrite rule for `propertyNames`, which becomes patterns of the names that are not listed."""

from __future__ import annotations

import json
from typing import Any

from plait.constrained.json_schema.rewrite.analysis import conjuncts, listed_values
from plait.constrained.json_schema.rewrite.base import SchemaObject, UnsupportedKeywords, with_all_of, without_keywords
from plait.constrained.json_schema.rewrite.document import Schema, SchemaDocument
from plait.constrained.json_schema.rewrite.formats import FORMATS
from plait.constrained.json_schema.rewrite.keywords import ANNOTATIONS, ASSERTIONS
from plait.constrained.json_schema.rewrite.patterns.conversion import ANY, ecma_to_plain_pattern
from plait.constrained.json_schema.rewrite.patterns.operations import finite_texts, is_narrowed, matches, to_ecma
from plait.constrained.regex.automaton_writer import NO_TEXT
from plait.constrained.regex.char_classes import write_literal
from plait.constrained.regex.pattern_algebra import intersect
from plait.constrained.specs import GrammarError

MAX_NAMES_DEPTH = 4
_NOT_OF_TEXTS = frozenset(
    ("minimum", "maximum", "multipleOf", "minItems", "maxItems", "required", "properties", "items")
)
_NOT_OF_TEXTS |= {"minLength", "maxLength"}


def property_names(schema: SchemaObject, document: SchemaDocument) -> SchemaObject | None:
    """Replaces `propertyNames` by a pattern for the names that are not listed.

    Proof: a listed name that violates `propertyNames` may not occur, so its schema is false. Any other name must match
    the pattern of the valid names. `patternProperties` with that pattern and the schema of additional properties, and
    `additionalProperties: false`, express just that; the other patterns are narrowed to the valid names, and the first
    one does without the names that another pattern matches. A listed name that a pattern matched before, and no longer
    does, has that schema too. If it matches listed names, the pattern of the invalid names and false express it
    instead. Names that a `not` lists become listed names that may not occur.

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
        forbidden = {text: False for text in _excluded_texts(names, document) if not document.is_valid(names, text)}
        rewritten = _forbid_failing_names(rest, names, document)
        listed = rewritten["properties"] = {**forbidden, **rewritten["properties"]}
        names, additional = _without_exclusions(names, forbidden, document), rest.get("additionalProperties", True)
        allowed = "|".join(_name_arms(names, document, listed)) or NO_TEXT
        others, patterns = allowed, dict[str, Schema]()
        for pattern, inner in rest.get("patternProperties", {}).items():
            if is_narrowed(pattern):
                raise GrammarError("a pattern without complement beside it is not supported")
            plain = ecma_to_plain_pattern(pattern).pattern
            narrowed = to_ecma(intersect(allowed, plain).pattern)
            patterns[narrowed] = inner
            for name, own in listed.items():
                if own is not False and matches(pattern, name) and not matches(narrowed, name):
                    listed[name] = {"allOf": [own, inner]}
            others = intersect(others, plain, negated=True).pattern
        is_listed = any(inner is not False and matches(to_ecma(others), name) for name, inner in listed.items())
        if additional is not True and is_listed:
            allowed = "|".join(_name_arms(names, document, {})) or NO_TEXT
            others = intersect(f"{ANY}*", allowed, negated=True).pattern
    except GrammarError as error:
        raise UnsupportedKeywords(error.reason, "propertyNames") from None
    if additional is not True and is_listed:
        rewritten["patternProperties"] = {**patterns, to_ecma(others): False}
        rewritten["additionalProperties"] = additional
    else:
        rewritten["patternProperties"] = {**patterns, to_ecma(others): additional}
        rewritten["additionalProperties"] = False
    return dict(sorted(rewritten.items()))


def _excluded_texts(names: Schema, document: SchemaDocument, depth: int = 0) -> list[str]:
    """Returns the texts that `not` in a schema of names lists."""
    found: list[str] = []
    for part in conjuncts(names, document) if depth < MAX_NAMES_DEPTH else ():
        if isinstance(part, dict):
            found += _listed_texts(part.get("not", {}), document) or []
            for inner in (*part.get("anyOf", ()), *part.get("oneOf", ())):
                found += _excluded_texts(inner, document, depth + 1)
    return found


def _listed_texts(names: Schema, document: SchemaDocument) -> list[str] | None:
    """Returns the texts of `const`, `enum` or a pattern of a few texts, if a schema has nothing else; else None."""
    keywords = names.keys() - ANNOTATIONS - {"type"} if isinstance(names, dict) else set()
    if len(keywords) != 1 or isinstance(names, bool):
        return None
    if keywords == {"pattern"} and not is_narrowed(names["pattern"]):
        return finite_texts(ecma_to_plain_pattern(names["pattern"]).pattern)
    listed = [names["const"]] if "const" in names else names.get("enum")
    return None if listed is None else [text for text in listed if isinstance(text, str)]


def _without_exclusions(names: Schema, forbidden: dict[str, bool], document: SchemaDocument, depth: int = 0) -> Schema:
    """Returns a schema of names without each `not` that excludes forbidden names only."""
    if isinstance(names, bool) or depth > MAX_NAMES_DEPTH:
        return names
    parts: list[Schema] = []
    for part in conjuncts(names, document):
        if isinstance(part, dict):
            part = without_keywords(part, "$ref", "allOf")
            listed = _listed_texts(part["not"], document) if "not" in part else None
            if listed is not None and forbidden.keys() >= set(listed):
                part = without_keywords(part, "not")
            if "anyOf" in part:
                inner = [_without_exclusions(one, forbidden, document, depth + 1) for one in part["anyOf"]]
                part = {**part, "anyOf": inner}
        parts.append(part)
    return {"allOf": parts}


def _name_arms(names: Schema, document: SchemaDocument, listed: dict[str, Schema]) -> list[str]:
    """Returns plain patterns, one of which each name matches that matches `names` and is not in `listed`."""
    found = conjuncts(names, document)
    if any(part is False for part in found):
        return []
    parts = [part for part in found if isinstance(part, dict) and part.keys() - ANNOTATIONS - {"allOf"}]
    only = parts[0] if len(parts) == 1 else None
    if isinstance(only, dict) and only.keys() - ANNOTATIONS == {"anyOf"}:
        return [arm for inner in only["anyOf"] for arm in _name_arms(inner, document, listed)]
    if isinstance(only, dict) and only.keys() - ANNOTATIONS == {"enum"}:
        return [write_literal(text) for text in only["enum"] if isinstance(text, str) and text not in listed]
    return [f"(?:{_names_pattern(names, document)})"]


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
        return "|".join(map(write_literal, texts)) or NO_TEXT
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
