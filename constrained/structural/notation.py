"""An object in a notation whose names stand bare and whose strings stand between quotes of any form; see `Notation`.

The grammar is that of a literal, with another syntax of names and scalars.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from llguidance import regex_to_lark

from plait.constrained.json_schema.bundling import bundled
from plait.constrained.json_schema.emptiness import kinds_of
from plait.constrained.json_schema.lark_scalars import quoted, regex_literal
from plait.constrained.json_schema.schema_compiler import JsonRules, rewritten_schema, schema_rules
from plait.constrained.json_schema.unique_parts import separate_unique_items
from plait.constrained.json_schema.value_syntax import ValueSyntax
from plait.constrained.specs import JsonSchema, Notation
from plait.constrained.structural.elements import FURTHER_NAME
from plait.constrained.structural.marks import Marks
from plait.constrained.structural.raw_text import ended_text, has_text, string_body

_BARE_NAME = re.compile(r"""[^:,{}\[\]<>|"'\s]+""")


class NotationSyntax(ValueSyntax):
    """The syntax of a Notation, in whose quotes some texts are control tokens."""

    true, false = "true", "false"
    kinds_as_json = frozenset(("number", "integer"))

    def __init__(self, content: Notation, marks: Marks) -> None:
        self._quote, self._marks = content.quote, marks
        self.null, self.has_sorted_names = content.null, content.is_sorted

    def scalar(self, value: Any) -> str | None:
        """See ValueSyntax."""
        if not isinstance(value, str):
            return super().scalar(value)
        is_ended = self._quote in value and not self._marks.split(self._quote)[1]  # no text has a control token
        return None if is_ended else self._marks.literal(self._quote, value, self._quote)

    def name(self, name: str) -> str | None:
        """See ValueSyntax."""
        return quoted(name) if _BARE_NAME.fullmatch(name) else None

    def other_name(self, names: list[str], patterns: Sequence[str]) -> tuple[str, list[str]]:
        """See ValueSyntax."""
        listed = "|".join(map(regex_literal, names))
        other = f"/{FURTHER_NAME}/" + (f" & ~/{listed}/" if names else "")
        return other, [f"/{regex_to_lark(pattern[1:-1])}/" for pattern in patterns]

    def strings(self, parts: list[dict[str, Any]], name: str) -> tuple[str, Sequence[str]] | None:
        """See ValueSyntax."""
        body = string_body(parts)
        if body is None:
            return None
        expression, rules = ended_text(body, self._quote, name, self._marks)
        return (f"{self._marks.literal(self._quote)} {expression}", rules) if has_text(rules) else None


def notation_rules(content: Notation, spec: JsonSchema, name: str, marks: Marks) -> JsonRules:
    """Returns the rules of an object, from the rule `name`. Raises GrammarError."""
    rewritten = rewritten_schema(bundled(spec))
    schema, unique = separate_unique_items(rewritten.schema)
    if kinds_of([schema]) != ["object"] or not schema.keys().isdisjoint(("$ref", "anyOf", "allOf")):
        rest = {name: value for name, value in schema.items() if name != "$defs"}
        schema = {"type": ["object"], "allOf": [rest], "$defs": schema.get("$defs", {})}
    rules = schema_rules(schema, content, name, NotationSyntax(content, marks))
    return JsonRules(name, tuple(rules), rewritten.unchecked, rewritten.warnings, unique)
