"""Numbers end: at most as many digits as a double's shortest text has, unless the schema asks for more."""

from __future__ import annotations

import json
import random
import re
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schema_strategies import BYTE_VOCABULARY, EOS_ID, accepts, grammar_of

from plait.constrained import Grammar, JsonObject, JsonSchema, Lark, Matcher, Structural, Vocabulary, mask_words
from plait.constrained.compiler import build_grammar, compile_spec
from plait.constrained.guidance.json_scanner import JsonDelimiters, JsonRegions, ends_in_string
from plait.constrained.guidance.llguidance_grammar import LlguidanceSource
from plait.constrained.specs import Spec
from plait.runtime.client.constraint_check import constraint_mismatch

NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
TEXT = re.compile(r'"(?:[^"\\]|\\.)*"?')


def allowed(matcher: Matcher, vocabulary: Vocabulary = BYTE_VOCABULARY) -> list[int]:
    row = np.zeros(mask_words(len(vocabulary)), np.int32)
    matcher.fill_mask(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def is_short(text: str) -> bool:
    """Whether no number of a JSON text has more digits than it may; the obvious way, over the whole text."""
    for number in NUMBER.findall(TEXT.sub('""', text)):
        mantissa, _, exponent = number.lower().partition("e")
        if sum(char.isdigit() for char in mantissa) > 23 or sum(char.isdigit() for char in exponent) > 3:
            return False
    return True


def with_long_numbers(spec: Spec) -> Grammar:
    """The grammar that ends no number."""
    form = compile_spec(spec, BYTE_VOCABULARY)
    assert isinstance(form, LlguidanceSource)
    return build_grammar(msgspec.structs.replace(form, max_digits=0), BYTE_VOCABULARY)


@settings(max_examples=300, deadline=None)
@given(number=st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**64), 2**64))
@pytest.mark.parametrize("grammar", [grammar_of({"type": "number"}), grammar_of({})])
def test_every_double_can_be_written(grammar: Grammar, number: float) -> None:
    assert accepts(grammar, json.dumps(number))
    if number == 0 or 1e-6 <= abs(number) < 1e21:  # what JavaScript writes without an exponent
        assert accepts(grammar, f"{Decimal(repr(number)):f}")


SPECS: list[Spec] = [
    JsonSchema({"type": "number"}),
    JsonSchema({"type": "integer"}),
    JsonSchema({"type": "number", "minimum": 0, "maximum": 1}),
    JsonSchema({"type": "array", "items": {"type": ["number", "string"]}}),
    JsonSchema({"type": "object", "properties": {"a": {"type": "number", "exclusiveMinimum": 3}, "b": {}}}),
    JsonSchema({}, whitespace=True),
    JsonObject(),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_text_has_no_number_that_is_too_long_and_loses_nothing_else(spec: Spec) -> None:
    """Along walks that like digits, the mask is that of the grammar without ends, less what would be too long."""
    grammar, wide = build_grammar(compile_spec(spec, BYTE_VOCABULARY), BYTE_VOCABULARY), with_long_numbers(spec)
    for seed in range(6):
        matcher, other, rng, text = grammar.matcher(), wide.matcher(), random.Random(seed), ""
        for _ in range(120):
            now, wider = allowed(matcher), allowed(other)
            left_out = [token for token in wider if token not in now]
            assert all(not is_short(text + chr(token - 1)) for token in left_out if chr(token - 1) not in ".eE")
            assert all(is_short(text + chr(token - 1)) for token in now if token != EOS_ID)
            assert not any(matcher.accept(token) for token in left_out)
            digits = [token for token in now if token != EOS_ID and chr(token - 1) in "0123456789.e"]
            token = rng.choice(digits if digits and rng.random() < 0.97 else now)
            if token == EOS_ID:
                break
            assert matcher.accept(token)
            assert other.accept(token)
            text += chr(token - 1) if token < 129 else "?"
            way = matcher.completion(200)
            if way is not None and rng.random() < 0.2:
                assert all(token in allowed(matcher) and matcher.accept(token) for token in way)
                assert matcher.is_accepting
                matcher.rollback(len(way))


def test_a_number_that_the_schema_writes_may_have_any_length() -> None:
    long, longer = 1e30, 1e40  # written without an exponent
    assert accepts(grammar_of({"const": long}), str(10**30))
    assert accepts(grammar_of({"enum": [long, longer, "x"]}), str(10**40))
    assert accepts(grammar_of({"enum": [1.5e-25]}), f"{Decimal(repr(1.5e-25)):f}")
    assert accepts(grammar_of({"type": "array", "items": {"enum": [long, 1]}}), f"[{10**30},1]")
    assert not accepts(grammar_of({"type": "integer"}), str(10**40))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": "string", "pattern": "^[0-9]*$"},
        {"type": "string", "pattern": "^[0-9,\\]]{60}$"},
        {"type": "array", "items": {"type": "string", "pattern": "^:[0-9}]{60}$"}},
    ],
)
def test_digits_in_a_text_are_no_number(schema: Any) -> None:
    body = '"' + (":" if "items" in schema else "") + "0" * 60 + '"'
    assert accepts(grammar_of(schema), f"[{body}]" if "items" in schema else body)


