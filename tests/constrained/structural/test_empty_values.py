"""Parts that no value matches, in every form in which values are written: what compiles has a mask everywhere."""

from __future__ import annotations

import random
from typing import Any

import pytest
from matchers import allowed_tokens, compile_in_process
from schema_strategies import BYTE_VOCABULARY, EOS_ID

from plait.constrained import Elements, GrammarError, JsonSchema, Keywords, Regex, Spec, Structural, Trigger

CONTRADICTION = {"type": "string", "pattern": "^a$", "format": "date"}
EMPTY: dict[str, Any] = {
    "two patterns": {"type": "string", "allOf": [{"pattern": "^a$"}, {"pattern": "^b$"}]},
    "pattern and format": CONTRADICTION,
    "pattern and length": {"type": "string", "pattern": "^aaa$", "maxLength": 2},
    "a text that contains its end": {"type": ["string", "null"], "enum": ["</p>"], "minLength": 5},
    "bounds": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4},
    "multiples": {"type": "integer", "multipleOf": 10, "minimum": 1, "maximum": 9},
    "items": {"type": "array", "items": CONTRADICTION, "minItems": 1},
    "different items": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 3},
    "a property": {"type": "object", "properties": {"a": CONTRADICTION}, "required": ["a"]},
    "an additional property": {"type": "object", "additionalProperties": CONTRADICTION, "minProperties": 1},
    "alternatives": {"anyOf": [CONTRADICTION, {"type": "string", "minLength": 3, "maxLength": 2}]},
    "no end": {"$ref": "#/$defs/r"},
}
ENDLESS = {"r": {"type": "object", "properties": {"a": {"$ref": "#/$defs/r"}}, "required": ["a"]}}


def record(part: Any, required: list[str]) -> dict[str, Any]:
    named = {"q": {"type": "boolean"}, "p": part}
    return {
        "type": "object",
        "properties": named,
        "required": required,
        "$defs": ENDLESS,
        "additionalProperties": False,
    }


def in_tags(content: Any, begin: str = "<f>", end: str = "</f>") -> Spec:
    return Structural([Trigger(begin, content, end)], at_least=1, free_text=False)


TYPES = tuple((kind, kind[0]) for kind in ("string", "null", "boolean", "integer", "number", "array", "object"))
FORMS = {
    "a value": lambda schema: JsonSchema(schema, compact=True),
    "JSON in tags": lambda schema: in_tags(schema),
    "elements": lambda schema: in_tags(Elements(schema, "<p={name}>", "</p>")),
    "typed elements": lambda schema: in_tags(Elements(schema, "<p={name} {type}>", "</p>", types=TYPES)),
    "keywords": lambda schema: in_tags(Keywords(schema), "f(", ")"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", EMPTY)
def test_a_required_part_without_values_is_refused_with_its_place(name: str, form: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compile_in_process(FORMS[form](record(EMPTY[name], ["q", "p"])), BYTE_VOCABULARY)
    place = str(caught.value.where)
    assert "/properties/p" in place or "/$defs/r" in place or form == "keywords", place


@pytest.mark.parametrize("form", [form for form in FORMS if form != "keywords"])
@pytest.mark.parametrize("name", EMPTY)
def test_an_optional_part_without_values_is_left_out(name: str, form: str) -> None:
    grammar = compile_in_process(FORMS[form](record(EMPTY[name], ["q"])), BYTE_VOCABULARY)
    for seed in range(3):
        rng, matcher, text = random.Random(seed), grammar.matcher(), bytearray()
        while not matcher.is_terminated and len(text) < 60:
            tokens = allowed_tokens(matcher, BYTE_VOCABULARY)
            token = rng.choice(tokens)
            assert matcher.accept(token), bytes(text)
            text += b"" if token == EOS_ID else bytes([token - 1])
        assert b"p=p" not in text and b'"p"' not in text


def test_a_pattern_whose_texts_contain_what_ends_them_is_refused() -> None:
    with pytest.raises(GrammarError, match="without the text that ends it") as caught:
        compile_in_process(in_tags(Regex("a</f>b")), BYTE_VOCABULARY)
    assert str(caught.value.where).startswith("/triggers/0")
