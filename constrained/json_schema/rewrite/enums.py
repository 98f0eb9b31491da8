"""Rewrite rules for schemas with finitely many values, and for keywords of old drafts."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any

from plait.constrained.json_schema.rewrite.analysis import listed_values
from plait.constrained.json_schema.rewrite.base import SchemaObject, UnsupportedKeywords, without_keywords
from plait.constrained.json_schema.rewrite.document import SchemaDocument
from plait.constrained.json_schema.rewrite.keywords import ANNOTATIONS, is_string_list

MAX_FOLDED = 2_000
_HIGHEST = (1 << 63) - 1  # not a double, but written exactly; a larger integer is padded with zeros
_LOWEST = -(1 << 63)
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def upgrade_draft(schema: SchemaObject, document: SchemaDocument) -> SchemaObject | None:
    """Replaces keywords of drafts 4 to 7 by those of 2020-12.

    Proof: `items` with a list is `prefixItems`, and `additionalItems` beside it is `items` (elsewhere it has
    no effect); `exclusiveMinimum: true` makes `minimum` exclusive (false changes nothing); `dependencies` holds
    the entries of `dependentRequired` and `dependentSchemas` together. Each follows from the definitions.

    >>> upgrade_draft({"minimum": 3, "exclusiveMinimum": True}, SchemaDocument("{}"))
    {'exclusiveMinimum': 3}
    """
    upgraded = dict(schema)
    if isinstance(upgraded.get("items"), list):
        upgraded["prefixItems"] = [*upgraded.pop("items")]
        if "additionalItems" in upgraded:
            upgraded["items"] = upgraded.pop("additionalItems")
    upgraded.pop("additionalItems", None)
    for bound in ("minimum", "maximum"):
        exclusive = "exclusive" + bound.capitalize()
        if isinstance(upgraded.get(exclusive), bool) and upgraded.pop(exclusive) and bound in upgraded:
            upgraded[exclusive] = upgraded.pop(bound)
    for name, needed in upgraded.pop("dependencies", {}).items():
        kind = "dependentRequired" if is_string_list(needed) else "dependentSchemas"
        if name in upgraded.get(kind, {}):
            raise UnsupportedKeywords("it repeats an entry of its newer spelling", "dependencies")
        upgraded[kind] = {**upgraded.get(kind, {}), name: needed}
    return upgraded if upgraded != schema else None


def fold_enum(schema: SchemaObject, document: SchemaDocument) -> SchemaObject | None:
    """Replaces a schema that lists its values by the list of those that match the whole schema.

    Proof: `const`, `enum`, or a type of only `boolean` or `null` gives a list that contains every valid value; a full
    validator, which asserts formats, checks each.

    >>> fold_enum({"enum": [1, "a"], "type": "string"}, SchemaDocument("{}"))
    {'enum': ['a']}
    """
    if schema.keys() == {"enum"} or not ({"enum", "const"} & schema.keys() or _is_boolean_or_null(schema)):
        return None
    listed = listed_values(without_keywords(schema, "$ref", "allOf"), document)
    if listed is None or (len(listed) > MAX_FOLDED and schema.keys() - ANNOTATIONS - {"enum", "const", "type"}):
        return None
    if schema.keys() - ANNOTATIONS == {"enum"}:
        return {"enum": listed}
    validator = document.validator(schema)
    return {"enum": [value for value in listed if validator.is_valid(value)]}


def _is_boolean_or_null(schema: SchemaObject) -> bool:
    type_ = schema.get("type")
    listed = [type_] if isinstance(type_, str) else type_ or ["object"]
    return set(listed) <= {"boolean", "null"}


def check_enum_texts(listed: list[Any]) -> None:
    """Raises UnsupportedKeywords for an enum text with half of a surrogate pair, which no text of a model has."""
    if any(isinstance(text, str) and _SURROGATE.search(text) for text in _scalars(listed)):
        raise UnsupportedKeywords("it lists a text with half of a surrogate pair", "enum")


def has_control_character(value: Any) -> bool:
    """Returns whether a listed value has a text with a control character that llguidance leaves out.

    >>> has_control_character({"a": ["\\n"]}), has_control_character(["\\0"])
    (False, True)
    """
    return any(isinstance(text, str) and _CONTROL.search(text) for text in _scalars(value))


def listed_schema(listed: list[Any]) -> SchemaObject:
    """Returns the schema of listed values. One with a number that llguidance would read as another one is spelt out.

    >>> listed_schema([1, 90.88184001853247])
    {'anyOf': [{'enum': [1]}, {'type': 'number', 'minimum': 90.88184001853247, 'maximum': 90.88184001853247}]}
    """
    exact = [value for value in listed if all(map(_is_exact, _scalars(value)))]
    if len(exact) == len(listed):
        return {"enum": listed}
    others = [value for value in listed if not all(map(_is_exact, _scalars(value)))]
    return {"anyOf": [*([{"enum": exact}] if exact else []), *map(_spelt_out, others)]}


def _spelt_out(value: Any) -> SchemaObject:
    if isinstance(value, list):
        return {"type": "array", "prefixItems": list(map(_spelt_out, value)), "items": False, "minItems": len(value)}
    if isinstance(value, dict):
        named = {name: _spelt_out(inner) for name, inner in value.items()}
        return {"type": "object", "properties": named, "required": list(named), "additionalProperties": False}
    if _is_exact(value):
        return {"enum": [value]}
    return {"type": "integer" if isinstance(value, int) else "number", "minimum": value, "maximum": value}


def _scalars(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [scalar for item in value.values() for scalar in _scalars(item)]
    return [scalar for item in value for scalar in _scalars(item)] if isinstance(value, list) else [value]


def _is_exact(value: Any) -> bool:
    """Returns whether llguidance, whose reader of fractions is exact up to 15 digits, writes a value as it is."""
    if isinstance(value, float):
        _, digits, exponent = Decimal(repr(value)).as_tuple()
        return len(digits) <= 15 and -22 <= int(exponent) <= 22 and abs(value) < _HIGHEST
    if isinstance(value, int):
        return _LOWEST < value <= _HIGHEST and (value == _HIGHEST or int(float(value)) == value)
    return True


def canonical_json(value: Any) -> str:
    """Returns a value as JSON text with sorted keys, to compare values.

    >>> canonical_json({"b": 1, "a": 2})
    '{"a":2,"b":1}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
