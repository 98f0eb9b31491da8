"""References by `$id`, anchor and dynamic anchor: a value is accepted exactly if it is valid by jsonschema-rs."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schema_strategies import accepts, compact, grammar_of, reference_validator

from plait.constrained import GrammarError

DRAFT_2019 = "https://json-schema.org/draft/2019-09/schema"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_4 = "http://json-schema.org/draft-04/schema#"
BASE_2019, BASE_2020 = "https://json-schema.org/draft/2019-09", "https://json-schema.org/draft/2020-12"
INTEGER = {"type": "integer"}
RESOLVED: list[dict[str, Any]] = [
    {"$id": "rootOfNoAddress", "items": {"$ref": "#/$defs/n"}, "$defs": {"n": INTEGER}, "contains": True},
    {"items": {"$ref": "inner"}, "$defs": {"x": {"$id": "inner", "$ref": "#/$defs/y", "$defs": {"y": INTEGER}}}},
    {"$id": "http://a.b/c/d", "items": {"$ref": "/c/e"}, "$defs": {"x": {"$id": "e", **INTEGER}}},
    {"items": {"$ref": "urn:x:y#z"}, "$defs": {"x": {"$id": "urn:x:y", "$defs": {"z": {"$anchor": "z", **INTEGER}}}}},
    {
        "items": {"$ref": "#a"},
        "$defs": {"x": {"$id": "other", "$defs": {"z": {"$anchor": "a"}}}, "y": {"$anchor": "a", **INTEGER}},
    },
    {"$schema": DRAFT_7, "items": {"$ref": "#a"}, "definitions": {"x": {"$id": "#a", **INTEGER}}},
    {"$schema": DRAFT_4, "items": {"$ref": "b#a"}, "definitions": {"y": {"id": "b", "not": {"id": "#a", **INTEGER}}}},
    {"$dynamicAnchor": "n", "type": ["array", "integer"], "items": {"$dynamicRef": "#n"}},
    {"items": {"$dynamicRef": "#n"}, "$defs": {"x": {"$dynamicAnchor": "n", **INTEGER}}},
    {"items": {"$dynamicRef": "#/$defs/x", "minimum": 2}, "$defs": {"x": INTEGER}},
    {
        "$id": "http://a.b/tree",
        "$dynamicAnchor": "n",
        "$ref": "list",
        "$defs": {"x": {"$id": "list", "$dynamicAnchor": "n", "type": "array", "items": {"$dynamicRef": "#n"}}},
    },
    {
        "$ref": "http://a.b/list",
        "$defs": {
            "x": {
                "$id": "http://a.b/list",
                "$dynamicAnchor": "n",
                "type": ["array", "integer"],
                "items": {"$dynamicRef": "#n"},
            },
            "y": {"$id": "http://a.b/other", "$dynamicAnchor": "n"},
        },
    },
    {"$schema": DRAFT_7, "items": {"$ref": f"{DRAFT_7}/definitions/nonNegativeInteger"}},
    {"$schema": DRAFT_4, "items": {"$ref": f"{DRAFT_4}/definitions/positiveIntegerDefault0"}},
    {"$schema": DRAFT_2019, "items": {"$ref": f"{BASE_2019}/meta/validation#/$defs/nonNegativeInteger"}},
    {"$id": f"{BASE_2020}/mine", "items": {"$ref": "meta/validation#/$defs/nonNegativeInteger"}},
    {"$schema": DRAFT_2019, "$recursiveAnchor": True, "type": ["array", "integer"], "items": {"$recursiveRef": "#"}},
]
VALUES = [[], [1], [3], ["a"], [[1]], [[3], 3], [[["a"]]], [1.5], 1, "a", None]


@pytest.mark.parametrize("at", range(len(RESOLVED)))
def test_a_value_is_accepted_exactly_if_it_is_valid(at: int) -> None:
    grammar, validator = grammar_of(RESOLVED[at]), reference_validator(RESOLVED[at])
    valid = [value for value in VALUES if validator.is_valid(value)]
    assert [value for value in VALUES if accepts(grammar, compact(value))] == valid
    assert 0 < len(valid) < len(VALUES)


@pytest.mark.parametrize("uri", [DRAFT_4, DRAFT_7, DRAFT_2019, f"{BASE_2020}/schema"])
def test_a_schema_may_be_one_of_the_draft_that_it_names(uri: str) -> None:
    grammar = grammar_of({"$schema": uri, "$ref": uri})
    for valid in ({"minLength": 1}, {"properties": {"a": {"type": "null"}}}, {"items": {"enum": [1]}}):
        assert accepts(grammar, compact(valid)), valid
    for invalid in ({"minLength": -1}, {"properties": {"a": {"type": "nil"}}}, {"items": {"allOf": [3]}}, 1):
        assert not accepts(grammar, compact(invalid)), invalid


def test_a_meta_schema_of_another_draft_is_refused() -> None:
    with pytest.raises(GrammarError, match="draft-07"):
        grammar_of({"$schema": f"{BASE_2020}/schema", "$ref": DRAFT_7})


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"items": {"$ref": "elsewhere"}}, "/items/$ref"),
        (
            {"$defs": {"x": {"$id": "http://a.b/c", "items": {"$ref": "#/y"}}}, "$ref": "http://a.b/c"},
            "/$defs/x/items/$ref",
        ),
        ({"items": {"$dynamicRef": "#n"}}, "/items/$dynamicRef"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"$id": "y", "$schema": DRAFT_7}}}, "/$defs/x/$schema"),
    ],
)
def test_what_is_not_resolved_is_refused(schema: dict[str, Any], where: str) -> None:
    with pytest.raises(GrammarError) as caught:
        grammar_of(schema)
    assert caught.value.where == where


def test_more_branches_than_are_compared_in_pairs_are_told_apart_by_one_property() -> None:
    branches = [
        {"type": "object", "properties": {"k": {"const": f"k{i}"}, "v": {"minimum": i}}, "required": ["k"]}
        for i in range(200)
    ]
    grammar = grammar_of({"oneOf": branches})
    assert accepts(grammar, '{"k":"k7","v":7}') and not accepts(grammar, '{"k":"k7","v":6}')
    branches[0]["properties"]["k"] = {"enum": ["k0", "k7"]}
    with pytest.raises(GrammarError):
        grammar_of({"oneOf": branches})


def test_a_discriminator_that_no_branch_requires_is_always_written() -> None:
    branches = [{"type": "object", "properties": {"k": {"const": f"k{i}"}, "v": {}}} for i in range(3)]
    schema = {"oneOf": branches, "discriminator": {"propertyName": "k"}}
    grammar = grammar_of(schema)
    assert accepts(grammar, '{"k":"k2","v":7}') and not accepts(grammar, '{"k":"k3"}')
    assert not accepts(grammar, "{}") and not reference_validator(schema).is_valid({})


ANCHORED = [f"r{at}" for at in range(1, 4)]
REFERENCES = st.one_of(
    st.sampled_from(ANCHORED).map(lambda uri: {"$ref": uri}),
    st.sampled_from([f"{uri}#n" for uri in ANCHORED]).map(lambda uri: {"$dynamicRef": uri}),
    st.sampled_from([INTEGER, {"type": "null"}]),
)
RESOURCES = st.fixed_dictionaries(
    {
        "type": st.sampled_from([["array", "integer"], ["array", "null"], ["array", "string"]]),
        "items": REFERENCES,
        "prefixItems": st.lists(REFERENCES, min_size=1, max_size=2),
    },
    optional={"maxItems": st.integers(1, 2), "$defs": REFERENCES.map(lambda inner: {"y": inner})},
)


def nested(scalar: Any, path: tuple[int, ...]) -> Any:
    """A scalar within arrays, at one place of each."""
    return [[]] * path[0] + [nested(scalar, path[1:])] if path else scalar


NESTED = [
    nested(scalar, path) for depth in range(5) for path in product((0, 1), repeat=depth) for scalar in (None, 1, "a")
]


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(root=RESOURCES, inner=st.lists(RESOURCES, min_size=3, max_size=3))
def test_dynamic_references_find_the_outermost_anchor(root: Any, inner: list[Any]) -> None:
    definitions = {
        uri: {**schema, "$id": uri, "$dynamicAnchor": "n"} for uri, schema in zip(ANCHORED, inner, strict=True)
    }
    schema = {**root, "$id": "r0", "$defs": {**root.get("$defs", {}), **definitions}}
    grammar, validator = grammar_of(schema), reference_validator(schema)
    for value in NESTED:
        assert accepts(grammar, compact(value)) is validator.is_valid(value), value
