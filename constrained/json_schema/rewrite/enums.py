"""Rewrite rules for schemas with finitely many values, and for keywords of old drafts."""

from __future__ import annotations

import json
from typing import Any

from plait.constrained.json_schema.rewrite.analysis import listed_values
from plait.constrained.json_schema.rewrite.base import SchemaObject, UnsupportedKeywords, without_keywords
from plait.constrained.json_schema.rewrite.document import SchemaDocument
from plait.constrained.json_schema.rewrite.keywords import ANNOTATIONS, is_string_list

MAX_FOLDED = 2_000
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


def check_enum_texts(listed: list[Any]) -> None:
    """Raises UnsupportedKeywords for an enum text with a control character that the grammar cannot write."""
    for text in _texts(listed):
        if any(
            (char < " " and char not in _WRITABLE) or char == "\x7f" or 0xD800 <= ord(char) < 0xE000 for char in text
        ):
            raise UnsupportedKeywords("it lists a text with an unsupported control character", "enum")


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for item in value.values() for text in _texts(item)]
    return [text for item in value for text in _texts(item)] if isinstance(value, list) else []


def canonical_json(value: Any) -> str:
    """Returns a value as JSON text with sorted keys, to compare values.

    >>> canonical_json({"b": 1, "a": 2})
    '{"a":2,"b":1}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
