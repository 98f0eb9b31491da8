"""Counts of properties beside optional names: a value is accepted exactly if it is valid by jsonschema-rs."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schema_strategies import accepts, compact, grammar_of, reference_validator

from plait.constrained import GrammarError

NAMES = ["a", "b", "c", "x", "y"]
OBJECTS: list[dict[str, Any]] = [
    dict.fromkeys(names, value)
    for value in (1, "s")
    for names in (tuple(n for i, n in enumerate(NAMES) if mask >> i & 1) for mask in range(32))
]
LISTED = st.lists(st.sampled_from("abc"), unique=True, max_size=3).map(lambda names: dict.fromkeys(names, True))
SCHEMAS = st.fixed_dictionaries(
    {"properties": LISTED},
    optional={
        "type": st.just("object"),
        "required": st.lists(st.sampled_from("abx"), unique=True, max_size=2),
        "minProperties": st.integers(0, 4),
        "maxProperties": st.integers(0, 4),
        "additionalProperties": st.sampled_from([False, True, {"type": "integer"}]),
        "patternProperties": st.sampled_from([{"^[xa]$": {"type": "integer"}}, {"^x": True}]),
        "propertyNames": st.sampled_from([{"pattern": "^[abx]"}, {"enum": ["a", "b", "x"]}]),
        "allOf": st.lists(
            st.sampled_from(
                [{"properties": {"b": {"type": "integer"}}}, {"required": ["c"]}, {"$ref": "#/$defs/d"}]
                + [{"minProperties": 1}, {"maxProperties": 2}, {"properties": {"x": {}}, "minProperties": 2}]
            ),
            min_size=1,
            max_size=2,
        ),
        "anyOf": st.sampled_from(
            [
                [{"minProperties": 2}, {"required": ["a"]}],
                [{"properties": {"c": {}}, "maxProperties": 1}, {"$ref": "#/$defs/d"}],
            ]
        ),
    },
).map(lambda schema: {**schema, "$defs": {"d": {"properties": {"y": {}}, "minProperties": 1, "maxProperties": 3}}})


def any_order(grammar: Any, value: Any) -> bool:
    """Whether an object of equal values is accepted in some order of its names."""
    return frozenset(value) in accepted_names(grammar, next(iter(value.values()), 1))


@functools.lru_cache(maxsize=2)
def accepted_names(grammar: Any, value: Any) -> set[frozenset[str]]:
    """The sets of names with which an object of equal values is accepted. Orders share what they begin with."""
    matcher, found = grammar.matcher(), set[frozenset[str]]()

    def accepts_text(text: str) -> bool:
        for count, byte in enumerate(text.encode()):
            if not matcher.accept(1 + byte):
                matcher.rollback(count)
                return False
        return True

    def go_on(names: tuple[str, ...]) -> None:
        if accepts_text("}"):
            found.update([frozenset(names)] * matcher.is_accepting)
            matcher.rollback(1)
        for name in NAMES:
            member = "," * bool(names) + compact({name: value})[1:-1]
            if name not in names and accepts_text(member):
                go_on((*names, name))
                matcher.rollback(len(member))

    if accepts_text("{"):
        go_on(())
    return found


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(SCHEMAS)
def test_objects_are_accepted_exactly_if_they_are_valid(schema: Any) -> None:
    validator = reference_validator(schema)
    reason, grammar = "", None
    try:
        grammar = grammar_of(schema)
    except GrammarError as error:
        reason = error.reason
    assert not reason or reason.startswith(("no value", "no finite value", "schema too large"))
    if reason.startswith("no"):
        assert not any(map(validator.is_valid, OBJECTS))
    if grammar is None:
        return
    for value in OBJECTS:
        assert any_order(grammar, value) is bool(validator.is_valid(value)), value


@pytest.mark.parametrize("shut", [{}, {"additionalProperties": False}, {"additionalProperties": {"type": "integer"}}])
@pytest.mark.parametrize(("least", "most"), [(2, None), (0, 2), (1, 2), (2, 2), (3, 4), (1, 1), (2, 3)])
def test_counts_beside_three_names_compile(shut: Any, least: int, most: int | None) -> None:
    schema = {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": least, **shut}
    schema |= {} if most is None else {"maxProperties": most}
    grammar, validator = grammar_of(schema), reference_validator(schema)
    for value in OBJECTS:
        assert any_order(grammar, value) is bool(validator.is_valid(value)), value


@pytest.mark.parametrize(
    "others", [{"additionalProperties": {"type": "integer"}}, {"patternProperties": {"^b": False}}]
)
@pytest.mark.parametrize(
    "counts", [{"minProperties": 2}, {"maxProperties": 1}, {"minProperties": 1, "maxProperties": 2}]
)
def test_names_that_another_schema_lists_are_additional_ones(others: Any, counts: Any) -> None:
    for listed in ("a", "b"):
        schema = {"type": "object", "allOf": [{"properties": {listed: {}}}], **others, **counts}
        grammar, validator = grammar_of(schema), reference_validator(schema)
        for a, b, c in itertools.product((None, 1, "s"), repeat=3):
            members = {name: value for name, value in (("a", a), ("b", b), ("c", c)) if value is not None}
            is_accepted = any(accepts(grammar, compact(dict(some))) for some in itertools.permutations(members.items()))
            assert is_accepted is bool(validator.is_valid(members)), members


def test_a_pattern_applies_to_a_listed_name_beside_listed_property_names() -> None:
    schema = {"properties": {"a": {}}, "patternProperties": {"^[xa]$": {"type": "integer"}}}
    grammar = grammar_of({"type": "object", **schema, "propertyNames": {"enum": ["a", "b", "x"]}})
    assert accepts(grammar, '{"a":1}') and not accepts(grammar, '{"a":"s"}')


@pytest.mark.parametrize(
    "counts", [{"maxProperties": 4}, {"minProperties": 3}, {"minProperties": 2, "maxProperties": 4}]
)
def test_names_may_come_in_the_order_of_the_schema(counts: Any) -> None:
    schema = {"type": "object", "properties": {"c": {}, "a": {}, "b": {}}, "required": ["a"], **counts}
    grammar, validator = grammar_of(schema), reference_validator(schema)
    for mask in range(32):
        value = {name: 1 for i, name in enumerate("cabxy") if mask >> i & 1}
        assert accepts(grammar, compact(value)) is bool(validator.is_valid(value)), value


def test_a_repeated_name_counts_once() -> None:
    grammar = grammar_of({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2})
    assert not accepts(grammar, '{"x":1,"x":1}') and accepts(grammar, '{"a":1,"x":1}')
    assert accepts(grammar, '{"x":1,"y":1}') and not grammar.warnings