def structural(schema: Any) -> Grammar:
    return build_grammar(compile_spec(Structural([("<c>", schema, "</c>")]), BYTE_VOCABULARY), BYTE_VOCABULARY)


def test_numbers_of_calls_end_and_those_of_free_text_do_not() -> None:
    zeros, quote = "0" * 60, 'an "open quote '
    assert accepts(structural({"type": "number"}), f"{quote}{zeros} <c>1</c> {zeros}")
    assert accepts(structural({"type": "string"}), f'{quote}<c>"{zeros}"</c>')
    assert not accepts(structural({"type": "number"}), f"{quote}<c>1{zeros}</c>")
    assert not accepts(structural({"type": "object"}), f'{quote}<c>{{"a \\" b":[1{zeros}]}}</c>')


def test_a_grammar_of_ones_own_has_numbers_as_it_says() -> None:
    assert accepts(build_grammar(compile_spec(Lark("start: /[0-9]+/"), BYTE_VOCABULARY), BYTE_VOCABULARY), "0" * 60)


def test_a_finished_text_may_have_longer_numbers() -> None:
    assert constraint_mismatch(JsonSchema({"type": "number"}), "1" + "0" * 60) is None
    assert constraint_mismatch(JsonSchema({"type": "integer"}), "1.5") is not None


def test_a_model_that_only_writes_zeros_ends_a_record(smollm: Vocabulary) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "number"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    matcher, text = build_grammar(compile_spec(JsonSchema(schema), smollm), smollm).matcher(), b""
    zero, one = smollm.token_bytes.index(b"0"), smollm.token_bytes.index(b"1")
    for _ in range(80):
        choices = allowed(matcher, smollm)
        token = next(t for t in (one, zero, *choices) if t in choices and (t != one or not text[-1:].isdigit()))
        if token in smollm.eos_ids:
            break
        assert matcher.accept(token)
        text += smollm.token_bytes[token]
    assert json.loads(text) == {"a": 10**22, "b": 10**22}


@pytest.mark.parametrize("seed", range(4))
def test_what_is_known_of_the_way_is_kept_and_never_wrong(smollm: Vocabulary, seed: int) -> None:
    """Steps forth and back: the way told is always one, within its limit, whatever was known before."""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "kind": {"enum": ["good", "bad"]}, "sizes": {"items": {}}, "n": {}},
        "required": ["name", "kind", "sizes", "n"],
    }
    grammar, rng = build_grammar(compile_spec(JsonSchema(schema), smollm), smollm), random.Random(seed)
    matcher, num_tokens, num_known = grammar.matcher(), 0, 0
    for _ in range(60):
        limit = rng.choice((5, 30, 200))
        way = matcher.completion(limit)
        num_known += way is not None
        assert way is None or len(way) <= limit
        if way is not None:
            fresh = [token for token in way if matcher.accept(token)]
            assert fresh == way
            assert matcher.is_accepting
            matcher.rollback(len(way))
        back = rng.randrange(min(num_tokens, 3) + 1) if rng.random() < 0.3 else 0
        matcher.rollback(back)
        num_tokens -= back
        choices = [token for token in allowed(matcher, smollm) if token not in smollm.eos_ids]
        if not choices:
            break
        assert matcher.accept(rng.choice(choices))
        num_tokens += 1
    assert num_known > 10 or matcher.is_accepting


