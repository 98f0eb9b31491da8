"""The interface of rewrite rules: functions from a schema to an equivalent one, or an UnsupportedKeywords error."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


def refusal(reason: str, warnings: Iterable[str]) -> str:
    """Returns why a schema is refused: where no value was found, the warning that values are left out, if there is one.

    >>> refusal("no value satisfies this schema", ["at /if values may be left out"])
    'all values that were found are left out: at /if values may be left out'
    """
    narrowing = next((warning for warning in warnings if "left out" in warning), None)
    is_empty = reason.startswith(("no value", "no finite value"))
    return f"all values that were found are left out: {narrowing}" if narrowing and is_empty else reason


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
