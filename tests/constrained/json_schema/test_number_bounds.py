"""Bounds of numbers in schemas: grammars accept exactly the numbers within them, wherever a schema says so."""

from __future__ import annotations

import itertools
import json
import random
from decimal import Decimal
from typing import Any

import pytest
from example_share import sample_of
from hypothesis import given, settings
from hypothesis import strategies as st
from matchers import compile_in_process
from schema_strategies import BYTE_VOCABULARY, EOS_ID, accepts, grammar_of, reference_validator

from plait.constrained import Grammar, GrammarError, JsonSchema, Matcher, Structural
from plait.constrained.json_schema.compiler import compile_json
from plait.constrained.json_schema.lark_scalars import with_closed_bounds
from plait.constrained.json_schema.rewrite.numbers import decimal_of

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def accepted_texts(grammar: Grammar, max_length: int = 5) -> set[str]:
    """All texts of up to `max_length` characters that a grammar of numbers accepts."""
    found: set[str] = set()

    def follow(matcher: Matcher, text: str) -> None:
        if matcher.is_accepting:
            found.add(text)
        for char in "0123456789.-" if len(text) < max_length else "":
            if matcher.accept(1 + ord(char)):
                follow(matcher, text + char)
                matcher.rollback(1)

    follow(grammar.matcher(), "")
    return found


def texts_within(schema: dict[str, Any], wholes: range, max_length: int = 5) -> set[str]:
    """All numbers of up to `max_length` characters, with whole parts in `wholes`, valid by exact arithmetic."""
    bounds = {name: Decimal(str(schema[name])) for name in BOUNDS if name in schema}
    step = Decimal(str(schema.get("multipleOf", 0)))
    found = set()
    for sign, whole, size in itertools.product(("", "-"), wholes, range(max_length - 1)):
        for digits in itertools.product("0123456789", repeat=size):
            text = f"{sign}{whole}{'.' if size else ''}{''.join(digits)}"
            value = Decimal(text)
            if (
                len(text) <= max_length
                and bounds.get("minimum", value) <= value <= bounds.get("maximum", value)
                and bounds.get("exclusiveMinimum", value - 1) < value < bounds.get("exclusiveMaximum", value + 1)
                and not (step and value % step)
            ):
                found.add(text)
    return found


def _pairs() -> list[dict[str, Any]]:
    rng = random.Random(5)
    ends = [0, 0.05, 0.1, 0.5, 0.95, 0.99, 1, 1.05, 2.5]
    pairs = [(a, b) for a in (-1.05, -0.5, -0.05, *ends) for b in (-0.5, -0.05, *ends) if a < b]
    names = list(itertools.product(("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")))
    return [dict(zip(rng.choice(names), pair, strict=True)) for pair in rng.sample(pairs, 36)]


@pytest.mark.parametrize("bounds", sample_of(_pairs(), least=12), ids=str)
def test_all_texts_of_five_characters_are_judged_right(bounds: dict[str, Any]) -> None:
    assert accepted_texts(grammar_of({"type": "number", **bounds})) == texts_within(bounds, range(4))


DECIMAL_STEPS = [0.01, 0.05, 0.1, 0.25, 0.5, 1, 2]


@pytest.mark.parametrize("step", sample_of([*DECIMAL_STEPS, 0.3, 3, 0.15, 0.7], least=4))
def test_multiples_beside_bounds(step: float) -> None:
    rng = random.Random(str(step))
    for _ in range(3):
        low, high = sorted((rng.choice([0.05, 0.95, 1, 1.5, 2.99]), rng.choice([0.5, 0.94, 2, 2.5, 3, 3.3])))
        schema = {"type": "number", rng.choice(BOUNDS[::2]): low, rng.choice(BOUNDS[1::2]): high, "multipleOf": step}
        right = texts_within(schema, range(5))
        if not right:
            with pytest.raises(GrammarError):
                grammar_of(schema)
        else:
            accepted = accepted_texts(grammar_of(schema))
            assert_right(step, accepted, right)


def assert_right(step: float, accepted: set[str], right: set[str]) -> None:
    shortest = {text for text in right if "." not in text or text[-1] != "0"}
    is_exact = step in DECIMAL_STEPS or step == int(step)
    assert accepted == right if is_exact else shortest <= accepted <= right, sorted(accepted ^ right)


@pytest.mark.parametrize("step", [*DECIMAL_STEPS, 0.3, 3, 7, 60, 0.15, 0.7])
def test_multiples_without_bounds(step: float) -> None:
    """Zeros behind the point change no value."""
    schema = {"type": "number", "multipleOf": step}
    assert_right(step, accepted_texts(grammar_of(schema), 3), texts_within(schema, range(1000), 3))


