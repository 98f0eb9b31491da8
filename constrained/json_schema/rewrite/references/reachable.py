"""Leaves out the definitions that no reference leads to, so that a large library of them costs only what is used.

A request often carries a whole library of `$defs` and refers to a few. Reading, checking and resolving the others
would take most of the time.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

_LIBRARIES = ("$defs", "definitions")
_DYNAMIC = frozenset(("$dynamicRef", "$recursiveRef"))


def without_unreachable(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns `schema` without those of its root's definitions that no reference leads to.

    It is returned as it is if a reference in what is reached is no JSON pointer of this document, or is dynamic.

    >>> without_unreachable({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {}, "c": {}}})
    {'$ref': '#/$defs/a', '$defs': {'a': {'$ref': '#/$defs/b'}, 'b': {}}}
    """
    libraries = {name: schema[name] for name in _LIBRARIES if isinstance(schema.get(name), dict)}
    if not any(libraries.values()):
        return schema
    reached: dict[str, set[str]] = {name: set() for name in libraries}
    todo: list[Any] = [value for name, value in schema.items() if name not in libraries]
    todo.append({"$ref": schema.get("$ref")})
    if not _DYNAMIC.isdisjoint(schema):
        return schema
    while todo:
        part = todo.pop()
        if isinstance(part, list):
            todo += part
            continue
        if not isinstance(part, dict):
            continue
        todo += part.values()
        if not _DYNAMIC.isdisjoint(part):
            return schema
        if not isinstance(reference := part.get("$ref"), str):
            continue
        if reference != "#" and not reference.startswith("#/"):
            return schema
        library, _, rest = unquote(reference[2:]).partition("/")
        if library in libraries and not rest:
            return schema
        name = rest.partition("/")[0].replace("~1", "/").replace("~0", "~")
        if library in libraries and name in libraries[library] and name not in reached[library]:
            reached[library].add(name)
            todo.append(libraries[library][name])
    kept = {library: {n: s for n, s in named.items() if n in reached[library]} for library, named in libraries.items()}
    return {name: kept.get(name, value) for name, value in schema.items()}
