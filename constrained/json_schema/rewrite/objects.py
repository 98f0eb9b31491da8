"""Rewrite rules for keywords about all properties of an object."""

from __future__ import annotations

from itertools import combinations, permutations
from math import comb
from typing import Any

from plait.constrained.json_schema.rewrite.analysis import conjuncts
from plait.constrained.json_schema.rewrite.base import SchemaObject, UnsupportedKeywords, with_all_of, without_keywords
from plait.constrained.json_schema.rewrite.document import Schema, SchemaDocument
from plait.constrained.json_schema.rewrite.patterns import ANY, ecma_to_plain_pattern, literal, matches
from plait.constrained.specs import GrammarError

MAX_DEPENDENT = 12
MAX_SUBSETS = 64
MAX_ORDERED = 3
_NAME_SENSITIVE_KEYWORDS = frozenset(("patternProperties", "propertyNames", "minProperties", "maxProperties", "anyOf"))
_NOT_AN_OBJECT = {"type": ["array", "boolean", "null", "number", "string"]}


def dependent_required(schema: SchemaObject, document: SchemaDocument) -> SchemaObject | None:
    """Replaces `dependentRequired` {a: names} by: no a, or names; for each entry.

    Proof: by cases on whether an object has a; of other values neither side says anything. Before that, up to
    three names in it that are not listed are: in every order, since listed names are written in theirs.

    >>> dependent_required({"properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}}, Document("{}"))
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
        return {"anyOf": [with_all_of(one, *cases) for one in orders]}
    return with_all_of(rest, *cases) if cases else rest


def _listed_in_every_order(schema: SchemaObject, names: list[str]) -> list[SchemaObject] | None:
    """Returns equivalent schemas that list `names` as well, one for each order of them; None if there are none.

    Proof: a name that is not listed and matches no pattern has the schema of additional properties, so to list
    it with that schema changes nothing. With counts or `propertyNames` later rewrites tell such names apart.
    """
    listed = schema.get("properties", {})
    new = [name for name in dict.fromkeys(names) if name not in listed]
    if not 2 <= len(new) <= MAX_ORDERED or schema.keys() & _NAME_SENSITIVE_KEYWORDS:
        return None
    inner = schema.get("additionalProperties", True)
    return [{**schema, "properties": {**listed, **dict.fromkeys(order, inner)}} for order in permutations(new)]


def dependent_schemas(schema: SchemaObject, document: SchemaDocument) -> SchemaObject | None:
    """Replaces `dependentSchemas` {a: S} by: no a, or S; for each entry.

    Proof: by cases on whether an object has a. The first case holds for what is no object, as does the keyword.

    >>> dependent_schemas({"dependentSchemas": {"a": False}}, Document("{}"))
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

    Proof: a listed name that fails may not occur, so its schema is false. Any other name must match the
    pattern of the texts that pass; `patternProperties` with it and the schema of additional properties, and
    `additionalProperties: false`, say just that, provided that no other pattern and no listed name matches too
    (or that the schema of additional properties allows all). Refused where that is not so.

    >>> property_names({"propertyNames": {"enum": ["a"]}}, Document("{}"))
    {'additionalProperties': False, 'patternProperties': {'^(?:a)$': True}, 'properties': {}}
    """
    if "propertyNames" not in schema:
        return None
    rest, names = without_keywords(schema, "propertyNames"), schema["propertyNames"]
    if names is True or (rest.get("additionalProperties", True) is False and "patternProperties" not in rest):
        return _forbid_failing_names(rest, names, document)
    if names is False:
        return with_all_of(rest, {"maxProperties": 0})
    if rest.get("patternProperties"):
        raise UnsupportedKeywords("it stands beside patternProperties", "propertyNames")
    try:
        pattern = f"^(?:{_to_ecma(_names_pattern(names, document))})$"
        made = _forbid_failing_names(rest, names, document)
        additional = rest.get("additionalProperties", True)
        if additional is not True and any(matches(pattern, name) for name in made["properties"]):
            raise UnsupportedKeywords(
                "it stands beside additionalProperties and listed names that match", "propertyNames"
            )
    except GrammarError as error:
        raise UnsupportedKeywords(error.reason, "propertyNames") from None
    made["additionalProperties"] = False
    made["patternProperties"] = {pattern: additional}
    return dict(sorted(made.items()))


def _forbid_failing_names(rest: SchemaObject, names: Schema, document: SchemaDocument) -> SchemaObject:
    """Returns `rest` with the listed names that violate `propertyNames` made impossible."""
    listed = rest.get("properties", {})
    return {**rest, "properties": {n: s if document.is_valid(names, n) else False for n, s in listed.items()}}


def _names_pattern(names: Schema, document: SchemaDocument) -> str:
    """Returns the plain pattern of the names that match `names`. Raises UnsupportedKeywords if there is none."""
    found, low, high, listed = "", 0, "", None
    for part in conjuncts(names, document):
        if isinstance(part, bool):
            continue
        if part.keys() & {"$ref", "allOf"} and len(part.keys() - {"$ref", "allOf", "type"}) == 0:
            continue
        for keyword, value in part.items():
            match keyword:
                case "enum" | "const":
                    listed = [value] if keyword == "const" else value
                case "pattern" if not found:
                    found = ecma_to_plain_pattern(value).pattern
                case "minLength":
                    low = max(low, int(value))
                case "maxLength":
                    high = str(int(value)) if not high else str(min(int(high), int(value)))
                case "type" if "string" not in ([value] if isinstance(value, str) else value):
                    listed = []  # a name is a string
                case "type" | "title" | "description" | "$comment" | "$ref" | "allOf" | "examples" | "default":
                    continue
                case _:
                    raise UnsupportedKeywords(f"{keyword} in it is not supported", "propertyNames/" + keyword)
    if listed is not None:
        texts = [text for text in listed if isinstance(text, str) and document.is_valid(names, text)]
        return "|".join(literal(text) for text in texts) or r"[^\U00000000-\U0010ffff]"
    if found and (low or high):
        raise UnsupportedKeywords("a pattern and a length in it are not combined", "propertyNames")
    return found or f"{ANY}{{{low},{high}}}"


def _to_ecma(plain: str) -> str:
    return "".join(p if i == 0 else f"\\u{{{p[2:8]}}}{p[8:]}" for i, p in enumerate(plain.split("\\U")))


def count_properties(schema: SchemaObject, document: SchemaDocument) -> SchemaObject | None:
    """Replaces `minProperties` and `maxProperties` by cases over the listed names, if they are few.

    Proof: with n names listed, no patterns and no additional ones, an object has at least m properties exactly
    if it has all of some m of them, and at most m if it lacks all of some n - m. Required names always count;
    `minProperties` up to their number says nothing. With additional names, counting is left to the compiler,
    and refused from two of them on, since a name given twice would be counted twice.
    """
    least, most = int(schema.get("minProperties", 0)), schema.get("maxProperties")
    if not least and most is None:
        return None
    listed = {name for name, inner in schema.get("properties", {}).items() if inner is not False}
    required = set(schema.get("required", ()))
    rest = without_keywords(schema, "minProperties", "maxProperties")
    if least <= len(required):
        least = 0
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if closed:
        return _count_in_closed_object(rest, sorted(listed), required, least, most)
    if most is not None and int(most) == 0:
        return with_all_of(
            rest, {"properties": {}, "additionalProperties": False}, *([_NOT_AN_OBJECT] if least else [])
        )
    if least > len(required) + 1:
        raise UnsupportedKeywords("more than one property beyond the required ones is not counted", "minProperties")
    if listed - required and (least or most is not None):
        return _count_in_open_object(rest, sorted(listed - required), least, most)
    kept = {"minProperties": least} if least else {}
    kept |= {"maxProperties": int(most)} if most is not None else {}
    made = rest | kept
    return made if made != schema else None


def _count_in_open_object(rest: SchemaObject, optional: list[str], least: int, most: Any) -> SchemaObject:
    """Returns the schema with one more property: an optional listed one, or an additional one if there is none."""
    keyword = "minProperties" if most is None else "maxProperties"
    if most is not None or len(optional) > MAX_SUBSETS or "allOf" in rest or "anyOf" in rest:
        raise UnsupportedKeywords("it stands beside optional and additional properties", keyword)
    none = dict.fromkeys(optional, False)
    extra = {**rest, "properties": {n: s for n, s in rest["properties"].items() if n not in none}}
    if any(_is_matched(rest, name) for name in optional):
        raise UnsupportedKeywords("it stands beside patternProperties that match listed names", keyword)
    patterns = {f"^{literal_ecma(name)}$": False for name in optional}
    extra["patternProperties"] = {**rest.get("patternProperties", {}), **patterns}
    extra["minProperties"] = least
    return {"anyOf": [{**rest, "required": [*rest.get("required", ()), name]} for name in optional] + [extra]}


def _is_matched(schema: SchemaObject, name: str) -> bool:
    try:
        return any(matches(pattern, name) for pattern in schema.get("patternProperties", {}))
    except GrammarError:
        return True


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
    made = rest
    if more > 0:
        made = with_all_of(made, {"anyOf": [{"required": list(names)} for names in combinations(optional, more)]})
    if fewer > 0:
        lacking = [{"properties": dict.fromkeys(names, False)} for names in combinations(optional, fewer)]
        made = with_all_of(made, {"anyOf": lacking})
    return made


def unevaluated_properties(schema: SchemaObject, document: SchemaDocument) -> SchemaObject | None:
    """Replaces `unevaluatedProperties` S by `additionalProperties` S over all that the conjuncts evaluate.

    Proof: only `allOf` and `$ref` stand beside it (else it is refused), so every conjunct is applied to each
    object, and the names that it lists or matches by a pattern are evaluated always; one with additional
    properties of its own evaluates all of them.

    >>> unevaluated({"properties": {"a": True}, "unevaluatedProperties": False}, Document("{}"))
    {'properties': {'a': True}, 'allOf': [{'properties': {'a': True}, 'patternProperties': {}, \
'additionalProperties': False}]}
    """
    if "unevaluatedProperties" not in schema:
        return None
    rest, names, patterns = without_keywords(schema, "unevaluatedProperties"), dict[str, Any](), dict[str, Any]()
    if schema["unevaluatedProperties"] is True:
        return rest
    for part in conjuncts(rest, document):
        if isinstance(part, bool):
            continue
        if part.keys() & {"anyOf", "oneOf", "if", "dependentSchemas", "dependencies", "not"}:
            raise UnsupportedKeywords("it stands beside alternatives", "unevaluatedProperties")
        if part.keys() & {"additionalProperties", "unevaluatedProperties"}:
            return rest
        names |= dict.fromkeys(part.get("properties", {}), True)
        patterns |= dict.fromkeys(part.get("patternProperties", {}), True)
    additional = schema["unevaluatedProperties"]
    return with_all_of(rest, {"properties": names, "patternProperties": patterns, "additionalProperties": additional})


def _without_property(name: str) -> SchemaObject:
    return {"properties": {name: False}}
