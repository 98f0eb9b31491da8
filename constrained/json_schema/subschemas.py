"""The schemas that stand in a rewritten schema, which has few keywords."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from plait.constrained.json_schema.rewrite.document import Schema

_ALONE = frozenset(("items", "additionalProperties"))
_LISTED = frozenset(("allOf", "anyOf", "prefixItems"))
_NAMED = frozenset(("properties", "patternProperties"))


def parts_of(schema: Schema) -> Iterator[dict[str, Any]]:
    """Yields a rewritten schema and every schema in it, references not followed.

    >>> list(parts_of({"items": {"type": "null"}}))
    [{'items': {'type': 'null'}}, {'type': 'null'}]
    """
    todo: list[Any] = [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            yield part
            todo += [part[name] for name in part.keys() & _ALONE]
            for name in part.keys() & _LISTED:
                todo += part[name]
            for name in part.keys() & _NAMED:
                todo += part[name].values()


def with_inner(schema: dict[str, Any], change: Callable[[Schema], Schema]) -> dict[str, Any]:
    """Returns a rewritten schema with `change` applied to each schema that stands directly in it.

    >>> with_inner({"type": "array", "items": {"minimum": 1}}, lambda inner: False)
    {'type': 'array', 'items': False}
    """
    out = dict(schema)
    for name in out.keys() & _ALONE:
        out[name] = change(out[name])
    for name in out.keys() & _LISTED:
        out[name] = list(map(change, out[name]))
    for name in out.keys() & (_NAMED | {"$defs"}):
        out[name] = {key: change(inner) for key, inner in out[name].items()}
    return out
