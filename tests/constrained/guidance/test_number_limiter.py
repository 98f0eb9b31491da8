"""The number limiter: generated numbers have at most 23 digits, unless the schema lists a longer one."""

from __future__ import annotations

import json
import random
import re
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from example_share import share_of
from hypothesis import given, settings
from hypothesis import strategies as st
from matchers import allowed_tokens, compile_in_process
from schema_strategies import BYTE_VOCABULARY, EOS_ID, accepts, grammar_of

from plait.constrained import Grammar, JsonObject, JsonSchema, Lark, Structural, Vocabulary
from plait.constrained.compiler import build_grammar, compile_spec
from plait.constrained.guidance.llguidance_grammar import LlguidanceSource
from plait.constrained.specs import Spec
from plait.runtime.client.constraint_check import constraint_mismatch

NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
TEXT = re.compile(r'"(?:[^"\\]|\\.)*"?')


def has_short_numbers(text: str) -> bool:
    """Whether every number of a JSON text is within the limit of digits, found by a scan of the complete text."""
    for number in NUMBER.findall(TEXT.sub('""', text)):
        mantissa, _, exponent = number.lower().partition("e")
        if sum(char.isdigit() for char in mantissa) > 23 or sum(char.isdigit() for char in exponent) > 3:
            return False
    return True


def unlimited_grammar(spec: Spec) -> Grammar:
    """The grammar of `spec` without a limit on numbers."""
    source = compile_spec(spec, BYTE_VOCABULARY)
    assert isinstance(source, LlguidanceSource)
    return build_grammar(msgspec.structs.replace(source, max_digits=0), BYTE_VOCABULARY)


@settings(max_examples=300, deadline=None)
@given(number=st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**64), 2**64))
@pytest.mark.parametrize("grammar", [grammar_of({"type": "number"}), grammar_of({})])
def test_every_double_can_be_generated(grammar: Grammar, number: float) -> None:
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
def test_the_limiter_removes_only_tokens_that_make_a_number_too_long(spec: Spec) -> None:
    """Compares the masks with those of the unlimited grammar, on random texts with many digits."""
    grammar, without_limit = compile_in_process(spec, BYTE_VOCABULARY), unlimited_grammar(spec)
    for seed in range(6):
        matcher, unlimited, rng, text = grammar.matcher(), without_limit.matcher(), random.Random(seed), ""
        for _ in range(120):
            tokens, unlimited_tokens = (
                allowed_tokens(matcher, BYTE_VOCABULARY),
                allowed_tokens(unlimited, BYTE_VOCABULARY),
            )
            removed = [token for token in unlimited_tokens if token not in tokens]
            assert all(not has_short_numbers(text + chr(token - 1)) for token in removed if chr(token - 1) not in ".eE")
            assert all(has_short_numbers(text + chr(token - 1)) for token in tokens if token != EOS_ID)
            assert not any(matcher.accept(token) for token in removed)
            digits = [token for token in tokens if token != EOS_ID and chr(token - 1) in "0123456789.e"]
            token = rng.choice(digits if digits and rng.random() < 0.97 else tokens)
            if token == EOS_ID:
                break
            assert matcher.accept(token)
            assert unlimited.accept(token)
            text += chr(token - 1) if token < 129 else "?"
            completion = matcher.completion(200)
            if completion is not None and rng.random() < 0.2:
                assert all(
                    token in allowed_tokens(matcher, BYTE_VOCABULARY) and matcher.accept(token) for token in completion
                )
                assert matcher.is_accepting
                matcher.rollback(len(completion))


def test_listed_numbers_may_have_any_length() -> None:
    long, longer = 1e30, 1e40  # written without an exponent
    assert accepts(grammar_of({"const": long}), str(10**30))
    assert accepts(grammar_of({"enum": [long, longer, "x"]}), str(10**40))
    assert accepts(grammar_of({"enum": [1.5e-25]}), f"{Decimal(repr(1.5e-25)):f}")
    assert accepts(grammar_of({"type": "array", "items": {"enum": [long, 1]}}), f"[{10**30},1]")
    assert not accepts(grammar_of({"type": "integer"}), str(10**40))


