"""Conjunctions that llguidance cannot combine: combined before, a schema accepts what is valid by jsonschema-rs."""

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
    SCHEMAS,
    VALUES,
    accepts,
    compact,
    exceeds_double_range,
    grammar_of,
    reference_validator,
)

from plait.constrained import Grammar, GrammarError, JsonSchema
from plait.constrained.guidance.llguidance_grammar import LlguidanceGrammar, LlguidanceSource
from plait.constrained.json_schema import emptiness
from plait.constrained.json_schema.conjunctions import combine_conjunctions
from plait.constrained.json_schema.emptiness import Emptiness, kinds_of
from plait.constrained.json_schema.rewrite.rewriter import rewrite_schema
from plait.constrained.json_schema.schema_compiler import _grammars

OBJECTS = [
    dict(zip(names, values, strict=True))
    for size in range(3)
    for names in permutations("abc", size)
    for values in product([1, "a", {"a": 1}], repeat=size)
]
OBJECTS += [{name: value} for name in ("ab", "ba", "ca", "bb") for value in (1, "a", {"a": 1}, {})]


def combined_grammar(schema: Any) -> Grammar:
    """The grammar of a schema whose conjunctions are all combined before llguidance reads it."""
    rewritten = combine_conjunctions(rewrite_schema(json.dumps(schema)).schema)
    return LlguidanceGrammar(
        LlguidanceSource(next(_grammars(rewritten, JsonSchema(schema, compact=True)))), BYTE_VOCABULARY
    )


def random_text(grammar: Grammar, rng: random.Random) -> str | None:
    matcher, text = grammar.matcher(), bytearray()
    for _ in range(rng.randrange(16)):
        tokens = [token for token in allowed_tokens(matcher, BYTE_VOCABULARY) if token != EOS_ID]
        if not tokens or not matcher.accept(token := rng.choice(tokens)):
            break
        text.append(token - 1)
    rest = matcher.completion(200)
    return None if rest is None else (text + bytes(token - 1 for token in rest)).decode()


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(schema=SCHEMAS, values=st.lists(VALUES, max_size=6))
def test_combined_random_schemas_accept_what_the_compiler_accepts(schema: Any, values: list[Any]) -> None:
    try:
        plain, combined = grammar_of(schema), combined_grammar(schema)
    except GrammarError:
        return
    validator = reference_validator(schema)
    for value in [*values, *random.Random(1).sample(OBJECTS, 20)]:
        text = compact(value)
        assert accepts(combined, text) is accepts(plain, text), text
        assert not accepts(combined, text) or validator.is_valid(value), text
    text_of = random_text(combined, random.Random(json.dumps(schema)))
    assert text_of is None or exceeds_double_range(text_of) or validator.is_valid(json.loads(text_of)), text_of


RECURSIVE: dict[str, dict[str, Any]] = {
    "a tree and a condition on it": {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {"type": "object", "properties": {"a": {"$ref": "#/$defs/small"}, "b": {"type": "integer"}}},
            "small": {"allOf": [{"$ref": "#/$defs/tree"}, {"properties": {"b": {"maximum": 0}, "c": {"const": "a"}}}]},
        },
    },
    "a tree within a tree": {
        "allOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}],
        "$defs": {
            "x": {"patternProperties": {"^[ab]$": {"$ref": "#/$defs/x"}}, "additionalProperties": False},
            "y": {"properties": {"a": {"$ref": "#/$defs/y"}, "b": {"type": "integer"}}},
        },
    },
    "patterns that share names": {
        "type": "object",
        "allOf": [
            {"patternProperties": {"^a": {"enum": [1, "a"]}}, "additionalProperties": {"type": "object"}},
            {"patternProperties": {"b$": {"type": ["string", "object"]}, "c": {"required": ["a"]}}},
            {"properties": {"a": {"type": "integer"}}},
        ],
    },
    "conditions on one name": {
        "type": "object",
        "required": ["a"],
        "allOf": [
            {
                "if": {"properties": {"a": {"const": at}}, "required": ["a"]},
                "then": {"properties": {"b": {"const": at}}},
                "else": {"properties": {"c": {"type": "integer"}}},
            }
            for at in (1, "a", 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13)
        ],
        "properties": {"a": {"type": ["integer", "string"]}, "b": True, "c": True},
    },
}


