"""`unevaluatedProperties`, `unevaluatedItems` and counted properties beside alternatives, held against jsonschema-rs.

A value is accepted in some order of its names exactly if it is valid.
"""

from __future__ import annotations

from itertools import permutations, product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schema_strategies import accepts, compact, grammar_of, reference_validator

from plait.constrained import Grammar, GrammarError

DRAFT_2019 = "https://json-schema.org/draft/2019-09/schema"
OBJECTS = [
    dict(zip(names, values, strict=True))
    for size in range(4)
    for names in permutations("abc", size)
    if list(names) == sorted(names)
    for values in product([1, "x"], repeat=size)
]
ARRAYS = [list(items) for size in range(4) for items in product([1, "x", None], repeat=size)]
SCHEMAS = st.sampled_from([{"type": "string"}, {"type": "integer"}, True])
NAMES = st.dictionaries(st.sampled_from("abc"), SCHEMAS, max_size=2)
KEYS = st.lists(st.sampled_from("abc"), min_size=1, max_size=2, unique=True)
NAMED = st.fixed_dictionaries(
    {"properties": NAMES}, optional={"required": KEYS, "patternProperties": st.just({"^[ab]": {"type": "integer"}})}
)
ITEMS = st.one_of(
    st.fixed_dictionaries(
        {"prefixItems": st.lists(SCHEMAS, min_size=1, max_size=2)}, optional={"minItems": st.integers(1, 2)}
    ),
    st.fixed_dictionaries({"contains": st.sampled_from([{"type": "string"}, {"const": None}])}),
    st.just({"items": {"type": "integer"}}),
)


def alternatives(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Schemas with alternatives of some schemas, at most two deep."""

    def around(part: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        some = st.lists(part, min_size=1, max_size=3)
        return st.one_of(
            some.map(lambda branches: {"anyOf": branches}),
            some.map(lambda branches: {"allOf": branches}),
            some.map(lambda branches: {"oneOf": branches}),
            part.map(lambda schema: {"$defs": {"x": schema}, "$ref": "#/$defs/x"}),
            st.tuples(part, part, part).map(lambda three: dict(zip(("if", "then", "else"), three, strict=True))),
            st.dictionaries(st.sampled_from("ab"), part, min_size=1, max_size=2).map(
                lambda named: {"dependentSchemas": named}
            ),
        )

    without_definitions = around(inner).filter(lambda schema: "$ref" not in schema)
    return around(st.one_of(inner, inner, without_definitions))


def accepts_in_some_order(grammar: Grammar, value: Any) -> bool:
    orders = [dict(items) for items in permutations(value.items())] if isinstance(value, dict) else [value]
    return any(accepts(grammar, compact(one)) for one in orders)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(outer=NAMED, beside=alternatives(NAMED), rest=SCHEMAS | st.just(False))
def test_unevaluated_properties(outer: dict[str, Any], beside: dict[str, Any], rest: Any) -> None:
    check({"type": "object", **outer, **beside, "unevaluatedProperties": rest}, OBJECTS)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(beside=alternatives(ITEMS), rest=SCHEMAS | st.just(False), most=st.integers(2, 3))
def test_unevaluated_items(beside: dict[str, Any], rest: Any, most: int) -> None:
    check({"type": "array", "maxItems": most, **beside, "unevaluatedItems": rest}, ARRAYS)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    outer=NAMED,
    beside=alternatives(NAMED),
    bounds=st.sampled_from([{"minProperties": 1}, {"minProperties": 2}, {"maxProperties": 1}, {"maxProperties": 2}]),
    others=st.sampled_from([{}, {"additionalProperties": False}, {"additionalProperties": {"type": "integer"}}]),
)
def test_counted_properties_beside_alternatives(
    outer: dict[str, Any], beside: dict[str, Any], bounds: dict[str, Any], others: dict[str, Any]
) -> None:
    check({"type": "object", **outer, **beside, **bounds, **others}, OBJECTS)


def check(schema: Any, values: list[Any]) -> None:
    validator = reference_validator(schema)
    try:
        grammar = grammar_of(schema)
    except GrammarError:
        return
    for value in values:
        assert not accepts_in_some_order(grammar, value) or validator.is_valid(value), value


EXACT: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "one of two": ({"oneOf": [{"properties": {n: True}, "required": [n]} for n in "ab"]}, OBJECTS),
    "any of three": ({"anyOf": [{"properties": {n: True}, "required": [n]} for n in "abc"]}, OBJECTS),
    "a condition": (
        {
            "properties": {"a": True},
            "if": {"properties": {"a": {"const": 1}}, "required": ["a"]},
            "then": {"properties": {"b": True}},
            "else": {"properties": {"c": True}},
        },
        OBJECTS,
    ),
    "dependent": ({"properties": {"a": True}, "dependentSchemas": {"a": {"properties": {"b": True}}}}, OBJECTS),
    "nested": (
        {
            "allOf": [
                {
                    "oneOf": [
                        {"properties": {"a": {"type": "string"}}},
                        {"required": ["b"], "patternProperties": {"b|c": True}},
                    ]
                }
            ]
        },
        OBJECTS,
    ),
    "contained items": ({"prefixItems": [True], "contains": {"type": "string"}}, ARRAYS),
    "prefixes": ({"anyOf": [{"prefixItems": [{"const": 1}]}, {"prefixItems": [True, {"type": "string"}]}]}, ARRAYS),
}


@pytest.mark.parametrize("name", EXACT)
def test_a_value_is_accepted_exactly_if_it_is_valid(name: str) -> None:
    beside, values = EXACT[name]
    schema = {"maxItems": 3, **beside, "unevaluatedProperties": False, "unevaluatedItems": False}
    grammar, validator = grammar_of(schema), reference_validator(schema)
    valid = [value for value in values if validator.is_valid(value)]
    assert [value for value in values if accepts_in_some_order(grammar, value)] == valid
    assert 0 < len(valid) < len(values)


def test_a_list_of_items_of_an_older_draft_is_a_prefix() -> None:
    schema = {"$schema": DRAFT_2019, "allOf": [{"items": [True]}], "unevaluatedItems": {"type": "string"}}
    grammar, validator = grammar_of(schema), reference_validator(schema)
    assert [accepts(grammar, compact(value)) for value in ARRAYS] == [validator.is_valid(value) for value in ARRAYS]


def test_a_condition_without_complement_allows_what_matches_either_way() -> None:
    schema = {
        "type": "object",
        "if": {"additionalProperties": {"type": "string"}},
        "then": {"required": ["a"]},
        "else": {"maxProperties": 2},
    }
    grammar, validator = grammar_of(schema), reference_validator(schema)
    for value in OBJECTS:
        assert not accepts_in_some_order(grammar, value) or validator.is_valid(value), value
    assert accepts(grammar, '{"a":1,"b":1}') and accepts(grammar, '{"a":"x","b":"x","c":"x"}')
    assert not accepts(grammar, "{}") and not accepts(grammar, '{"a":1,"b":1,"c":1}')