def test_a_far_bound_does_not_raise_the_limit() -> None:
    far = grammar_of({"type": "number", "maximum": 1e300})
    assert accepts(far, "9" * 23) and not accepts(far, "9" * 24)
    above = grammar_of({"items": {"type": "number", "minimum": 1e30}})
    assert accepts(above, f"[{10**30}]") and not accepts(above, f"[{10**31}]")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": "string", "pattern": "^[0-9]*$"},
        {"type": "string", "pattern": "^[0-9,\\]]{60}$"},
        {"type": "array", "items": {"type": "string", "pattern": "^:[0-9}]{60}$"}},
    ],
)
def test_digits_in_strings_are_not_limited(schema: Any) -> None:
    body = '"' + (":" if "items" in schema else "") + "0" * 60 + '"'
    assert accepts(grammar_of(schema), f"[{body}]" if "items" in schema else body)


def structural(schema: Any) -> Grammar:
    return compile_in_process(Structural([("<c>", schema, "</c>")]), BYTE_VOCABULARY)


def test_numbers_are_limited_in_calls_and_not_in_free_text() -> None:
    zeros, quote = "0" * 60, 'an "open quote '
    assert accepts(structural({"type": "number"}), f"{quote}{zeros} <c>1</c> {zeros}")
    assert accepts(structural({"type": "string"}), f'{quote}<c>"{zeros}"</c>')
    assert not accepts(structural({"type": "number"}), f"{quote}<c>1{zeros}</c>")
    assert not accepts(structural({"type": "object"}), f'{quote}<c>{{"a \\" b":[1{zeros}]}}</c>')


def test_numbers_of_a_lark_grammar_are_not_limited() -> None:
    assert accepts(compile_in_process(Lark("start: /[0-9]+/"), BYTE_VOCABULARY), "0" * 60)


def test_the_check_of_a_finished_text_accepts_longer_numbers() -> None:
    assert constraint_mismatch(JsonSchema({"type": "number"}), "1" + "0" * 60) is None
    assert constraint_mismatch(JsonSchema({"type": "integer"}), "1.5") is not None


def test_a_model_that_prefers_digits_still_completes_the_object(smollm: Vocabulary) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "number"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    matcher, text = compile_in_process(JsonSchema(schema), smollm).matcher(), b""
    zero, one = smollm.token_bytes.index(b"0"), smollm.token_bytes.index(b"1")
    for _ in range(80):
        choices = allowed_tokens(matcher, smollm)
        token = next(t for t in (one, zero, *choices) if t in choices and (t != one or not text[-1:].isdigit()))
        if token in smollm.eos_ids:
            break
        assert matcher.accept(token)
        text += smollm.token_bytes[token]
    assert json.loads(text) == {"a": 10**22, "b": 10**22}


@pytest.mark.parametrize("seed", range(share_of(4)))
def test_completions_stay_valid_after_tokens_and_rollbacks(smollm: Vocabulary, seed: int) -> None:
    """The matcher keeps the last completion and adapts it to each accepted token and rollback."""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "kind": {"enum": ["good", "bad"]}, "sizes": {"items": {}}, "n": {}},
        "required": ["name", "kind", "sizes", "n"],
    }
    grammar, rng = compile_in_process(JsonSchema(schema), smollm), random.Random(seed)
    matcher, num_tokens, num_completions = grammar.matcher(), 0, 0
    for _ in range(60):
        limit = rng.choice((5, 30, 200))
        completion = matcher.completion(limit)
        num_completions += completion is not None
        assert completion is None or len(completion) <= limit
        if completion is not None:
            accepted = [token for token in completion if matcher.accept(token)]
            assert accepted == completion
            assert matcher.is_accepting
            matcher.rollback(len(completion))
        back = rng.randrange(min(num_tokens, 3) + 1) if rng.random() < 0.3 else 0
        matcher.rollback(back)
        num_tokens -= back
        choices = [token for token in allowed_tokens(matcher, smollm) if token not in smollm.eos_ids]
        if not choices:
            break
        assert matcher.accept(rng.choice(choices))
        num_tokens += 1
    assert num_completions > 10 or matcher.is_accepting


def test_a_begin_tag_inside_a_string_does_not_change_the_limit() -> None:
    zeros = "0" * 60
    assert not accepts(structural({"type": "object"}), f'<c>{{"a": "<c>", "b": 1{zeros}}}</c>')
    assert not accepts(structural({"type": "object"}), f'<c>{{"a": "<c>\\""}}</c> "<c>{{"b": 1{zeros}}}</c>')
    assert accepts(structural({"type": "object"}), f'<c>{{"a": "<c>{zeros}", "b": 1}}</c>{zeros}')
    either = Structural([("<c>", {"type": "object"}, "</c>")], free_text=False, otherwise=JsonSchema({}))
    grammar = compile_in_process(either, BYTE_VOCABULARY)
    assert not accepts(grammar, f'["<c>", 1{zeros}]') and accepts(grammar, f'["<c>{zeros}", 1]')
