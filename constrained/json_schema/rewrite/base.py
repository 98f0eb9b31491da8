"""What a rewrite is: a function from a schema to an equal one, or an objection.

Knows: the shape of a rewrite. Must not know: any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from plait.constrained.json_schema.rewrite.document import SchemaDocument

SchemaObject: TypeAlias = dict[str, Any]
RewriteRule: TypeAlias = Callable[[SchemaObject, SchemaDocument], SchemaObject | None]
"""An equal schema, or None where there is nothing to do; Objection where something cannot be honoured."""


class UnsupportedKeywords(Exception):
    """These keywords of a schema cannot be honoured together with the others, and why; the first is to blame."""

    def __init__(self, reason: str, *keywords: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.keywords = keywords


def without_keywords(schema: SchemaObject, *keywords: str) -> SchemaObject:
    """A copy that lacks some keywords.

    >>> without({"a": 1, "b": 2}, "a")
    {'b': 2}
    """
    return {name: value for name, value in schema.items() if name not in keywords}


def with_all_of(schema: SchemaObject, *schemas: Any) -> SchemaObject:
    """A copy that demands `schemas` as well.

    >>> also({"allOf": [True]}, False)
    {'allOf': [True, False]}
    """
    return {**schema, "allOf": [*schema.get("allOf", []), *schemas]}
