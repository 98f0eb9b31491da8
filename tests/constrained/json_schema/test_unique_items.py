"""Items and names that may not be repeated: no token repeats one, other values are accepted, masks lead to no dead end.

Names may not be repeated where `minProperties` needs two or more that are not listed.
"""

from __future__ import annotations

import json
import random
from string import ascii_lowercase
from typing import Any

import numpy as np
import pytest
from example_share import share_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matchers import allowed_tokens
from schema_strategies import (
    BYTE_VOCABULARY,
    VALUES,
    accepts,
    compact,
    exceeds_double_range,
    grammar_of,
    reference_validator,
)

from plait.constrained import Grammar, JsonSchema, Vocabulary, mask_words
from plait.constrained.compiler import build_grammar, compile_spec
from plait.constrained.guidance.llguidance_matcher import LlguidanceMatcher

LONG = (
    '",',
    '","',
    '", "',
    '", ',
    '"]',
    '"a"',
    '"a","a"',
    ',"a","a"',
    '"a","b"',
    '"","',
    "[]",
    "[1,1]",
    "[1,2]",
    "1,",
    "1,1",
)
LONG += (
    ",1",
    ",1,",
    ",1]",
    "true,",
    "true,true",
    ",true",
    "e,",
    ",{",
    "},{",
    '{"a":',
    '":1',
    "1}",
    "[[1],[1]]",
    "],[",
    "]]",
    "  ",
    "1 ",
    " 1",
    '" ',
    "true ",
    "\n1, ",
    '"a":',
    ',"a":',
    '1,"b":1',
    ' "b" :',
)
LONG_TOKENS = tuple(text.encode() for text in LONG)
VOCABULARY = Vocabulary(
    (b"", *(bytes([byte]) for byte in range(256)), *LONG_TOKENS), (0,), lambda text: [1 + b for b in text.encode()]
)
ITEMS: list[Any] = [
    True,
    {"type": "string"},
    {"type": "integer", "minimum": 0, "maximum": 11},
    {"type": "boolean"},
    {"enum": ["a", "ab", "b", "", 1, 12, None, [1], [1, 1], {"a": 1}, {"b": 1}]},
    {"type": "array", "items": {"enum": ["a", 1]}, "maxItems": 2},
    {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "integer"}},
        "additionalProperties": False,
    },
    {
        "anyOf": [
            {"type": "string", "pattern": "^[ab]$"},
            {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 10},
        ]
    },
]
SCHEMAS = [{"type": "array", "items": items, "uniqueItems": True} for items in ITEMS]
COUNTED: list[Any] = [
    {"type": "object", "minProperties": 2, "additionalProperties": {"enum": [1, "a"]}},
    {"type": "object", "properties": {"a": {}}, "minProperties": 3, "maxProperties": 4},
    {"type": "object", "minProperties": 2, "propertyNames": {"pattern": "^([ab]|[a-z]{30})$"}},
    {"type": "array", "items": {"minProperties": 2, "additionalProperties": {"type": "integer"}}, "uniqueItems": True},
]
PLACED: list[Any] = [
    {"properties": {"a": SCHEMAS[1], "b": {"type": "array"}}},
    {"additionalProperties": SCHEMAS[0], "properties": {"a": {}}},
    {"patternProperties": {"^[ac]": SCHEMAS[0]}},
    {"prefixItems": [SCHEMAS[0], {}], "items": SCHEMAS[0]},
    {"$ref": "#/$defs/x", "$defs": {"x": {"uniqueItems": True, "items": {"$ref": "#/$defs/x"}}}},
    {"anyOf": [SCHEMAS[0], {"type": "string"}]},
    {"allOf": [{"items": {"type": ["string", "array"]}}, {"uniqueItems": True}]},
    {"if": {"type": "array"}, "then": {"uniqueItems": True}},
]


def long_token_grammar(schema: Any, whitespace: bool = False) -> Grammar:
    spec = JsonSchema(schema, compact=not whitespace, whitespace=whitespace)
    return build_grammar(compile_spec(spec, VOCABULARY), VOCABULARY)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(at=st.integers(0, len(SCHEMAS) + len(PLACED) - 1), values=st.lists(VALUES, max_size=4))
def test_exactly_the_valid_values_are_accepted(at: int, values: list[Any]) -> None:
    schema = [*SCHEMAS, *PLACED][at]
    grammar, validator = grammar_of(schema), reference_validator(schema)
    for value in (
        values,
        [values, values],
        {"a": values},
        {"b": values},
        {"a": values, "b": values},
        [[values, 1], [1, values]],
    ):
        assert accepts(grammar, compact(value)) is bool(validator.is_valid(value)), value