RIGHT = [
    ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.95}, "0.1 0.94 0.949 0.10", "0 -0 0.0 0.95 0.950 1 -0.1 1e-3"),
    ({"minimum": -0.5, "exclusiveMaximum": 0}, "-0.5 -0.1 -0.50 -0.001", "-0 0 -0.0 -0.51 -1"),
    ({"maximum": 0.95}, "0.9 0.950 0 -0 -7 -0.0 -12.50", "0.951 1 0.96"),
    ({"minimum": 0, "maximum": 99.99}, "99.9 99 99.990 -0 -0.0", "99.991 100 -0.1"),
    ({"minimum": -0.05, "maximum": 0.05}, "0.0 -0.0 -0.05 0.050 0", "0.051 -0.1"),
    ({"exclusiveMinimum": 0.001, "exclusiveMaximum": 0.999}, "0.99 0.9 0.002 0.0011", "0.001 0.0010 0.999 0"),
    ({"exclusiveMinimum": 5, "maximum": 5.5}, "5.1 5.5 5.50", "5 5.0 5.51"),
    ({"minimum": 5e18}, "5000000000000000000 5000000000000000000.5 9999999999999999999999", "4999999999999999999"),
    ({"maximum": 1e300}, "1 99999999999999999999999 -3.5", "1e301"),
    ({"minimum": 1e300}, "1" + "0" * 300, "9" * 22),
    ({"type": "integer", "minimum": 0, "maximum": (1 << 64) - 1}, f"{(1 << 64) - 1} 0", f"{1 << 64} -1"),
    ({"type": "integer", "minimum": -(1 << 63)}, f"{-(1 << 63)} 5", str(-(1 << 63) - 1)),
    ({"type": "integer", "minimum": 10**22 + 1}, str(10**22 + 1), f"{10**22} 5"),
    ({"type": "integer", "minimum": (1 << 53) + 1}, str((1 << 53) + 1), str(1 << 53)),
    ({"type": "integer", "exclusiveMinimum": 0.5, "maximum": 2.5}, "1 2", "0 3 1.0"),
]


@pytest.mark.parametrize(("bounds", "valid", "invalid"), RIGHT, ids=lambda value: str(value)[:50])
def test_bounds_that_were_wrong_or_refused(bounds: dict[str, Any], valid: str, invalid: str) -> None:
    grammar = grammar_of({"type": "number", **bounds})
    assert [text for text in valid.split() if not accepts(grammar, text)] == []
    assert [text for text in invalid.split() if accepts(grammar, text)] == []


def test_a_range_without_a_number_is_refused_in_our_words() -> None:
    for bounds in ('"minimum": 3, "maximum": 2', '"exclusiveMinimum": 0, "maximum": 0'):
        with pytest.raises(GrammarError) as caught:
            compile_json(JsonSchema(f'{{"type": "number", {bounds}}}'), BYTE_VOCABULARY)
        assert "no value" in caught.value.reason
    grammar = grammar_of({"type": "object", "properties": {"a": {"type": "number", "minimum": 0.2, "maximum": 0.1}}})
    assert accepts(grammar, '{"b":1}') and not accepts(grammar, '{"a":1}')


