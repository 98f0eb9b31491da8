"""A keyword because of which valid values cannot be generated is in the grammar's warnings, with its place."""

from __future__ import annotations

from typing import Any

import pytest
from schema_strategies import accepts, compact, grammar_of, reference_validator

DATE = {"type": "string", "format": "date"}
ARRAY, OBJECT = {"type": "array"}, {"type": "object"}
NARROWED: list[tuple[dict[str, Any], Any, str]] = [
    ({**ARRAY, "contains": {"const": 1}}, [0, 0, 0, 0, 1], "/contains"),
    ({**ARRAY, "contains": {"const": 1}, "maxContains": 1}, [0, 0, 0, 0, 1], "/contains"),
    ({**OBJECT, "properties": {"a": {}, "b": {}}, "minProperties": 2}, {"x": 1, "y": 1}, "/minProperties"),
    ({"if": DATE, "then": {"maxLength": 3}, "else": {"maxLength": 4}}, "abcd", "/if"),
    (
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
        {
            **OBJECT,
            "anyOf": [{"properties": {name: {"const": 1}}, "required": [name]} for name in "abcd"],
            "unevaluatedProperties": False,
        },
        {"a": 1, "b": 1},
        "/unevaluatedProperties",
    ),
    ({"type": "string", "pattern": r"^a\b."}, "aé", "/pattern"),
    ({"anyOf": [{**ARRAY, "uniqueItems": True}, {**ARRAY, "maxItems": 2}]}, [1, 1], "of several alternatives"),
    (
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


@pytest.mark.parametrize("at", range(len(NARROWED)))
def test_a_keyword_that_leaves_out_values_is_in_the_warnings(at: int) -> None:
    schema, value, place = NARROWED[at]
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
