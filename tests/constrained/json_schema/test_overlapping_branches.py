"""`oneOf` whose branches share values, complements of objects and arrays, and counted `contains`.

A value is accepted exactly if it is valid by jsonschema-rs; a random schema accepts no other value.
"""

from __future__ import annotations

import json
import random
from itertools import permutations, product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matchers import allowed_tokens
from schema_strategies import (
    BYTE_VOCABULARY,
    EOS_ID,
    accepts,
    compact,
    exceeds_double_range,
    grammar_of,
    reference_validator,
)

from plait.constrained import Grammar, GrammarError

TEXT, INTEGER, SHUT = {"type": "string"}, {"type": "integer"}, {"additionalProperties": False}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
OBJECT = {"type": "object"}
LONG_PATTERN = "|".join(f"([0-9A-F]{{1,4}}:){{{n}}}(:[0-9A-F]{{1,4}}){{1,{7 - n}}}" for n in range(1, 7))
CASES: dict[str, dict[str, Any]] = {
    "closed objects without required names": {
        "oneOf": [{**OBJECT, "properties": {name: TEXT}, **SHUT} for name in "abc"],
    },
    "closed objects that share a name": {
        "oneOf": [{**OBJECT, "properties": {name: TEXT, "c": INTEGER}, **SHUT} for name in "ab"],
    },
    "a required name of another type": {
        **OBJECT,
        "properties": {"a": {}, "b": {}},
        "required": ["a", "b"],
        "oneOf": [{"properties": {"a": TEXT}}, {"properties": {"a": {"type": "array", "items": TEXT}}}],
    },
    "names that are required": {
        "type": "object",
        "properties": {"a": TEXT, "b": {"type": "array", "items": TEXT, "uniqueItems": True}},
        "allOf": [{"oneOf": [{"required": ["a"], "properties": {"a": TEXT}}, {"required": ["b"]}]}],
        **SHUT,
    },
    "listed texts of an optional name": {
        "oneOf": [{**OBJECT, "properties": {"a": {"const": kind}, "b": INTEGER}} for kind in ("x", "y")],
    },
    "one branch within another": {
        "oneOf": [{"type": "string", "format": "ipv4", "minLength": 8}, {"type": "string", "format": "ipv4"}],
    },
    "a listed text that violates a format": {"oneOf": [{"type": "string", "format": "uuid"}, {"enum": ["a", "b"]}]},
    "listed values": {"oneOf": [{"enum": [1, -1, "a"]}, {"type": "integer", "minimum": 0}]},
    "items that violate": {
        "oneOf": [
            {"type": "array", "maxItems": 2, "items": INTEGER},
            {"type": "array", "maxItems": 2, "items": {"type": ["integer", "string"]}},
        ],
    },
    "a complement of items": {
        "type": "array",
        "maxItems": 2,
        "not": {"items": {"type": ["string", "null"], "maxLength": 0}},
    },
    "a complement of contains": {"type": "array", "not": {"contains": TEXT}, "maxItems": 2},
    "a condition on items": {"if": {"contains": TEXT}, "then": {"maxItems": 1}, "else": {"minItems": 1}},
    "a condition on names": {
        **OBJECT,
        "properties": {"a": {}, "b": {}},
        "oneOf": [{"dependentRequired": {"a": ["b"]}}, {"required": ["a"], "properties": {"a": TEXT}}],
    },
    "one of oneOf": {"oneOf": [{"oneOf": [TEXT, {"type": "null"}]}, {"enum": ["a", 1, None]}]},
    "large patterns": {
        "type": "string",
        "oneOf": [{"pattern": rf"^({LONG_PATTERN}|[0-9]+(\.[0-9]+){{3}})$"}, {"pattern": r"^\$\{[a-z_]+\}$|^x$"}],
    },
    "objects that forget their type": {
        "oneOf": [
            {"properties": {"a": {"const": kind}}, "required": ["a"], **SHUT} for kind in ("x", "a", *"123456789")
        ],
    },
    "many branches within a branch": {
        "oneOf": [
            {
                "oneOf": [{"properties": {"a": {"const": f"{i}"}}, "required": ["a", "b"]} for i in range(20)]
                + [{"$ref": "#/$defs/x"}]
            },
            {
                **OBJECT,
                "properties": {"a": {"const": "a"}, "b": {}},
                "unevaluatedProperties": False,
                "oneOf": [
                    {"required": ["b"], "not": {"anyOf": [{"required": ["a"]}, {"required": ["c"]}]}},
                    {"required": ["a"], "not": {"required": ["b"]}},
                ],
            },
        ],
        "$defs": {"x": {"required": ["a", "b"], "properties": {"a": {"const": "x"}, "b": {"items": {"$ref": "#"}}}}},
    },
    "a minimum beside names": {
        "oneOf": [
            {**OBJECT, "properties": {"a": TEXT}, "required": ["a"], **SHUT},
            {**OBJECT, "properties": {"a": {}, "b": {}}, "maxProperties": 1, **SHUT},
        ],
    },
    "three of contains": {"type": "array", "contains": TEXT, "minContains": 3},
    "at most one of contains": {"type": "array", "contains": TEXT, "maxContains": 1},
    "none of contains": {"type": "array", "contains": TEXT, "minContains": 0, "maxContains": 0},
    "two or three of contains": {"contains": {"const": 1}, "minContains": 2.0, "maxContains": 3.0, "items": INTEGER},
    "old contains": {"$schema": DRAFT_7, "contains": {"type": "null"}, "minContains": 2, "type": "array"},
}
SCALARS = [None, 1, -1, "a", "x", "y", "127.0.0.1", "1.1.1.1"]
ARRAYS = [list(items) for size in range(4) for items in product([None, 1, -1, "a"], repeat=size)]
MEMBERS = ["a", "x", 1, ["a"], ["a", "b"]]
OBJECTS = [
    dict(zip(names, values, strict=True))
    for size in range(3)
    for names in permutations("abc", size)
    if list(names) == sorted(names)
    for values in product(MEMBERS, repeat=size)
]
VALUES = [*SCALARS, *ARRAYS, *OBJECTS]


