"""The interface of rewrite rules: functions from a schema to an equivalent one, or an UnsupportedKeywords error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from plait.constrained.json_schema.rewrite.document import SchemaDocument

SchemaObject: TypeAlias = dict[str, Any]
RewriteRule: TypeAlias = Callable[[SchemaObject, SchemaDocument], SchemaObject | None]
"""Returns an equivalent schema, or None if nothing changes. Raises UnsupportedKeywords."""


class UnsupportedKeywords(Exception):
    """Raised for keywords that are not supported in this combination; the first one is reported to the user."""

    def __init__(self, reason: str, *keywords: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.keywords = keywords


def without_keywords(schema: SchemaObject, *keywords: str) -> SchemaObject:
    """Returns a copy without some keywords.

    >>> without_keywords({"a": 1, "b": 2}, "a")
    {'b': 2}
    """
    return {name: value for name, value in schema.items() if name not in keywords}


def with_all_of(schema: SchemaObject, *schemas: Any) -> SchemaObject:
    """Returns a copy that requires `schemas` as well.

    >>> with_all_of({"allOf": [True]}, False)
    {'allOf': [True, False]}
    """
    return {**schema, "allOf": [*schema.get("allOf", []), *schemas]}