@pytest.mark.parametrize("whitespace", [False, True])
@pytest.mark.parametrize("at", range(len(SCHEMAS) + len(COUNTED)))
def test_masks_allow_no_token_that_repeats_an_item_or_name_and_all_others(at: int, whitespace: bool) -> None:
    schema = [*SCHEMAS, *COUNTED][at]
    grammar, validator = long_token_grammar(schema, whitespace), reference_validator(schema)
    row = np.zeros(mask_words(len(VOCABULARY)), np.int32)
    for seed in range(share_of(8)):
        matcher, text, rng = grammar.matcher(), b"", random.Random(seed)
        for _ in range(30):
            allowed = allowed_tokens(matcher, VOCABULARY)
            LlguidanceMatcher.fill_mask(matcher, row)  # without uniqueItems
            bits = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            accepted = [token for token in map(int, bits) if token and can_accept(matcher, token)]
            assert set(allowed) - {0} <= set(accepted)
            for token in set(accepted) - set(allowed):
                assert matcher.accept(token)
                assert leads_nowhere(matcher), text + VOCABULARY.token_bytes[token]
                matcher.rollback(1)
            if matcher.is_accepting:
                break
            token = rng.choice([t for t in allowed if t] if rng.random() < 0.5 else [max(t for t in allowed)])
            assert matcher.accept(token)
            text += VOCABULARY.token_bytes[token]
        rest = matcher.completion(100)
        if rest is not None:
            text += b"".join(VOCABULARY.token_bytes[token] for token in rest)
            assert exceeds_double_range(text.decode()) or validator.is_valid(json.loads(text)), text


def can_accept(matcher: Any, token: int) -> bool:
    if not matcher.accept(token):
        return False
    matcher.rollback(1)
    return True


def leads_nowhere(matcher: Any, depth: int = 0) -> bool:
    """Whether no text is complete after this one, by trying all that would be texts without uniqueItems."""
    if matcher.is_accepting:
        return False
    row = np.zeros(mask_words(len(VOCABULARY)), np.int32)
    LlguidanceMatcher.fill_mask(matcher, row)
    for token in np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist():
        if depth < 12 and token and matcher.accept(token):
            nowhere = leads_nowhere(matcher, depth + 1)
            matcher.rollback(1)
            if not nowhere:
                return False
    return True


def test_a_dead_end_is_not_entered() -> None:
    matcher = grammar_of({"type": "array", "items": {"enum": [*range(7)]}, "uniqueItems": True}).matcher()
    for byte in b"[3,1,4,5,2,6,0":
        assert matcher.accept(1 + byte)
    assert matcher.forced_bytes() == b"]" or [token - 1 for token in allowed_tokens(matcher, BYTE_VOCABULARY)] == [
        ord("]")
    ]


def test_no_comma_follows_the_last_name() -> None:
    names = {"patternProperties": {"^[a-z]$": {"enum": [1, 22]}}, "additionalProperties": False}
    matcher = grammar_of({"type": "object", "minProperties": 25, **names}).matcher()
    text = "{" + ",".join(f'"{letter}":1' for letter in ascii_lowercase)
    assert all(matcher.accept(1 + byte) for byte in text.encode())
    assert [chr(token - 1) for token in allowed_tokens(matcher, BYTE_VOCABULARY)] == ["}"]


@pytest.mark.parametrize(
    ("text", "schema"),
    [
        ('["x-1","red",', {"items": {"type": "string", "pattern": "^(red|x-.*)$"}, "uniqueItems": True}),
        ('{"x-1":1,"red":1,', {"minProperties": 3, "propertyNames": {"pattern": "^(red|x-.*)$"}}),
    ],
)
def test_a_text_that_only_ends_is_not_begun_again(text: str, schema: Any) -> None:
    """Although many other texts are possible."""
    matcher = grammar_of(schema).matcher()
    for byte in f'{text}"'.encode():
        assert 1 + byte in allowed_tokens(matcher, BYTE_VOCABULARY)
        assert matcher.accept(1 + byte)
    allowed = [chr(token - 1) for token in allowed_tokens(matcher, BYTE_VOCABULARY)]
    assert "r" not in allowed and "x" in allowed


def test_rollback_forgets_items() -> None:
    matcher = grammar_of({"type": "array", "uniqueItems": True}).matcher()
    assert all(matcher.accept(1 + byte) for byte in b'["a","b')
    matcher.rollback(1)
    assert matcher.accept(1 + ord("a")) and not matcher.accept(1 + ord('"'))
    matcher.rollback(7)
    assert all(matcher.accept(1 + byte) for byte in b'["b","a"]') and matcher.is_accepting
