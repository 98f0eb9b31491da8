"""The parts of a rewritten schema about repeated items and names, enforced beside the grammar (unique_paths.py).

They are those with `uniqueItems`, and those of which `minProperties` needs two or more names that are not listed: the
grammar counts members, so that a name that came twice would count twice. No value is lost by leaving such texts out.
"""

from __future__ import annotations

import json
from typing import Any

from plait.constrained.guidance.unique_paths import UNIQUE_NAMES
from plait.constrained.json_schema.rewrite.document import Schema
from plait.constrained.json_schema.subschemas import with_inner

MAX_DEPTH = 12
_PREFIX = "#/$defs/"


def separate_unique_items(schema: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Returns a rewritten schema without `uniqueItems`, and the parts that lead to arrays or objects that repeat
    nothing; None if there are none.

    >>> schema = {"properties": {"a": {"type": "array", "uniqueItems": True}, "b": {}}}
    >>> separate_unique_items(schema)
    ({'properties': {'a': {'type': 'array'}, 'b': {}}}, {'properties': {'a': {'uniqueItems': True}}})
    >>> separate_unique_items({"minProperties": 2})
    ({'minProperties': 2}, {'uniqueNames': True})
    """
    if not any(name in json.dumps(schema) for name in ('"uniqueItems"', '"minProperties"')):
        return schema, None
    rest = _without(schema)
    assert isinstance(rest, dict)
    return rest, _unique_parts(schema)


def _unique_parts(schema: dict[str, Any]) -> dict[str, Any] | None:
    definitions: dict[str, Any] = schema.get("$defs", {})
    leading: set[str] = set()
    while True:
        more = {name for name, inner in definitions.items() if name not in leading and _part(inner, leading)}
        if not more:
            break
        leading |= more
    root = _part({name: value for name, value in schema.items() if name != "$defs"}, leading)
    kept = {name: _part(definitions[name], leading) for name in definitions if name in leading}
    if not root:
        return None
    return {**root, "$defs": kept} if kept else root


def has_freer_alternatives(schema: dict[str, Any]) -> bool:
    """Returns whether arrays that must not repeat an item in one alternative of a rewritten schema may match another
    one that allows it: these are left out.

    >>> has_freer_alternatives({"anyOf": [{"type": "array", "uniqueItems": True}, {"items": {"type": "null"}}]})
    True
    """
    unique = _unique_parts(schema)
    if unique is None:
        return False
    return _Alternatives(schema.get("$defs", {}), unique.get("$defs", {})).are_freer(unique, schema, [], 0)


class _Alternatives:
    def __init__(self, definitions: dict[str, Any], unique_definitions: dict[str, Any]) -> None:
        self._definitions, self._unique_definitions = definitions, unique_definitions

    def are_freer(self, part: dict[str, Any], schema: Any, others: list[Any], depth: int) -> bool:
        """`part` is what of `schema` leads to unique arrays; a value may match one of `others` instead."""
        if depth > MAX_DEPTH or not part or not isinstance(schema, dict):
            return False
        if "uniqueItems" in part and any(self._allows_repeats(other, 0) for other in others):
            return True
        found: list[tuple[Any, Any, list[Any]]] = []
        if "$ref" in part:
            name = part["$ref"].removeprefix(_PREFIX)
            found.append((self._unique_definitions[name], self._definitions[name], others))
        found += [(inner, schema["allOf"][at], others) for at, inner in enumerate(part.get("allOf", ()))]
        for at, inner in enumerate(part.get("anyOf", ())):
            beside = [other for place, other in enumerate(schema["anyOf"]) if place != at]
            found.append((inner, schema["anyOf"][at], [*others, *beside]))
        for name, inner in part.get("properties", {}).items():
            found.append((inner, schema["properties"][name], [self._of(o, "properties", name) for o in others]))
        for name in ("items", "additionalProperties"):
            if name in part:
                found.append((part[name], schema[name], [self._of(other, name) for other in others]))
        return any(self.are_freer(*one, depth + 1) for one in found)

    def _of(self, schema: Any, keyword: str, name: str | None = None) -> Any:
        """Returns what a schema says about a property, or about all items or additional properties."""
        if isinstance(schema, dict) and "$ref" in schema:
            schema = self._definitions[schema["$ref"].removeprefix(_PREFIX)]
        if not isinstance(schema, dict):
            return schema
        kind = "array" if keyword == "items" else "object"
        if kind not in schema.get("type", (kind,)) or "enum" in schema:
            return any(isinstance(value, list | dict) for value in schema.get("enum", ()))
        inner = schema.get("allOf", []) + ([{"anyOf": schema["anyOf"]}] if "anyOf" in schema else [])
        if name is not None and name in schema.get("properties", {}):
            return schema["properties"][name]
        return schema.get("additionalProperties" if name is not None else keyword, not inner)

    def _allows_repeats(self, schema: Any, depth: int) -> bool:
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return schema is not False
        if "array" not in schema.get("type", ("array",)) or "enum" in schema or schema.get("uniqueItems"):
            return any(isinstance(value, list) and len(value) > 1 for value in schema.get("enum", ()))
        inner = [self._definitions[schema["$ref"].removeprefix(_PREFIX)]] if "$ref" in schema else []
        return all(self._allows_repeats(one, depth + 1) for one in (*inner, *schema.get("allOf", ()))) and (
            "anyOf" not in schema or any(self._allows_repeats(one, depth + 1) for one in schema["anyOf"])
        )


def _part(schema: Any, leading: set[str]) -> dict[str, Any]:
    """Returns what of a schema leads to `uniqueItems`, also through the definitions that do; {} if nothing."""
    if not isinstance(schema, dict):
        return {}
    part: dict[str, Any] = {"uniqueItems": True} if schema.get("uniqueItems") is True else {}
    if schema.get("minProperties", 0) > len(schema.get("required", ())) + 1:
        part[UNIQUE_NAMES] = True
    if schema.get("$ref", "").removeprefix(_PREFIX) in leading:
        part["$ref"] = schema["$ref"]
    for name in ("items", "additionalProperties"):
        if inner := _part(schema.get(name), leading):
            part[name] = inner
    for name in ("allOf", "anyOf", "prefixItems"):
        listed = [_part(inner, leading) for inner in schema.get(name, ())]
        if any(listed) or (name == "prefixItems" and "items" in part and listed):
            part[name] = listed
    for name in ("patternProperties", "properties"):
        named = {key: _part(inner, leading) for key, inner in schema.get(name, {}).items()}
        others = "additionalProperties" in part or "patternProperties" in part
        if any(named.values()) or (others and named):
            part[name] = {key: inner for key, inner in named.items() if inner or others}
    return part


def _without(schema: Schema) -> Schema:
    if not isinstance(schema, dict):
        return schema
    return with_inner({name: value for name, value in schema.items() if name != "uniqueItems"}, _without)