PRICE = {"type": "number", "exclusiveMinimum": 0, "maximum": 0.95}
AROUND: list[tuple[Any, str]] = [
    ({"type": "array", "items": PRICE, "minItems": 1, "maxItems": 3}, "[{}]"),
    ({"type": "array", "items": PRICE, "minItems": 2, "maxItems": 2}, "[0.5,{}]"),
    ({"type": "array", "prefixItems": [{"type": "boolean"}, PRICE], "items": False}, "[true,{}]"),
    ({"type": "array", "prefixItems": [PRICE], "items": {"type": "string"}, "minItems": 1}, '[{},"a","b"]'),
    ({"type": "object", "properties": {"a": PRICE, "b": {"type": "string"}}, "required": ["b"]}, '{"a":{},"b":"x"}'),
    ({"type": "object", "additionalProperties": PRICE, "minProperties": 1, "maxProperties": 2}, '{"x":0.1,"y":{}}'),
    ({"type": "object", "patternProperties": {"^x/": PRICE}, "additionalProperties": False}, '{"x/y":{}}'),
    ({"anyOf": [{"type": "null"}, PRICE]}, "{}"),
    ({"type": ["number", "string", "array"], "maximum": 0.95, "exclusiveMinimum": 0, "minLength": 2}, "{}"),
    ({"exclusiveMinimum": 0, "maximum": 0.95}, "{}"),
    ({"$ref": "#/$defs/price", "$defs": {"price": PRICE}}, "{}"),
    ({"$ref": "#/$defs/low", "maximum": 0.95, "$defs": {"low": {"exclusiveMinimum": 0}}, "type": "number"}, "{}"),
    ({"type": "number", "allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.95}, {"minimum": -3.5}]}, "{}"),
    ({"oneOf": [PRICE, {"type": "number", "exclusiveMinimum": 0.95, "maximum": 7.5}], "maximum": 0.95}, "{}"),
    ({"type": "number", "not": {"maximum": 0}, "maximum": 0.95}, "{}"),
    ({"type": "number", "if": {"maximum": 0.5}, "then": {"exclusiveMinimum": 0}, "else": {"maximum": 0.95}}, "{}"),
    ({"definitions": {"t": {"type": "object", "properties": {"p": PRICE, "t": {"$ref": "#/definitions/t"}}}},
      "$ref": "#/definitions/t"}, '{"t":{"t":{"p":{}}}}'),
    ({"$schema": "http://json-schema.org/draft-04/schema#", "type": "number", "minimum": 0, "exclusiveMinimum": True,
      "maximum": 0.95}, "{}"),
]  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"whitespace": True}], ids=str)
@pytest.mark.parametrize(("schema", "around"), AROUND, ids=lambda value: str(value)[:60])
def test_bounds_hold_wherever_they_stand(schema: Any, around: str, options: dict[str, bool]) -> None:
    grammar, validator = grammar_of(schema, **options), reference_validator(schema)
    for number in ("0.9", "0.95", "0.950", "0.001", "0.5", "0", "-0", "0.0", "0.951", "1", "-1", "0.96"):
        text = around.replace("{}", number) if around != "{}" else number
        assert accepts(grammar, text) is validator.is_valid(json.loads(text)), text
        if options:
            spaced = text.replace(",", " ,\n").replace(":", " : ").replace("[", "[ ").replace("}", "\t}")
            assert accepts(grammar, spaced) is validator.is_valid(json.loads(text)), spaced


def test_names_beside_a_pattern_with_bounds() -> None:
    schema = {
        "type": "object",
        "properties": {"xa": {"type": "boolean"}},
        "patternProperties": {"^x/": PRICE},
        "additionalProperties": {"type": "string"},
    }
    grammar, validator = grammar_of(schema), reference_validator(schema)
    for text in (
        '{"x/1":0.9}',
        '{"x/1":"s"}',
        '{"y":"s"}',
        '{"y":0.9}',
        '{"xa":true,"x/":0.5,"é":"s"}',
        '{"xa":0.5}',
        "{}",
    ):
        assert accepts(grammar, text) is validator.is_valid(json.loads(text)), text
    assert not accepts(grammar, '{"x\\/1":"s"}') and not accepts(grammar, '{"\\u0078/":"s"}')


@pytest.mark.parametrize("schema", [PRICE, {"type": "object", "properties": {"p": PRICE}, "required": ["p"]}])
def test_bounds_hold_in_tool_calls(schema: Any) -> None:
    spec = Structural([("<c>", schema, "</c>"), ("<d>", {"type": "string"}, "</d>")])
    grammar = compile_in_process(spec, BYTE_VOCABULARY)
    for number, is_valid in {"0.9": True, "0.950": True, "0": False, "0.96": False}.items():
        value = number if schema is PRICE else f'{{"p": {number}}}'
        assert accepts(grammar, f'so <c>{value}</c>, then <d>"a"</d>') is is_valid


def test_listed_numbers_beside_bounds_are_compared_as_decimals() -> None:
    schema = {
        "allOf": [{"enum": [0, 0.5, 0.95, 1, "a", True]}, {"exclusiveMinimum": 0, "maximum": 0.95}],
        "minLength": 1,
    }
    grammar = grammar_of(schema)
    assert [text for text in ("0", "0.5", "0.95", "1", '"a"', "true") if accepts(grammar, text)] == [
        "0.5", "0.95", '"a"', "true",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "listed", [90.88184001853247, 1.0000000000000002, 1e23, 1.5e30, 2**53 + 1, 10**30 + 7, -(2**63)]
)
def test_listed_numbers_that_the_compiler_would_read_as_others(listed: float) -> None:
    """llguidance reads a number of 17 digits as a double that may be the next one."""
    text, near = f"{decimal_of(listed):f}", f"{decimal_of(listed) + (1 if listed == int(listed) else 0):f}1"
    for schema, around in (({"enum": [listed, "a"]}, "{}"), ({"const": [listed, {"a": listed}]}, '[{},{"a":{}}]')):
        grammar = grammar_of(schema)
        assert accepts(grammar, around.replace("{}", text)), text
        assert not accepts(grammar, around.replace("{}", near))
    assert accepts(grammar_of({"enum": [listed, "a"]}), '"a"')


