"""Values of keyword arguments: Python's literals, whose strings are those of JSON or stand between single quotes."""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import regex_to_lark

from plait.constrained.guidance.call_tracker import BEGINS
from plait.constrained.json_schema.emptiness import is_of_kind
from plait.constrained.json_schema.lark_scalars import regex_literal
from plait.constrained.json_schema.rewrite.document import Schema
from plait.constrained.json_schema.schema_compiler import schema_rules
from plait.constrained.specs import Keywords
from plait.constrained.structural.elements import ElementValue
from plait.constrained.structural.json_string import pattern_in_json
from plait.constrained.structural.raw_text import has_text, string_body
from plait.constrained.structural.value_kinds import Case, case_kinds, value_cases

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