@pytest.mark.parametrize("name", CASES)
def test_a_value_is_accepted_exactly_if_it_is_valid(name: str) -> None:
    grammar, validator = grammar_of(CASES[name]), reference_validator(CASES[name])
    valid = [value for value in VALUES if validator.is_valid(value)]
    assert [value for value in VALUES if accepts(grammar, compact(value))] == valid
    assert 0 < len(valid) < len(VALUES)


def test_values_that_violate_a_branch_in_what_has_no_complement_are_left_out() -> None:
    schema = {
        "oneOf": [
            {**OBJECT, "required": ["a"], "properties": {"a": {"type": "string", "format": "email"}}},
            {**OBJECT, "required": ["b"], "properties": {"b": {"type": "string"}}},
        ]
    }
    grammar, validator = grammar_of(schema), reference_validator(schema)
    accepted = [value for value in VALUES if accepts(grammar, compact(value))]
    assert all(validator.is_valid(value) for value in accepted)
    assert {"b": "x"} in accepted
    assert validator.is_valid({"a": "x", "b": "x"}) and {"a": "x", "b": "x"} not in accepted


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "string", "format": "email"}, {"type": "string"}]},
        {"type": "array", "contains": {"format": "uri"}, "maxContains": 1, "items": {"type": "string"}},
    ],
)
def test_a_branch_without_complement_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError):
        grammar_of(schema)


def random_text(grammar: Grammar, rng: random.Random) -> str | None:
    """Returns a random beginning under the masks, completed; None if no completion was found."""
    matcher, text = grammar.matcher(), bytearray()
    for _ in range(rng.randrange(20)):
        tokens = [token for token in allowed_tokens(matcher, BYTE_VOCABULARY) if token != EOS_ID]
        if not tokens or not matcher.accept(token := rng.choice(tokens)):
            break
        text.append(token - 1)
    rest = matcher.completion(200)
    return None if rest is None else (text + bytes(token - 1 for token in rest)).decode()


def test_a_completion_ends_each_number_at_the_limit_of_digits() -> None:
    schema = {"type": "array", "items": {"type": "number"}, "contains": {"minimum": 100}, "maxItems": 4}
    matcher = grammar_of(schema).matcher()
    for byte in b"[3.7e569":
        assert matcher.accept(1 + byte)
    for token in matcher.completion(200) or pytest.fail("no completion was found"):
        assert token in allowed_tokens(matcher, BYTE_VOCABULARY)
        assert matcher.accept(token)


INNER = st.sampled_from([TEXT, INTEGER, {"const": "a"}, {"enum": ["x", 1]}, {"format": "email"}, {}, False])
NAMED = st.dictionaries(st.sampled_from("abc"), INNER, max_size=2)
OBJECT_BRANCHES = st.fixed_dictionaries(
    {"properties": NAMED},
    optional={
        "type": st.just("object"),
        "required": st.lists(st.sampled_from("abc"), max_size=2, unique=True),
        "additionalProperties": INNER,
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "b"]), INNER, max_size=1),
        "maxProperties": st.integers(0, 2),
        "minProperties": st.integers(0, 1),
        "propertyNames": st.just({"pattern": "^[ab]"}),
        "dependentRequired": st.just({"a": ["b"]}),
    },
)
ARRAY_BRANCHES = st.fixed_dictionaries(
    {"items": INNER},
    optional={
        "type": st.just("array"),
        "prefixItems": st.lists(INNER, min_size=1, max_size=2),
        "maxItems": st.integers(0, 3),
        "uniqueItems": st.booleans(),
        "contains": INNER,
    },
)
BRANCHES = st.one_of(OBJECT_BRANCHES, ARRAY_BRANCHES, INNER, st.tuples(INNER, INNER).map(lambda two: {"oneOf": [*two]}))


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(outer=st.one_of(OBJECT_BRANCHES, st.just({})), branches=st.lists(BRANCHES, min_size=2, max_size=3))
def test_random_branches_accept_only_valid_values(outer: dict[str, Any], branches: list[Any]) -> None:
    schema = {**outer, "oneOf": branches}
    try:
        grammar = grammar_of(schema)
    except GrammarError:
        return
    validator = reference_validator(schema)
    for value in random.Random(1).sample(VALUES, 60):
        assert not accepts(grammar, compact(value)) or validator.is_valid(value), value
    for seed in range(3):
        text = random_text(grammar, random.Random(seed))
        assert text is None or exceeds_double_range(text) or validator.is_valid(json.loads(text)), text