@pytest.mark.parametrize("name", RECURSIVE)
def test_a_value_is_accepted_exactly_if_it_is_valid(name: str) -> None:
    schema = RECURSIVE[name]
    grammar, validator = grammar_of(schema), reference_validator(schema)
    values = [*OBJECTS, *({"a": inner} for inner in OBJECTS), *({"a": {"a": inner}} for inner in OBJECTS)]
    values = [value for value in values if list(value) == sorted(value)]
    valid = [value for value in values if validator.is_valid(value)]
    found = [value for value in values if accepts(grammar, compact(value))]
    assert [value for value in found if value not in valid] == []
    assert [value for value in valid if value not in found and _is_sorted(value)] == []
    assert 0 < len(valid) < len(values)


def _is_sorted(value: Any) -> bool:
    return not isinstance(value, dict) or (list(value) == sorted(value) and all(map(_is_sorted, value.values())))


def test_a_definition_without_finite_value_is_empty() -> None:
    endless = {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#/$defs/x"}}}
    found = Emptiness({"x": endless, "y": {"properties": {"b": {"$ref": "#/$defs/x"}}}}).without_empty()
    assert found == {"y": {"properties": {"b": False}}}
    grammar = grammar_of({"$defs": {"x": endless}, "properties": {"b": {"$ref": "#/$defs/x"}}, "type": "object"})
    assert accepts(grammar, "{}") and not accepts(grammar, '{"b":')


def test_a_range_of_one_number_is_not_empty() -> None:
    found = Emptiness({})
    closed, shut = {"type": "number", "minimum": 1}, {"type": "number", "maximum": 1}
    assert not found.is_empty_conjunction([closed, shut])
    assert found.is_empty_conjunction([closed, {**shut, "exclusiveMaximum": 1}])
    assert found.is_empty_conjunction([{"minimum": 2, "type": "integer"}, shut])


def test_alternatives_beside_each_other_take_a_bounded_number_of_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()
    monkeypatch.setattr(emptiness, "kinds_of", lambda parts: asked.append(len(parts)) or kinds_of(parts))
    names = [f"n{at}" for at in range(12)]
    branches = [{"required": [name], "properties": {name: {"type": "object"}}} for name in names]
    inner = {"type": "object", "allOf": [{"anyOf": [branch, {"maxProperties": 9}]} for branch in branches]}
    outer = {"type": "object", "required": ["a"], "properties": {"a": {"allOf": [inner, {"anyOf": branches[:8]}]}}}
    assert not Emptiness({}).is_empty_conjunction([outer, {"required": names[:6]}])
    assert len(asked) <= 2 * emptiness.MAX_QUESTIONS and max(asked) < 40


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(parts=st.lists(SCHEMAS, min_size=1, max_size=3), values=st.lists(VALUES, min_size=4, max_size=12))
def test_what_is_found_to_be_empty_has_no_value(parts: list[Any], values: list[Any]) -> None:
    try:
        rewritten = [rewrite_schema(json.dumps(part)).schema for part in parts]
    except GrammarError:
        return
    if any("$defs" in part for part in rewritten) or not Emptiness({}).is_empty_conjunction(rewritten):
        return
    validators = [reference_validator(part) for part in parts]
    for value in [*values, *OBJECTS]:
        assert not all(validator.is_valid(value) for validator in validators), value


def test_listed_values_of_a_conjunction_are_intersected() -> None:
    tenths = [at / 10 for at in range(101)]
    combined = combine_conjunctions({"allOf": [{"enum": tenths}, {"enum": [True, 3, "a", 0.5]}, {"minimum": 0.2}]})
    assert combined == {"enum": [0.5, 3.0], "minimum": 0.2}
    only_equal = combine_conjunctions({"allOf": [{"enum": [1, True, None, "1"]}, {"enum": [1.0, "1", False, None]}]})
    assert only_equal == {"enum": [1, None, "1"]}
    with pytest.raises(GrammarError, match="no value"):
        combine_conjunctions({"allOf": [{"enum": [1, "a"]}, {"enum": [True, "b"]}]})
