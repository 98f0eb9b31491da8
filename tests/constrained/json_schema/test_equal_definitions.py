"""Equal definitions are merged: the schema says the same afterwards, and no two definitions of it are alike."""

from __future__ import annotations

import random
from typing import Any

import jsonschema_rs

from plait.constrained.json_schema.equal_definitions import merge_equal_definitions

VALUES: list[Any] = [None, 1, "a", [], [1], [[]], [["a"]], {}, {"a": 1}, {"a": []}, {"b": {"a": 1}}, {"a": {"b": [1]}}]
VALUES += [[value] for value in VALUES] + [{"a": value} for value in VALUES] + [{"b": [value]} for value in VALUES]


def reference(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


def schema_of(rng: random.Random) -> dict[str, Any]:
    names = "abcdefgh"

    def body() -> Any:
        refs = [reference(rng.choice(names)) for _ in range(2)]
        return rng.choice(
            [
                {"type": "array", "items": refs[0]},
                {"type": "object", "properties": {"a": refs[0], "b": refs[1]}, "additionalProperties": False},
                {"type": "object", "properties": {"a": refs[0]}, "required": ["a"]},
                {"anyOf": [{"type": "null"}, {"type": "array", "prefixItems": refs, "items": False}]},
                {"enum": [1, "a"]},
                True,
            ]
        )

    return {"anyOf": [reference(name) for name in "ab"], "$defs": {name: body() for name in names}}


def test_random_definitions_say_the_same_once_merged() -> None:
    rng, num_merged = random.Random(5), 0
    for _ in range(300):
        schema = schema_of(rng)
        merged = merge_equal_definitions(schema)
        num_merged += len(merged["$defs"]) < len(schema["$defs"])
        before, after = jsonschema_rs.validator_for(schema), jsonschema_rs.validator_for(merged)
        for root in "ab":
            assert reference(root) in schema["anyOf"]
        assert [before.is_valid(value) for value in VALUES] == [after.is_valid(value) for value in VALUES], schema
        assert merge_equal_definitions(merged) is merged
    assert num_merged > 100


def test_recursive_definitions_are_merged_with_those_that_differ_from_them_by_their_names() -> None:
    ring = {name: {"properties": {"next": reference(other)}} for name, other in ("ab", "bc", "ca")}
    end = {"d": {"properties": {"next": reference("e")}}, "e": {"properties": {"next": False}}}
    merged = merge_equal_definitions({"prefixItems": [*map(reference, "abcde")], "$defs": ring | end})
    assert merged["prefixItems"] == [*map(reference, "aaade")]
    assert merged["$defs"] == {"a": {"properties": {"next": reference("a")}}, **end}


def test_listed_values_and_names_of_properties_are_no_references() -> None:
    listed = {name: {"enum": [reference(name)]} for name in "ab"}
    named = {name: {"properties": {"$ref": {"enum": [at]}}} for at, name in enumerate("cd")}
    schema = {"prefixItems": [*map(reference, "abcd")], "$defs": listed | named}
    assert merge_equal_definitions(schema) is schema
