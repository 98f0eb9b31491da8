"""Options of JSON Schema specs: white space, compact form, lenient, annotations; and the other forms of a schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
from matchers import compile_in_process
from schema_strategies import (
    BYTE_VOCABULARY,
    accepts,
    compact,
    grammar_of,
)

from plait.constrained import GrammarError, JsonObject, JsonSchema
from plait.constrained.json_schema.error_locator import locate_rejected_keyword


def test_free_white_space_needs_the_whitespace_option() -> None:
    text = '{ "a" : [ 1 , 2 ] }'
    assert not accepts(grammar_of({"type": "object"}), text)
    assert accepts(grammar_of({"type": "object"}, whitespace=True), text)
    with pytest.raises(GrammarError, match="contradict"):
        JsonSchema(True, whitespace=True, compact=True)


@pytest.mark.parametrize("schema", [{"type": "object"}, True, {"const": {"a": [1, "x"], "b": {}}}])
def test_one_space_after_commas_and_colons_unless_compact(schema: Any) -> None:
    value = {"a": [1, "x"], "b": {}}
    spaced, dense = grammar_of(schema, compact=False), grammar_of(schema, compact=True)
    assert accepts(spaced, json.dumps(value)) and not accepts(spaced, compact(value))
    assert accepts(dense, compact(value)) and not accepts(dense, json.dumps(value))


def test_property_names_cannot_be_written_with_escapes() -> None:
    grammar = grammar_of({"type": "object", "properties": {"é\n": {"type": "integer"}, "a": {"type": "integer"}}})
    for name in (r"\u00e9\n", r"é\u000a", r"é\u000A", r"\u0061"):
        assert not accepts(grammar, f'{{"{name}":"x"}}')


def test_lenient_reports_unchecked_keywords_and_checks_them_afterwards() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "not": {"maxItems": 4, "uniqueItems": True}}
    grammar = grammar_of(schema, lenient=True)
    assert grammar.unchecked == ("/not",)
    assert accepts(grammar, "[2]")
    assert not accepts(grammar, '["a"]')
    assert grammar.check("[2,2]") is None
    assert "not allowed for [1,2]" in str(grammar.check("[1,2]"))
    assert "not JSON" in str(grammar.check("[1,"))
    assert grammar_of({"type": "integer"}, lenient=True).unchecked == ()


def test_what_is_checked_afterwards_has_numbers_of_any_precision() -> None:
    schema = {"items": {"multipleOf": 3}, "not": {"maxItems": 4, "uniqueItems": True}}
    grammar = grammar_of(schema, lenient=True)
    assert grammar.unchecked == ("/not",)
    multiple = "7495790477026279112574.0"  # the double next to it is no multiple
    assert grammar.check(f"[{multiple},{multiple}]") is None
    assert "is not a multiple of 3 (at /0)" in str(grammar.check("[7495790477026279112575.0,3,3]"))
    assert grammar.check(f"[1e{'9' * 30}]") == "it could not be checked: an exponent is too large"


def test_the_annotations_option_ignores_unknown_keywords() -> None:
    schema = {"type": "string", "format": "color", "minLenght": 3}
    grammar = grammar_of(schema, annotations=True)
    assert grammar.unchecked == ()
    assert accepts(grammar, '"x"')


def test_json_object_and_any_json_value() -> None:
    for spec, good, bad in ((JsonObject(), '{"a": [1, {}]}', "[1]"), (JsonObject(any_value=True), "[1]", "[1")):
        grammar = compile_in_process(spec, BYTE_VOCABULARY)
        assert accepts(grammar, good)
        assert not accepts(grammar, bad)


def test_a_pydantic_model_is_accepted_as_schema() -> None:
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("Point", x=(int, ...), y=(int | None, None))
    grammar = compile_in_process(JsonSchema(model), BYTE_VOCABULARY)
    assert accepts(grammar, '{"x": 1, "y": null}')
    assert not accepts(grammar, '{"y": 1}')


def test_the_keyword_that_is_refused_is_searched_for_in_schemas_that_are_not_long() -> None:
    def rejects(schema: Any) -> bool:
        return "enum" in json.dumps(schema)

    texts = [json.dumps({"title": "a" * num_chars, "items": {"enum": [1]}}) for num_chars in (10, 100_000)]
    assert [locate_rejected_keyword(text, rejects) for text in texts] == ["/items/enum", ""]
