"""The content of a call, with the text that ends it, as Lark rules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from llguidance import regex_to_lark

from plait.constrained.cfg.lark_compiler import check_lark
from plait.constrained.guidance.call_tracker import CallText
from plait.constrained.json_schema.schema_compiler import json_rules
from plait.constrained.regex.python_syntax import to_plain_pattern
from plait.constrained.specs import (
    TYPE_PLACE,
    Elements,
    GrammarError,
    JsonObject,
    JsonSchema,
    JsonString,
    Keywords,
    Lark,
    Notation,
    Regex,
    Structural,
    Trigger,
)
from plait.constrained.structural.elements import ElementForm, ElementRules, WriteValue
from plait.constrained.structural.json_string import grammar_in_json, pattern_in_json
from plait.constrained.structural.marks import Marks
from plait.constrained.structural.notation import notation_rules
from plait.constrained.structural.python_literals import IDENTIFIER, literal_value
from plait.constrained.structural.raw_text import element_value, ended_text, has_text, typed_value

_JSON = CallText(b"", b"")
_OTHER = CallText(b"", b"", is_other=True)


@dataclass(frozen=True)
class ContentRules:
    """What a content adds to a grammar.

    expression: of the content and its end. rules: that it refers to. unchecked, warnings: as in RewrittenSchema.
    unique: a schema of arrays that must not repeat items, as `separate_unique_items` returns it. text: how the content
    is followed, without the marks around it.
    """

    expression: str
    rules: tuple[str, ...]
    unchecked: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    unique: dict[str, Any] | None = None
    text: CallText = _JSON

    def at(self, pointer: str) -> ContentRules:
        """Returns the same with `pointer` before the pointers."""
        return replace(self, unchecked=tuple(pointer + inner for inner in self.unchecked))


def content_rules(trigger: Trigger, name: str, spec: Structural, marks: Marks) -> ContentRules:
    """Returns the rules of the content of `trigger`, each with a name that begins with `name`. Raises GrammarError."""
    content = trigger.content
    if isinstance(content, str):
        content = json_spec(content, spec)
    if isinstance(content, JsonSchema | JsonObject):
        found = json_rules(content, name)
        end = marks.literal(trigger.end, with_id=True)
        return ContentRules(f"{found.start} {end}", found.rules, found.unchecked, found.warnings, found.unique)
    if isinstance(content, Regex):
        body = f"/{regex_to_lark(to_plain_pattern(content.pattern).pattern)}/"
        expression, rules = ended_text(body, trigger.end, name.upper(), marks)
        if not has_text(rules):
            raise GrammarError("no text of this pattern is without the text that ends it")
        return ContentRules(expression, rules, text=_OTHER)
    if isinstance(content, Lark):
        flat, end = check_lark(content.grammar), marks.literal(trigger.end, with_id=True)
        rules = (f"{name}: %lark {{", flat.lark, "}")
        return ContentRules(f"{name} {end}", rules, warnings=flat.warnings, text=_OTHER)
    if isinstance(content, JsonString):
        return ContentRules(*_json_string(content, name, marks.literal(trigger.end, with_id=True)))
    if isinstance(content, Notation):
        found = notation_rules(content, json_spec(str(content.schema), spec), name, marks)
        end, text = marks.literal(trigger.end, with_id=True), CallText(b"", b"", quote=marks.to_bytes(content.quote))
        return ContentRules(f"{name} {end}", found.rules, found.unchecked, found.warnings, found.unique, text)
    assert isinstance(content, Elements | Keywords)
    return _elements(content, trigger, name, spec, marks)


def _elements(
    content: Elements | Keywords, trigger: Trigger, name: str, spec: Structural, marks: Marks
) -> ContentRules:
    if isinstance(content, Elements):
        opening = content.open.partition(TYPE_PLACE)[0] if content.types else content.open
        form = ElementForm(opening, content.close, content.separator, trigger.end)
        write = typed_value if content.types else element_value
        value: WriteValue = partial(write, content=content, marks=marks)
    else:
        form = ElementForm("{name}=", "", ", ", trigger.end, IDENTIFIER, only_such_names=True)
        value = partial(literal_value, content=content)
    found = ElementRules(json_spec(str(content.schema), spec), form, name, marks, value)
    return ContentRules(
        found.expression, tuple(found.rules), found.unchecked, found.warnings, found.unique, found.text()
    )


def _json_string(content: JsonString, name: str, end: str) -> tuple[str, tuple[str, ...]]:
    """Returns the expression of a string and its end, and its rules."""
    if isinstance(content.of, Regex):
        pattern = regex_to_lark(pattern_in_json(content.of.pattern))
        return f"{name.upper()} {end}", (f'{name.upper()}: "\\"" /{pattern}/ "\\""',)
    if check_lark(content.of.grammar).rules:
        raise GrammarError("%json and %lark are not supported where the text stands in a JSON string")
    rules = (f"{name}: %lark {{", grammar_in_json(content.of.grammar), "}")
    return f'"\\"" {name} "\\"" {end}', rules


def json_spec(schema: str, spec: Structural) -> JsonSchema:
    """Returns a schema in the style of a Structural."""
    return JsonSchema(
        schema,
        whitespace=spec.whitespace,
        lenient=spec.lenient,
        annotations=spec.annotations,
        compact=spec.compact,
        strict_formats=spec.strict_formats,
    )