@settings(max_examples=150, deadline=None)
@given(st.floats(-1e6, 1e6).filter(lambda number: abs(number) > 1e-6))
def test_a_listed_fraction_is_completed_as_itself(listed: float) -> None:
    completion = grammar_of({"const": listed}).matcher().completion(60)
    assert completion is not None and float("".join(chr(token - 1) for token in completion)) == listed


def test_zeros_behind_the_point_do_not_go_on_for_ever() -> None:
    """A number above 0 needs a digit other than 0 within the limit of 23."""
    matcher = grammar_of(PRICE).matcher()
    text = "0."
    assert all(matcher.accept(1 + ord(char)) for char in text)
    while matcher.accept(1 + ord("0")):
        text += "0"
    assert len(text) == 23 and not matcher.is_accepting and matcher.accept(1 + ord("1")) and matcher.is_accepting


def test_a_begun_number_can_be_completed() -> None:
    for schema, begun in ((PRICE, "0"), (PRICE, "0.0"), ({"type": "number", "minimum": 10.25, "maximum": 10.5}, "1")):
        matcher = grammar_of(schema).matcher()
        assert all(matcher.accept(1 + ord(char)) for char in begun)
        completion = matcher.completion(10)
        assert completion is not None and EOS_ID not in completion
        assert reference_validator(schema).is_valid(json.loads(begun + "".join(chr(token - 1) for token in completion)))


numbers = st.one_of(
    st.integers(-30, 30).map(lambda n: n / 4), st.sampled_from([0.1, 0.95, 0.33, -0.07, 12.34]), st.integers(-3, 3)
)
corners = st.builds(
    lambda power, sign, offset: sign * (1 << power) + offset,
    st.sampled_from([53, 54, 62, 63, 64, 70]), st.sampled_from([1, -1]), st.integers(-3, 3),
)  # fmt: skip
schemas = st.tuples(
    st.dictionaries(st.sampled_from(BOUNDS), numbers | corners, min_size=1, max_size=3),
    st.sampled_from([{"type": "integer"}, {"type": "number"}, {}, {"type": ["integer", "null"]}]),
)


def values_around(bounds: dict[str, Any], more: list[float]) -> set[float]:
    return {*more, *(bound + near for bound in bounds.values() for near in (0, -1, 1, -0.5, 0.125))}


@settings(max_examples=150, deadline=None)
@given(schemas, st.lists(numbers | corners, max_size=6))
def test_a_second_validator_agrees(two: tuple[dict[str, Any], dict[str, Any]], more: list[float]) -> None:
    bounds, schema = two[0], {**two[1], **two[0]}
    validator = reference_validator(schema)
    try:
        grammar = grammar_of(schema)
    except GrammarError:
        assert not any(validator.is_valid(value) for value in [*bounds.values(), *more])
        return
    kinds = schema.get("type", "number")
    is_large = any(abs(bound) > 1 << 53 for bound in bounds.values())
    for value in values_around(bounds, more):
        if isinstance(value, float) and (abs(value) > 1e15 or (value.is_integer() and "number" not in kinds)):
            continue  # written with an exponent, or an integer with a fraction
        is_accepted = accepts(grammar, json.dumps(value))
        is_valid = validator.is_valid(value)
        may_be_lost = is_large and schema.get("type") != "integer"  # between a bound and the next double
        assert is_accepted is is_valid or (is_valid and may_be_lost), (schema, value)


@settings(max_examples=100, deadline=None)
@given(schemas, st.lists(numbers | corners, max_size=6))
def test_bounds_for_a_schema_that_lark_cannot_write_are_never_exceeded(two: Any, more: list[float]) -> None:
    bounds, schema = two[0], {**two[1], **two[0]}
    validator = reference_validator(schema)
    try:
        narrowed = with_closed_bounds(schema)
    except GrammarError:
        return
    narrow = reference_validator(narrowed)
    for value in values_around(bounds, more):
        assert not narrow.is_valid(value) or validator.is_valid(value), (narrowed, value)


def test_bounds_that_a_double_represents_stay_as_they_are() -> None:
    source = compile_json(JsonSchema({"type": "integer", "minimum": 0, "maximum": 100}), BYTE_VOCABULARY)
    assert '"maximum": 100' in source.text.replace("\\", "")
