"""`propertyNames` beside `patternProperties`, and patterns that overlap, alone and in random pairs."""

from __future__ import annotations

from string import ascii_lowercase
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matchers import allowed_tokens
from schema_strategies import BYTE_VOCABULARY, accepts, compact, grammar_of, reference_validator

from plait.constrained import GrammarError

SCHEMAS: list[dict[str, Any]] = [
    {"patternProperties": {"^a": {"type": "integer"}, "b": {"minimum": 2}, "c$": {"maximum": 0}}},
    {"patternProperties": {"^a": {"type": "integer"}, "b": False}},
    {"propertyNames": {"minLength": 1, "maxLength": 300}},
    {"propertyNames": {"pattern": "^[ab]+$"}, "patternProperties": {"^a": {"type": "integer"}}},
    {"propertyNames": {"pattern": "^[ab]+$"}, "patternProperties": {"^a": {}}, "additionalProperties": False},
    {
        "propertyNames": {"pattern": "^[ab]+$", "maxLength": 2},
        "additionalProperties": {"type": "integer"},
        "properties": {"a": {"type": "string"}, "c": {}},
    },
    {"propertyNames": {"anyOf": [{"pattern": "^a"}, {"maxLength": 1}]}},
    {"propertyNames": {"enum": ["a", "ab"], "minLength": 2}},
    {"propertyNames": {"format": "date"}},
    {"propertyNames": {"not": {"enum": ["a", "ab"]}, "pattern": "^a"}},
    {"propertyNames": {"not": {"anyOf": [{"pattern": "^a"}, {"maxLength": 1}]}}, "additionalProperties": {"const": 1}},
    {"propertyNames": {"type": "integer"}},
    {
        "propertyNames": {
            "allOf": [
                {"anyOf": [{"pattern": "^[ab]{1,9}$|^_[a-z]{1,9}$"}, {"enum": ["c", "ac"]}]},
                {"not": {"enum": ["ab"]}},
                {"not": {"pattern": "^(ba|bb)$"}},
            ]
        },
        "properties": {"c": {"type": "integer"}, "a": {"type": "string"}},
        "additionalProperties": {"type": "integer"},
    },
    {"propertyNames": {"anyOf": [{"pattern": "^a", "not": {"const": "ab"}}, {"enum": ["ab", "c"]}]}},
    {"propertyNames": {"anyOf": [{"pattern": "^a", "not": {"const": "ab"}}, {"enum": ["b"]}]}, "properties": {"b": {}}},
    {
        "propertyNames": {"anyOf": [{"enum": ["a", "c"]}, {"pattern": "^b.$"}]},
        "patternProperties": {"c|b": {"const": 1}},
        "additionalProperties": {"const": "x"},
    },
]
NAMES = ("a", "b", "c", "ab", "ba", "bb", "ac", "abc", "aaa", "", "2024-01-01", "2024-13-01", "é")


@pytest.mark.parametrize("at", range(len(SCHEMAS)))
def test_exactly_the_valid_names_are_accepted(at: int) -> None:
    check(SCHEMAS[at])


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(one=st.sampled_from(SCHEMAS), other=st.sampled_from(SCHEMAS), word=st.sampled_from(["allOf", "anyOf"]))
def test_pairs(one: dict[str, Any], other: dict[str, Any], word: str) -> None:
    try:
        check({word: [one, other]})
    except GrammarError as error:
        assert error.where is not None  # noqa: PT017


def check(schema: dict[str, Any]) -> None:
    grammar, validator = grammar_of(schema), reference_validator(schema)
    for value in ({name: value} for name in NAMES for value in (1, 3, -1, "x")):
        assert accepts(grammar, compact(value)) is bool(validator.is_valid(value)), (schema, value)


