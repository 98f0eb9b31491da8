"""`ValueSyntax`: how values are written otherwise than as JSON; Python's literals are one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from plait.constrained.json_schema.emptiness import kinds_of
from plait.constrained.json_schema.lark_scalars import quoted
from plait.constrained.json_schema.rewrite.document import Schema


class ValueSyntax:
    """Python's literals: JSON, but None, True and False. Numbers, arrays and the braces of objects are as in JSON.

    Expressions are of Lark.
    """

    null, true, false = "None", "True", "False"
    kinds_as_json = frozenset(("string", "number", "integer"))  # the types of which no value is written otherwise
    has_sorted_names = False  # members are written in the order of their names, whatever their case

    @property
    def literals(self) -> dict[str, str]:
        """The terminals of all values of null and of booleans."""
        return {"null": quoted(self.null), "boolean": f"/{self.true}|{self.false}/"}

    def is_json(self, schema: Schema) -> bool:
        """Returns whether a rewritten schema allows only scalars that are written as in JSON, without listing."""
        if not isinstance(schema, dict) or not schema.keys().isdisjoint(("$ref", "anyOf")):
            return schema is False
        parts = [schema, *schema.get("allOf", ())]
        return self.kinds_as_json.issuperset(kinds_of(parts)) and all("enum" not in part for part in parts)

    def scalar(self, value: Any) -> str | None:
        """Returns the expression of a listed scalar; None if it cannot be written."""
        if value is None or isinstance(value, bool):
            return quoted(self.null if value is None else self.true if value else self.false)
        return quoted(json.dumps(value, ensure_ascii=False))

    def name(self, name: str) -> str | None:
        """Returns the expression of a member's name; None if it cannot be written."""
        return quoted(json.dumps(name, ensure_ascii=False))

    def other_name(self, names: list[str], patterns: Sequence[str]) -> tuple[str, list[str]] | None:
        """Returns the pattern of names that are not listed, and of those that match each of `patterns`, which are
        anchored; None for those of JSON."""
        return None

    def strings(self, parts: list[dict[str, Any]], name: str) -> tuple[str, Sequence[str]] | None:
        """Returns the expression of the strings of some schemas that all apply, and terminals for it, whose names begin
        with `name`; None if there are none. Only if "string" is not among `kinds_as_json`."""
        raise NotImplementedError


class _JsonSyntax(ValueSyntax):
    """The syntax of JSON, for listed values that llguidance cannot write."""

    null, true, false = "null", "true", "false"


PYTHON = ValueSyntax()
JSON = _JsonSyntax()
