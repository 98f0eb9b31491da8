"""Which schemas are compiled without a worker: plain ones, bounded in size, that give the grammar of a worker."""

from __future__ import annotations

from typing import Any

import pytest

from plait.constrained import JsonObject, JsonSchema, Vocabulary
from plait.constrained.compile_service.in_place import compile_in_place
from plait.constrained.compiler import compile_spec
from plait.constrained.guidance.inner_matcher import warm_up
from plait.constrained.json_schema.small_schema import is_small_schema

PERSON = {
    "title": "Person",
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["a", "b", None]},
        "tags": {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SMALL: list[Any] = [PERSON, {}, {"const": "x"}, {"type": "array", "items": {"type": "boolean"}}]
OTHERS: list[Any] = [
    True,
    {"type": "string", "pattern": "a+"},
    {"type": "string", "format": "date"},
    {"type": "string", "maxLength": 65},
    {"type": "array", "maxItems": 9},
    {"type": "integer", "multipleOf": 3},
    {"minimum": 10**10},
    {"minimum": 1.5},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}},
    {"not": {"type": "string"}},
    {"oneOf": [{"type": "string"}]},
    {"enum": ["a", "bb"], "minLength": 2},
    {"enum": [[1]]},
    {"enum": [str(number) for number in range(33)]},
    {"type": ["string", "null"]},
    {"additionalProperties": {"type": "string"}},
    {"properties": {"a": {"x-mine": 1}}},
    {"properties": {f"p{number}": {} for number in range(40)}},
    {"properties": {f"p{number}": {"type": "integer", "minimum": number} for number in range(10)}},
    {"items": {"items": {"items": {"items": {"items": {"items": {}}}}}}},
    {"description": "x" * 5000},
]


@pytest.mark.parametrize("schema", SMALL)
def test_a_plain_schema_gives_the_grammar_of_a_worker(small: Vocabulary, schema: Any) -> None:
    warm_up(small)
    spec = JsonSchema(schema)
    compiled = compile_in_place(spec, small)
    assert compiled is not None
    assert compiled == compile_spec(spec, small)


@pytest.mark.parametrize("schema", OTHERS)
def test_all_other_schemas_are_left_to_a_worker(small: Vocabulary, schema: Any) -> None:
    warm_up(small)
    assert compile_in_place(JsonSchema(schema), small) is None


def test_a_lenient_schema_is_not_small_and_any_object_is() -> None:
    assert not is_small_schema(JsonSchema({}, lenient=True))
    assert is_small_schema(JsonObject())


def test_without_a_tokenizer_no_schema_is_compiled_in_place() -> None:
    cold = Vocabulary((b"", *(bytes([byte]) for byte in range(256))), (0,), lambda text: [])
    assert compile_in_place(JsonSchema(PERSON), cold) is None