def test_patterns_of_a_few_names_that_overlap_a_large_one_become_properties() -> None:
    schema = {
        "patternProperties": {
            "^[a-zA-Z0-9_-]{3,256}$": {"type": "string"},
            "^MD5$": {"pattern": "^[a-f0-9]{2}$"},
            "^SHA-(1|256)$": {"pattern": "^[a-f0-9]{3}$"},
        },
        "additionalProperties": False,
    }
    grammar, validator = grammar_of(schema), reference_validator(schema)
    values = [{"MD5": "ab"}, {"MD5": "abc"}, {"MD5": 3}, {"SHA-1": "abc"}, {"SHA-256": "ab"}, {"xy": "a"}, {"xyz": "a"}]
    values += [{"xyz": 1}, {"MD5": "ab", "SHA-256": "abc", "xyz": "q"}, {"MD5": "ab", "SHA-256": "a", "xyz": "q"}, {}]
    for value in values:
        assert accepts(grammar, compact(value)) is bool(validator.is_valid(value)), value


def test_a_name_outside_of_the_pattern_is_not_begun() -> None:
    """Not even for the last character of Unicode, which classes once left out: such a name could hardly be ended."""
    names = {"propertyNames": {"pattern": "^[a-z]"}, "properties": {"a": {}}}
    grammar = grammar_of({"type": "object", "additionalProperties": {"type": "integer"}, **names})
    assert not accepts(grammar, '{",\U0010ffff":1}') and accepts(grammar, '{"b\U0010ffff":1}')
    matcher = grammar.matcher()
    assert all(matcher.accept(1 + byte) for byte in b'{"')
    assert "".join(chr(token - 1) for token in allowed_tokens(matcher, BYTE_VOCABULARY)) == ascii_lowercase


def test_names_that_one_pattern_excludes_may_have_any_value() -> None:
    listed = {"a": {"maximum": 9}, "pat": {}}
    schema = {"type": "object", "properties": listed, "patternProperties": {"^(?!(pat|x)$).*$": {"type": "integer"}}}
    grammar, validator = grammar_of(schema), reference_validator(schema)
    for name in ("a", "pat", "x", "patx", "b", ""):
        for value in (1, "s", 10):
            assert accepts(grammar, compact({name: value})) is bool(validator.is_valid({name: value})), (name, value)
    assert accepts(grammar, '{"b\\n":1}') and grammar.warnings
    beside = {"allOf": [{k: v for k, v in schema.items() if k != "properties"}], "unevaluatedProperties": False}
    assert not accepts(grammar_of(beside), '{"pat":1}') and accepts(grammar_of(beside), '{"b":1}')


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"c": {}, "d": {}}, "patternProperties": {"^[cd]$": {"type": "integer"}}},
        {"properties": {"c": {}}, "patternProperties": {"^[cd]$": {"type": "integer"}}, "allOf": [{"required": ["d"]}]},
        {"patternProperties": {"^[cd]$": {"type": "integer"}}, "allOf": [{"properties": {"c": {}, "d": {}}}]},
        {"patternProperties": {"^(c|d)$": {"type": "integer"}}, "anyOf": [{"properties": {"d": {}, "c": {}}}]},
        {"properties": {"c": {}, "d": {}}, "propertyNames": {"enum": ["c", "d"]}},
        {"properties": {"c": {}}, "propertyNames": {"pattern": "^[cd]$"}, "allOf": [{"properties": {"d": {}}}]},
    ],
)
def test_behind_all_names_of_a_pattern_comes_no_other(schema: dict[str, Any]) -> None:
    schema = {"type": "object", "additionalProperties": False} | schema
    if "propertyNames" in schema:
        del schema["additionalProperties"]
    ends = 0
    for names in ("cd", "dc", "d"):
        matcher = grammar_of(schema).matcher()
        text = "{" + ",".join(f'"{name}":1' for name in names)
        if all(matcher.accept(1 + byte) for byte in text.encode()):
            ends += 1
            matcher.accept(1 + ord(","))
            assert matcher.completion(40) is not None
    assert ends >= 2
