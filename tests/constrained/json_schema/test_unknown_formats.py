"""Formats that are not known: annotations with a warning, or refused with `strict_formats`."""

from __future__ import annotations

import msgspec
import pytest
from matchers import compile_in_process
from schema_strategies import BYTE_VOCABULARY, accepts, grammar_of

from plait.constrained import GrammarError, JsonObject, JsonSchema, Structural
from plait.constrained.compiler import compile_spec
from plait.constrained.specs import Spec

COLOR = {"type": "string", "format": "color", "maxLength": 3}
WARNING = "the format 'color' at /format is not known, so it is not enforced"


def refusal(spec: Spec) -> GrammarError:
    with pytest.raises(GrammarError) as caught:
        compile_spec(spec, BYTE_VOCABULARY)
    return caught.value


@pytest.mark.parametrize("options", [{}, {"annotations": True}, {"lenient": True}])
def test_an_unknown_format_is_an_annotation_with_a_warning(options) -> None:
    grammar = grammar_of(COLOR, **options)
    assert grammar.warnings == (WARNING,) and grammar.unchecked == ()
    assert accepts(grammar, '"red"') and not accepts(grammar, '"blue"'), "the other keywords are enforced"
    assert grammar_of({"type": "string", "format": "date"}, **options).warnings == ()


def test_strict_formats_refuse_it() -> None:
    for options in ({}, {"annotations": True}):
        error = refusal(JsonSchema({"properties": {"a": COLOR}}, strict_formats=True, **options))
        assert (error.where, error.reason) == ("/properties/a/format", "the format 'color' is not known")
    assert grammar_of(COLOR, strict_formats=True, lenient=True).unchecked == ("/format",)
    with pytest.raises(GrammarError, match="strict_formats must be True or False"):
        JsonSchema({}, strict_formats=1)  # type: ignore[arg-type]


def test_only_keywords_count() -> None:
    schema = {"properties": {"format": {"const": {"format": "color"}}}, "default": {"format": "color"}}
    assert grammar_of(schema).warnings == ()


def test_many_unknown_formats_are_counted() -> None:
    schema = {"properties": {f"p{number}": {"format": f"f{number}"} for number in range(20)}}
    warnings = grammar_of(schema).warnings
    assert len(warnings) == 17 and warnings[-1] == "4 more like these"


def test_tool_calls_and_the_alternative_to_them() -> None:
    spec = Structural([("<a>", COLOR, "</a>")], free_text=False, otherwise=JsonSchema({"format": "shape"}))
    warnings = compile_in_process(spec, BYTE_VOCABULARY).warnings
    assert warnings == (WARNING, "the format 'shape' at /format is not known, so it is not enforced")
    error = refusal(msgspec.structs.replace(spec, strict_formats=True))
    assert error.where == "/triggers/0/content/format"
    assert compile_in_process(JsonObject(), BYTE_VOCABULARY).warnings == ()
