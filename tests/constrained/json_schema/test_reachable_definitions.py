"""Definitions that no reference leads to are left out, and nothing else changes."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schema_strategies import SCALARS, accepts, grammar_of

from plait.constrained.json_schema.rewrite.references.reachable import without_unreachable

NAMES = ["a", "b", "x/y", "t~", "p q", "$defs"]
POINTERS = ["#/$defs/a", "#/$defs/b", "#/definitions/x~1y", "#/$defs/t~0", "#/definitions/p%20q", "#/$defs/$defs"]
POINTERS += ["#/$defs/a/properties/inner", "#/properties/root", "#", "#/definitions/b/items", "#named"]
LEAVES = st.sampled_from([{"type": "integer"}, {"type": "string"}, {"enum": [None, "a"]}, {"$anchor": "named"}])


@st.composite
def _schemas(draw: st.DrawFn) -> dict[str, Any]:
    references = st.sampled_from(POINTERS).map(lambda pointer: {"$ref": pointer})
    part = st.one_of(LEAVES, references).flatmap(
        lambda one: st.sampled_from(
            [one, {"properties": {"inner": one}}, {"items": one}, {"anyOf": [one, {"const": 7}]}]
        )
    )
    libraries = {library: {name: draw(part) for name in NAMES} for library in ("$defs", "definitions")}
    return {"properties": {"root": draw(part), "other": draw(part)}, **libraries}


def _validator(schema: dict[str, Any]) -> Any:
    """Returns a validator; None if a reference of the schema leads nowhere."""
    try:
        return jsonschema_rs.Draft202012Validator(schema, offline=True)
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError):
        return None


@settings(max_examples=150, deadline=None)
@given(_schemas(), st.lists(SCALARS, min_size=8, max_size=8))
def test_what_is_left_out_changes_no_verdict(schema: dict[str, Any], scalars: list[Any]) -> None:
    before, after = _validator(schema), _validator(without_unreachable(schema))
    if before is None:
        return
    for at in range(0, 8, 2):
        first, second = scalars[at : at + 2]
        for value in ({"root": first, "other": second}, {"root": {"inner": first}, "other": [second]}):
            assert before.is_valid(value) == after.is_valid(value)


def test_only_what_is_reached_is_kept() -> None:
    schema = {
        "$ref": "#/definitions/a",
        "definitions": {
            "a": {"items": {"$ref": "#/definitions/b/not"}},
            "b": {"not": {}},
            "c": {"$ref": "#/definitions/a"},
        },
    }
    assert without_unreachable(schema)["definitions"].keys() == {"a", "b"}


@pytest.mark.parametrize(
    "reference", [{"$ref": "other.json"}, {"$ref": "#anchor"}, {"$dynamicRef": "#a"}, {"$ref": "#/$defs"}]
)
def test_all_is_kept_beside_references_that_are_no_pointers_to_one_definition(reference: dict[str, str]) -> None:
    schema = {"items": reference, "$defs": {"a": {}, "b": {}}}
    assert without_unreachable(schema) is schema


def test_a_mistake_in_a_definition_that_is_not_used_does_not_matter() -> None:
    schema = {"$ref": "#/$defs/used", "$defs": {"used": {"type": "integer"}, "unused": {"typ": 3, "required": 1}}}
    assert accepts(grammar_of(schema), "3")
