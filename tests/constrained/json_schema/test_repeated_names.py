"""Counted names that are not listed: a text is accepted exactly if its value is valid and no name is written twice."""

from __future__ import annotations

import json
import random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matchers import allowed_tokens
from schema_strategies import BYTE_VOCABULARY, EOS_ID, accepts, grammar_of, reference_validator

from plait.constrained import Grammar, GrammarError

NAMES = ["a", "b", "ä", "x", "xy", '"', "\\", "\n", ""]
COUNTS = st.fixed_dictionaries(
    {"type": st.just("object"), "minProperties": st.integers(2, 4)},
    optional={
        "maxProperties": st.integers(2, 4),
        "additionalProperties": st.sampled_from([True, {"type": "integer"}, {"$ref": "#"}]),
        "patternProperties": st.sampled_from([{"^x": {"type": "integer"}}, {"^[a-zä]*$": True}]),
        "propertyNames": st.sampled_from([{"pattern": "^[a-z]"}, {"maxLength": 1}, {"minLength": 1}]),
        "required": st.sampled_from([["a"], ["a", "x"]]),
        "properties": st.sampled_from([{"a": {}}, {"b": {}, "xy": {"type": "integer"}}, {"a": {"$ref": "#"}}]),
    },
)
SCHEMAS = st.one_of(
    COUNTS,
    COUNTS.map(lambda inner: {"anyOf": [{"type": ["integer", "null"]}, inner]}),
    COUNTS.map(lambda inner: {"type": "array", "items": {"anyOf": [inner, {"type": "null"}]}}),
    COUNTS.map(lambda inner: {**inner, "allOf": [{"properties": {"a": {}, "b": {}}}]}),
    st.tuples(COUNTS, COUNTS).map(lambda two: {"anyOf": list(two)}),
)
Members = list[tuple[str, Any]]  # of an object, in order; names may come twice


def members_of(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Members]:
    return st.lists(st.tuples(st.sampled_from(NAMES), values), max_size=5)


OBJECTS = members_of(st.sampled_from([1, None, "s"]) | members_of(st.just(1)))
WRITTEN = st.one_of(OBJECTS, OBJECTS, st.lists(OBJECTS | st.none(), max_size=3).map(tuple))


def written(value: Any) -> str:
    """The text of a value, of which a list is the members of an object and a tuple is an array."""
    if isinstance(value, list):
        return "{" + ",".join(f"{written(name)}:{written(inner)}" for name, inner in value) + "}"
    if isinstance(value, tuple):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def has_repeated(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(has_repeated, value))
    if not isinstance(value, list):
        return False
    names = [name for name, _ in value]
    return len(set(names)) < len(names) or any(has_repeated(inner) for _, inner in value)


def with_listed_first(value: Any) -> Any:
    """The same value with the names that a schema may list in their order, before the others."""
    if isinstance(value, tuple):
        return tuple(map(with_listed_first, value))
    if not isinstance(value, list):
        return value
    places = {"a": 0, "b": 1, "x": 2, "xy": 3}
    return sorted(((n, with_listed_first(inner)) for n, inner in value), key=lambda pair: places.get(pair[0], 9))


def grammar_or_reason(schema: Any) -> Grammar | str:
    try:
        return grammar_of(schema)
    except GrammarError as error:
        return error.reason


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(SCHEMAS, st.lists(WRITTEN, min_size=8, max_size=8))
def test_a_text_is_accepted_if_its_value_is_valid_and_no_name_comes_twice(schema: Any, values: list[Any]) -> None:
    validator, grammar = reference_validator(schema), grammar_or_reason(schema)
    if isinstance(grammar, str):
        is_found_empty = "no value" in grammar
        assert not (is_found_empty and any(validator.is_valid(json.loads(written(value))) for value in values))
        return
    for value in map(with_listed_first, values):
        text = written(value)
        is_valid = bool(validator.is_valid(json.loads(text)))
        if has_repeated(value):
            assert is_valid or not accepts(grammar, text), text
        else:
            assert accepts(grammar, text) is is_valid, text


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(SCHEMAS, st.integers(0, 1 << 30))
def test_walks_under_the_masks_end_in_valid_values(schema: Any, seed: int) -> None:
    grammar = grammar_or_reason(schema)
    if isinstance(grammar, str):
        return
    rng, text, matcher = random.Random(seed), bytearray(), grammar.matcher()
    for _ in range(80):
        allowed = [token for token in allowed_tokens(matcher, BYTE_VOCABULARY) if token != EOS_ID]
        likely = [token for token in allowed if chr(token - 1) in '"}]:,ax1']
        if matcher.is_accepting and (not allowed or rng.random() < 0.3):
            break
        token = rng.choice(likely or allowed)
        assert matcher.accept(token)
        text.append(token - 1)
        if rng.random() < 0.1:
            back = rng.randrange(min(len(text), 4) + 1)
            matcher.rollback(back)
            del text[len(text) - back :]
    rest = matcher.completion(120)
    if rest is None:
        assert "$ref" in str(schema)  # a value of many levels
        return
    text += bytes(token - 1 for token in rest)
    assert reference_validator(schema).is_valid(json.loads(text)), text


def test_escapes_in_names_are_compared_as_read() -> None:
    grammar = grammar_of({"type": "object", "minProperties": 2})
    assert not accepts(grammar, '{"/":1,"\\/":1}') and not accepts(grammar, '{"\\"":1,"\\"":1}')
    assert accepts(grammar, '{"\\"":1,"\\\\":1}')
