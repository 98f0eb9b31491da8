"""A keyword because of which valid values cannot be generated is in the grammar's warnings, with its place, and in the
table of the documentation."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from schema_strategies import accepts, compact, grammar_of, reference_validator

from plait.constrained import GrammarError
from plait.constrained.json_schema import schema_compiler
from plait.constrained.json_schema.lark_writer import NotWritten

ROOT = Path(__file__).parents[3]

DATE = {"type": "string", "format": "date"}
ARRAY, OBJECT = {"type": "array"}, {"type": "object"}
NARROWED: list[tuple[str, dict[str, Any], Any, str]] = [
    ("`contains`", {**ARRAY, "contains": {"const": 1}}, [0, 0, 0, 0, 1], "/contains"),
    ("`contains`", {**ARRAY, "contains": {"const": 1}, "maxContains": 1}, [0, 0, 0, 0, 1], "/contains"),
    (
        "`contains` with `maxContains`",
        {**ARRAY, "contains": {**OBJECT, "properties": {"a": DATE}, "required": ["a"]}, "maxContains": 1},
        [{"a": "2024-01-01"}, {"a": "x"}],
        "/contains",
    ),
    (
        "`minProperties`, `maxProperties` beside additional names",
        {**OBJECT, "properties": dict.fromkeys("abcdefg", True), "minProperties": 5},
        {"a": 1, "b": 1, "c": 1, "x": 1, "y": 1},
        "/minProperties",
    ),
    (
        "`patternProperties` of all names but a few (`^(?!a$).*`)",
        {**OBJECT, "patternProperties": {"^(?!a$).*$": {"type": "null"}}},
        {"\n": 1},
        "/patternProperties",
    ),
    ("`if` without a complement", {"if": DATE, "then": {"maxLength": 3}, "else": {"maxLength": 4}}, "abcd", "/if"),
    (
        "`oneOf` with branches that overlap",
        {
            "oneOf": [
                {**OBJECT, "required": ["a"], "properties": {"a": DATE}},
                {**OBJECT, "required": ["b"], "properties": {"b": {"type": "string"}}},
            ]
        },
        {"a": "x", "b": "x"},
        "at the top",
    ),
    (
        "`oneOf` with a `discriminator`",
        {
            "oneOf": [
                {**OBJECT, "properties": {"kind": {"const": "a"}}, "maxProperties": 0},
                {**OBJECT, "properties": {"kind": {"const": "b"}}, "minProperties": 1},
            ],
            "discriminator": {"propertyName": "kind"},
        },
        {},
        "/oneOf",
    ),
    (
        "`unevaluatedProperties`, `unevaluatedItems` beside `anyOf` of more than three branches",
        {
            **OBJECT,
            "anyOf": [{"properties": {name: {"const": 1}}, "required": [name]} for name in "abcd"],
            "unevaluatedProperties": False,
        },
        {"a": 1, "b": 1},
        "/unevaluatedProperties",
    ),
    (r"`\b`, `\B`, `\p` in a `pattern`", {"type": "string", "pattern": r"^a\b."}, "aé", "/pattern"),
    (
        "`uniqueItems` in one of several alternatives at a place",
        {"anyOf": [{**ARRAY, "uniqueItems": True}, {**ARRAY, "maxItems": 2}]},
        [1, 1],
        "of several alternatives",
    ),
    (
        "`uniqueItems` in one of several alternatives at a place",
        {
            "anyOf": [
                {"properties": {"a": {"items": {"allOf": [{"$ref": "#/$defs/set"}]}}}, "required": ["a"]},
                {**OBJECT, "additionalProperties": {"items": {"type": ["array", "null"]}}},
            ],
            "$id": "https://example.org/a",
            "$defs": {"set": {**ARRAY, "uniqueItems": True}},
        },
        {"a": [[1, 1]]},
        "of several alternatives",
    ),
]  # fmt: skip
"""The row of the documentation's table, a schema, a valid value that is left out, and the place in the warning."""


@pytest.mark.parametrize("at", range(len(NARROWED)))
def test_a_keyword_that_leaves_out_values_is_in_the_warnings(at: int) -> None:
    _, schema, value, place = NARROWED[at]
    inner = grammar_of({"type": "array", "items": schema})
    grammar = grammar_of(schema)
    assert reference_validator(schema).is_valid(value) or "pattern" in schema
    assert not accepts(grammar, compact(value))
    assert any(place in warning and "left out" in warning for warning in grammar.warnings), grammar.warnings
    assert any("/items" in warning or warning in grammar.warnings for warning in inner.warnings), inner.warnings


@pytest.mark.parametrize(
    "schema",
    [
        {**ARRAY, "contains": {"const": 1}, "maxItems": 4},
        {"if": {"type": "string"}, "then": {"maxLength": 3}},
        {"oneOf": [{"type": "string"}, {"type": "null"}]},
        {**OBJECT, "properties": {"a": {}, "b": {}}, "minProperties": 2, "additionalProperties": False},
        {"type": "string", "pattern": r"^\w+$"},
        {"anyOf": [{**ARRAY, "uniqueItems": True}, {"type": "string"}, {**OBJECT, "items": False}, {"enum": [[1]]}]},
        {"anyOf": [{**OBJECT, "properties": {"a": {**ARRAY, "uniqueItems": True}}}, {**ARRAY}]},
    ],
)
def test_a_schema_of_which_every_value_can_be_written_has_no_warning(schema: Any) -> None:
    assert grammar_of(schema).warnings == ()


def test_numbers_that_only_llguidance_can_write_have_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_nothing(*_: object, **__: object) -> None:
        raise NotWritten

    monkeypatch.setattr(schema_compiler, "write_lark", write_nothing)
    (warning,) = grammar_of({"type": "number", "exclusiveMinimum": 0, "maximum": 0.95}).warnings
    assert "numbers are left out" in warning
    assert grammar_of({"type": "number", "minimum": 0}).warnings == ()


def test_every_report_of_the_rewriter_is_tried_here_and_in_the_table() -> None:
    page = (ROOT / "docs/json-schema.md").read_text()
    rows = set(re.findall(r"^\| (.*?) \| .* \| yes \|$", page, re.M))
    assert rows - {"a bounded fraction in a schema for which plait writes no grammar of its own"} == {
        row for row, *_ in NARROWED
    }
    warnings = [warning for _, schema, _, _ in NARROWED for warning in grammar_of(schema).warnings]
    reports = [
        node.args[0]
        for path in (ROOT / "constrained/json_schema/rewrite").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "narrow"
    ]
    assert len(reports) > 7
    for report in reports:
        pieces = report.values if isinstance(report, ast.JoinedStr) else [report]
        words = "".join(re.escape(piece.value) if isinstance(piece, ast.Constant) else ".*" for piece in pieces)
        assert any(re.search(words, warning) for warning in warnings), words


@pytest.mark.parametrize("place", ["", "/properties/b"])
def test_a_schema_whose_values_are_all_left_out_is_not_said_to_have_none(place: str) -> None:
    inner = {"if": DATE, "then": {"type": "number", "enum": [None]}, "else": {"type": "string"}}
    schema = {**OBJECT, "properties": {"b": inner}, "required": ["b"]} if place else inner
    assert reference_validator(schema).is_valid({"b": "x"} if place else "x")
    with pytest.raises(GrammarError, match=r"^all values that were found are left out: at ") as caught:
        grammar_of(schema)
    assert f"at {place}/if values that violate both" in caught.value.reason
    with pytest.raises(GrammarError, match=r"^no value"):
        grammar_of({"type": "integer", "minimum": 3, "maximum": 2, "if": True, "then": {"format": "x"}})
