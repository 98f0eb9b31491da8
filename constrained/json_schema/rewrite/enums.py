"""Rewrite rules for schemas with finitely many values, and for keywords of old drafts."""

from __future__ import annotations

import json
from typing import Any

from plait.constrained.json_schema.rewrite.analysis import listed_values
from plait.constrained.json_schema.rewrite.base import SchemaObject, UnsupportedKeywords, without_keywords
from plait.constrained.json_schema.rewrite.document import SchemaDocument
from plait.constrained.json_schema.rewrite.keywords import ANNOTATIONS, is_string_list

MAX_FOLDED = 2_000
_HIGHEST = (1 << 63) - 1  # not a double, but written exactly; a larger integer is padded with zeros
_LOWEST = -(1 << 63)
_WRITABLE = frozenset("\b\f\n\r\t")


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
    validator checks each. It checks twice, with formats asserted and as annotations; a value must be valid both times.

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
    strict, loose = (document.validator(schema, formats=formats) for formats in (True, False))
    return {"enum": [value for value in listed if strict.is_valid(value) and loose.is_valid(value)]}


def _is_boolean_or_null(schema: SchemaObject) -> bool:
    type_ = schema.get("type")
    listed = [type_] if isinstance(type_, str) else type_ or ["object"]
    return set(listed) <= {"boolean", "null"}


def check_listed(listed: list[Any]) -> None:
    """Raises UnsupportedKeywords for a text or a number that the grammar cannot write: it reads numbers as doubles."""
    for value in _scalars(listed):
        if isinstance(value, str) and any(
            (char < " " and char not in _WRITABLE) or char == "\x7f" or 0xD800 <= ord(char) < 0xE000 for char in value
        ):
            raise UnsupportedKeywords("it lists a text with an unsupported control character", "enum")
        if isinstance(value, int | float) and not _is_exact(value):
            raise UnsupportedKeywords(
                "it lists an integer that is outside of 64 bits or would be rounded, as most beyond 2^53 are", "enum"
            )


def _scalars(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [scalar for item in value.values() for scalar in _scalars(item)]
    return [scalar for item in value for scalar in _scalars(item)] if isinstance(value, list) else [value]


def _is_exact(number: float) -> bool:
    if isinstance(number, float):
        return number > _LOWEST
    return _LOWEST < number <= _HIGHEST and (number == _HIGHEST or int(float(number)) == number)


def canonical_json(value: Any) -> str:
    """Returns a value as JSON text with sorted keys, to compare values.

    >>> canonical_json({"b": 1, "a": 2})
    '{"a":2,"b":1}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
