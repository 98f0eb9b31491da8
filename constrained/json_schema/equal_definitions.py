"""Merges definitions of a rewritten schema that say the same, so that the compiler is given each of them once."""

from __future__ import annotations

import json
from typing import Any

from plait.constrained.json_schema.rewrite.document import Schema
from plait.constrained.json_schema.subschemas import with_inner

_PREFIX = "#/$defs/"


def merge_equal_definitions(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a rewritten schema in which no two definitions are equal up to the names of those they refer to.

    Proof: the definitions are divided by their texts without references, then, until nothing changes, by the classes
    of those they refer to (Moore 1956). Definitions of one class differ by no finite value then: each keyword says the
    same about a value, and each reference leads to the same class.

    >>> a, b = {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}
    >>> merge_equal_definitions({"prefixItems": [a, b], "$defs": {"a": {"items": b}, "b": {"items": a}}})["$defs"]
    {'a': {'items': {'$ref': '#/$defs/a'}}}
    """
    definitions: dict[str, Schema] = schema.get("$defs", {})
    if len(definitions) < 2:
        return schema
    leading, keys = dict[str, list[str]](), dict[str, Any]()
    for name, body in definitions.items():
        leading[name] = []
        keys[name] = json.dumps(_without_names(body, leading[name]))
    classes = _numbered(keys)
    while True:
        finer = _numbered({name: (classes[name], *map(classes.__getitem__, leading[name])) for name in definitions})
        if max(finer.values()) == max(classes.values()):
            break
        classes = finer
    first = {number: name for name, number in reversed(classes.items())}
    if len(first) == len(definitions):
        return schema
    names = {name: first[number] for name, number in classes.items()}
    kept = {name: definitions[name] for name in definitions if names[name] == name}
    renamed = _renamed({**schema, "$defs": kept}, names)
    assert isinstance(renamed, dict)
    return renamed


def _numbered(keys: dict[str, Any]) -> dict[str, int]:
    """Returns the same number for equal keys, from 0 on."""
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys.values()))}
    return {name: numbers[key] for name, key in keys.items()}


def _without_names(schema: Schema, found: list[str]) -> Schema:
    """Returns a schema with empty references; the names to which they led are added to `found`."""
    if not isinstance(schema, dict):
        return schema
    out = with_inner(schema, lambda inner: _without_names(inner, found))
    if "$ref" in out:
        found.append(out["$ref"].removeprefix(_PREFIX))
        out["$ref"] = ""
    return out


def _renamed(schema: Schema, names: dict[str, str]) -> Schema:
    if not isinstance(schema, dict):
        return schema
    out = with_inner(schema, lambda inner: _renamed(inner, names))
    if "$ref" in out:
        out["$ref"] = _PREFIX + names[out["$ref"].removeprefix(_PREFIX)]
    return out