# -- where the JSON is ----------------------------------------------------------------------------

CALLS = JsonRegions(
    (JsonDelimiters(b"<c>", b"</c>"), JsonDelimiters(b"#", b"#"), JsonDelimiters(b'{"p": ', b"}")), free_text=True
)
PIECES = st.sampled_from(["<c>", "#", '{"p": ', "}", "</c>", "\\", '"', "1", "a ", "[", "{"])
STRINGS = st.lists(PIECES, max_size=4).map("".join)
VALUES = st.recursive(
    st.one_of(STRINGS, st.integers(-99, 99), st.floats(0, 9), st.booleans(), st.none()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=2),
    max_leaves=6,
)
FREE = st.text("ab1.\n", max_size=5)  # with a quote, free text before a call would be anybody's guess


def in_strings(value_text: str) -> list[bool]:
    """For each place behind a character whether it is in a string; the obvious way."""
    found, inside, escaped = [], False, False
    for char in value_text:
        if inside:
            inside, escaped = char != '"' or escaped, char == "\\" and not escaped
        else:
            inside = char == '"'
        found.append(inside)
    return found


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(FREE, st.sampled_from(CALLS.delimiters), VALUES, st.booleans()), min_size=1, max_size=3))
def test_where_a_text_is_in_a_string_of_its_json(json_regions) -> None:
    """Cut behind every character of every value: what opens a call may stand in strings, and quotes in free text."""
    text = b""
    for number, (free, kind, value, is_dense) in enumerate(json_regions):
        behind = free + '"' * (number % 2)
        text += behind.encode() + kind.begin
        value_text = json.dumps(value, separators=(",", ":") if is_dense else None)
        for at, inside in enumerate(in_strings(value_text), start=1):
            if value_text[at - 1].isdigit():
                assert ends_in_string(text + value_text[:at].encode(), CALLS) == inside, (text, value_text[:at])
        text += value_text.encode() + kind.end
        assert ends_in_string(text + b"a 12", CALLS), "behind a call no number is one of JSON"


def test_white_space_may_stand_before_the_end_of_a_call() -> None:
    """An end that looks like a begin opens nothing there."""
    marks = JsonRegions((JsonDelimiters(b"#", b"#"),), True)
    assert not ends_in_string(b'#{"a": 1} # he said "x #{"b": 10', marks)
    assert ends_in_string(b'#{"a": 1} # he said "x #{"b": "10', marks)


def test_a_call_that_is_named_in_a_string_leaves_its_numbers_their_bound() -> None:
    zeros = "0" * 60
    assert not accepts(structural({"type": "object"}), f'<c>{{"a": "<c>", "b": 1{zeros}}}</c>')
    assert not accepts(structural({"type": "object"}), f'<c>{{"a": "<c>\\""}}</c> "<c>{{"b": 1{zeros}}}</c>')
    assert accepts(structural({"type": "object"}), f'<c>{{"a": "<c>{zeros}", "b": 1}}</c>{zeros}')
    either = Structural([("<c>", {"type": "object"}, "</c>")], free_text=False, otherwise=JsonSchema({}))
    grammar = build_grammar(compile_spec(either, BYTE_VOCABULARY), BYTE_VOCABULARY)
    assert not accepts(grammar, f'["<c>", 1{zeros}]') and accepts(grammar, f'["<c>{zeros}", 1]')
