"""`%json` and `%lark` within Lark grammars: their texts, their errors, and their captures."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from byte_grammars import accepts, refusal
from matchers import compile_in_process
from schema_strategies import BYTE_VOCABULARY

from plait.constrained import JsonSchema, Lark, Structural, captured_texts
from plait.constrained.cfg.lark_nesting import flatten

VALUES = [None, True, -3, 7, 12, "a", "}", [1], {}, {"a": 1}, {"a": "}"}, {"b": [], "a": 2}]
SCHEMAS: list[Any] = [
    {"type": "integer", "minimum": 3},
    {"properties": {"a": {"type": "integer"}, "b": {"items": {"$ref": "#"}}}, "required": ["a"], "type": "object"},
    {"enum": ["}", {"a": "}"}, [1]]},
    {"oneOf": [{"type": "integer"}, {"type": "string", "minLength": 2}, {"type": "null"}]},
    {"type": "string", "description": '"} %lark {'},
]


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("indent", [None, 1])
def test_the_values_of_a_schema_are_those_of_json_schema(schema: Any, indent: int | None) -> None:
    nested = f'start: "<" (value ";"){{1,2}} ">"\nvalue: %json {json.dumps(schema, indent=indent)}\n'
    texts = [json.dumps(value) for value in VALUES]
    alone = accepts(JsonSchema(schema), *texts)
    assert True in alone and False in alone
    assert accepts(Lark(nested), *(f"<{text};>" for text in texts)) == alone
    assert accepts(Lark(nested), *(f"<{texts[alone.index(True)]};{text};>" for text in texts)) == alone


def test_a_nested_grammar_has_its_own_names() -> None:
    inner = '\n  start: x{1,2} (%json {"type": "null"})?\n  x: "}" | /[{]/ // }\n'
    grammar = Lark(f'start: "(" x %lark {{{inner}}} ")"\nx: "j0"')
    assert accepts(grammar, "(j0})", "(j0{}null)", "(j0null)", "(j0j0)") == [True, True, False, False]
    assert accepts(Lark('start: %lark { start: "b" | "{" } "c"'), "bc", "{c", "c") == [True, True, False]
    deep = 'start: "a" "b"?'
    for _ in range(4):
        deep = f'start: %lark {{\n{deep}\n}} "c"'
    assert accepts(Lark(deep), "acccc", "abcccc", "accc") == [True, True, False]
    assert "nest more than 4" in refusal(Lark(f"start: %lark {{\n{deep}\n}}")).reason


def test_texts_comments_and_patterns_are_no_directives() -> None:
    grammar = 'start: "%json {" /%lark \\{/ // %json {\n'
    assert flatten(grammar).text == grammar
    assert accepts(Lark(grammar), "%json {%lark {") == [True]


@pytest.mark.parametrize(
    ("grammar", "where", "reason"),
    [
        ('start: T\nT: "x" %json {"type": "null"}', 16, "part of a terminal"),
        ('start: %json {"type": "strin"}', 7, r"type has a wrong .* \(at /type\)"),
        ('start: %json {"type": }', 13, "no JSON"),
        ('start: %json {"anyOf": [{"minLenght": 3}]}', 7, "perhaps minLength .* /anyOf/0/minLenght"),
        ('start: %json {"uniqueItems": true}', 7, "uniqueItems"),
        ("start: %json", 7, "in braces"),
        ('start: "a" %lark { start: "b"', 17, "not closed"),
        ('start: %json {"type": "null"} zz', 30, "named zz"),
        ('start: "a" %lark {\nstart: foo\n}', 26, "named foo"),
        ('start: %lark {\nstart: %lark {\nstart: "a" <|end|>\n}\n}', 41, "control token"),
        ('start: a\na[capture]: "x" %lark {\nstart: b\nb[max_tokens=3]: /x/\n}', 32, "both capture and max_tokens"),
        ("start: %lark {\nstart: " + "(" * 101 + '"a"' + ")" * 101 + "\n}", None, "nest"),
    ],
)
def test_errors_have_a_place_in_the_whole_grammar(grammar: str, where: int | None, reason: str) -> None:
    error = refusal(Lark(grammar))
    assert re.search(reason, error.reason), error
    assert where is None or error.where == where


def test_rules_with_nested_parts_are_captured() -> None:
    grammar = 'start: "P " p "!" %lark {\nstart: q\nq[capture]: /[a-z]+/\n}\np[capture]: %json {"type": "array"}'
    assert captured_texts(Lark(grammar), "P [1, []]!ab") == {"q": "ab", "p": "[1, []]"}


def test_warnings_and_contents_of_calls() -> None:
    grammar = 'start: "x" %json {"type": "string", "format": "color"}'
    (warning,) = compile_in_process(Lark(grammar), BYTE_VOCABULARY).warnings
    assert "color" in warning
    call = Structural([("<c>", Lark(grammar), "</c>")], free_text=False)
    assert compile_in_process(call, BYTE_VOCABULARY).warnings == (warning,)
    assert accepts(call, '<c>x"red"</c>', "<c>x3</c>") == [True, False]
