"""Finds the keyword of a schema that a compiler refuses, by removing one keyword after another."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any, TypeAlias

from plait.constrained.json_schema.rewrite.document import (
    SUBSCHEMA_KEYWORDS,
    Schema,
    SchemaDocument,
    escape_pointer_token,
    inner_schemas,
)
from plait.constrained.json_schema.rewrite.rewriter import rewrite_subschema
from plait.constrained.specs import GrammarError

SEARCH_LIMIT_S = 0.3
MAX_CHARS = 100_000  # of a schema; in a longer one the time is over after a few attempts
_TRIED_LAST = frozenset(("type", "required"))  # without them many schemas are accepted, so they are tried last
IsRejected: TypeAlias = Callable[[Schema], bool]
"""Whether the compiler refuses this (rewritten) schema."""


def locate_rejected_keyword(text: str, rejects: IsRejected) -> str:
    """Returns the JSON pointer of the innermost keyword of schema `text` without which it would be accepted.

    If no single keyword is the cause, it is the pointer of the subschema that contains all causes; after 0.3 s, the
    best pointer found so far. That of a schema of more than 100,000 characters is not searched for: it is "".

    >>> locate_rejected_keyword('{"items": {"enum": [1]}}', lambda schema: "enum" in str(schema))
    '/items/enum'
    """
    return _ErrorLocator(SchemaDocument(text), rejects).locate() if len(text) <= MAX_CHARS else ""


class _ErrorLocator:
    def __init__(self, document: SchemaDocument, rejects: IsRejected) -> None:
        self._document, self._rejects = document, rejects
        self._until = monotonic() + SEARCH_LIMIT_S
        self._seen: set[int] = set()

    def locate(self) -> str:
        at, part = "", self._document.schema
        while isinstance(part, dict) and id(part) not in self._seen:
            self._seen.add(id(part))
            names = sorted(part, key=lambda name: (name in _TRIED_LAST, name not in SUBSCHEMA_KEYWORDS))
            keyword = next((name for name in names if self._is_accepted(_without(part, name), at)), None)
            if keyword is None:
                return at
            inner = self._inner(part, keyword, at)
            if inner is None:
                return f"{at}/{escape_pointer_token(keyword)}"
            at, part = inner
        return at

    def _inner(self, part: dict[str, Any], keyword: str, at: str) -> tuple[str, Schema] | None:
        """Returns the subschema of `keyword` that is refused alone and is the only reason why `part` is refused."""
        if keyword == "$ref":
            target = self._document.resolve_reference(part["$ref"], at)
            return (self._document.pointer(target, at), target) if self._is_rejected(target, at) else None
        value = part[keyword]
        for index, (pointer, inner) in enumerate(inner_schemas(part, keyword, at)):
            changed: Any = True
            if isinstance(value, list):
                changed = [True if other_index == index else item for other_index, item in enumerate(value)]
            elif pointer != f"{at}/{keyword}":
                changed = {
                    name: True if other_index == index else item
                    for other_index, (name, item) in enumerate(value.items())
                }
            if self._is_rejected(inner, pointer) and self._is_accepted({**part, keyword: changed}, at):
                return pointer, inner
        return None

    def _is_accepted(self, part: dict[str, Any], at: str) -> bool:
        return not self._is_rejected({name: value for name, value in part.items() if value is not None}, at)

    def _is_rejected(self, part: Schema, at: str) -> bool:
        """Returns True if undecided as well, so that no keyword is named without proof."""
        if monotonic() > self._until:
            return True
        try:
            return self._rejects(rewrite_subschema(self._document, part, at))
        except GrammarError:
            return True


def _without(part: dict[str, Any], keyword: str) -> dict[str, Any]:
    """Returns a schema without what a keyword demands. Listed names stay, so that others are as closed as before."""
    value = part[keyword]
    return {
        **part,
        keyword: dict.fromkeys(value, True) if keyword == "properties" and isinstance(value, dict) else None,
    }
