"""The content of a call, with the text that ends it, as Lark rules."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from llguidance import regex_to_lark

from plait.constrained.cfg.lark_compiler import check_lark
from plait.constrained.guidance.call_tracker import BEGINS, CallText
from plait.constrained.json_schema.bundling import bundled
from plait.constrained.json_schema.emptiness import is_of_kind, kinds_of
from plait.constrained.json_schema.lark_scalars import quoted, regex_literal
from plait.constrained.json_schema.rewrite.document import Schema
from plait.constrained.json_schema.schema_compiler import JsonRules, json_rules, rewritten_schema, schema_rules
from plait.constrained.json_schema.unique_parts import separate_unique_items
from plait.constrained.json_schema.value_syntax import ValueSyntax
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
from plait.constrained.structural.elements import FURTHER_NAME, ElementForm, ElementRules, ElementValue, WriteValue
from plait.constrained.structural.json_string import grammar_in_json, pattern_in_json
from plait.constrained.structural.marks import Marks
from plait.constrained.structural.raw_text import element_value, ended_text, has_text, string_body, typed_value
from plait.constrained.structural.value_kinds import Case, case_kinds, value_cases

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


# -- python literals ------------------------------------------------------------------------------
# Values of keyword arguments: Python's literals, whose strings are those of JSON or stand between single quotes.

IDENTIFIER = "[A-Za-z_][A-Za-z0-9_]{0,63}"
_BEGINS = ((b"", (*BEGINS, b"'")),)
_SINGLE = re.compile(r"[^'\\\x00-\x1f]*")
_JSON_CHARACTER = r'([^"\\\x00-\x1F\x7F]|\\["\\bfnrt])'
_NOT_SINGLE = r"""/(?s:.*)('|\\[^"])(?s:.*)/"""  # JSON of a text that _SINGLE does not match


def literal_value(
    schema: Schema, definitions: dict[str, Any], name: str, kinds: frozenset[str], content: Keywords
) -> ElementValue | None:
    """Returns the value of a parameter; None if no value can be written. `kinds` have no effect."""
    if schema is False:
        return None
    whole: dict[str, Any] = {} if schema is True else dict(schema)
    cases, known = value_cases(schema, definitions) if content.single_quotes else ([], definitions)
    strings = [case for case in cases if "string" in case_kinds(case)]
    if not strings or any(len(case) > 1 and any("enum" in part for part in case) for case in cases):
        return ElementValue(name, _rules(whole, definitions, name, content), _BEGINS)
    rules: list[str] = []
    options: list[str] = []
    for index, case in enumerate(strings):
        for text, terminals in _quoted(case, f"{name.upper()}Q{index}"):
            if has_text(terminals):
                options.append(text)
                rules += terminals
    others = [one for case in cases if (one := _without_strings(case)) is not None]
    if others:
        options.append(name)
        rules += _rules({"anyOf": others} if len(others) > 1 else others[0], known, name, content)
    return ElementValue(f"({' | '.join(options)})", rules, _BEGINS) if options else None


def _rules(schema: dict[str, Any], definitions: dict[str, Any], name: str, content: Keywords) -> list[str]:
    return schema_rules({**schema, **({"$defs": definitions} if definitions else {})}, content, name)


def _without_strings(case: Case) -> dict[str, Any] | None:
    """Returns the schema of the other values of a case; None if there are none."""
    kinds = [kind for kind in case_kinds(case) if kind != "string"]
    if "enum" in case[0]:
        return {"enum": [v for v in case[0]["enum"] if is_of_kind(v, kinds)]} if kinds else None
    return {**case[0], "type": kinds} if kinds else None


def _quoted(case: Case, name: str) -> list[tuple[str, tuple[str, ...]]]:
    """Returns (a terminal, it and those that it refers to) of the strings in single quotes, and of the others."""
    if "enum" in case[0]:
        texts = [value for value in case[0]["enum"] if isinstance(value, str)]
        literals = [f"'{t}'" if _SINGLE.fullmatch(t) else json.dumps(t, ensure_ascii=False) for t in texts]
        return [(name, (f"{name}: /{'|'.join(map(regex_literal, literals))}/",))]
    body = f"{name}B: {string_body(case)} & /{regex_to_lark(_SINGLE.pattern)}/"
    single = (f"{name}S", (body, f'{name}S: "\'" {name}B "\'"'))
    parts = [_NOT_SINGLE]
    for part in case:
        low, high = part.get("minLength", 0), part.get("maxLength", "")
        parts.append(f'/"{_JSON_CHARACTER}{{{low},{high}}}"/')
        if "pattern" in part:
            parts.append(f'/"({regex_to_lark(pattern_in_json(part["pattern"][1:-1]))})"/')
    return [single, (name, (f"{name}: {' & '.join(parts)}",))]


# -- notation -------------------------------------------------------------------------------------
# An object in a notation whose names stand bare and whose strings stand between quotes of any form; see `Notation`.
#
# The grammar is that of a literal, with another syntax of names and scalars.

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
