"""Numbers beyond 2^53 in schemas are enforced exactly, or the schema raises with their pointer."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schema_strategies import accepts, grammar_of

from plait.constrained import GrammarError
from plait.constrained.json_schema.rewrite import rewrite_schema

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
corners = st.sampled_from([sign << power for power in (53, 54, 58, 62, 63, 64, 70) for sign in (1, -1)])
large = st.builds(lambda corner, offset: corner + offset, corners, st.integers(-3, 3))


def is_valid(schema, value):
    """Validates an integer with Python's exact arithmetic."""
    return (
        value >= schema.get("minimum", value)
        and value <= schema.get("maximum", value)
        and value > schema.get("exclusiveMinimum", value - 1)
        and value < schema.get("exclusiveMaximum", value + 1)
        and value in schema.get("enum", [value])
    )


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(st.sampled_from(BOUNDS), large, min_size=1, max_size=2),
    st.sampled_from([{"type": "integer"}, {"type": "number"}, {}, {"type": ["integer", "null"]}]),
)
def test_large_bounds_are_enforced_exactly(bounds, kind):
    schema = {**kind, **bounds}
    try:
        grammar = grammar_of(schema)
    except GrammarError:
        return
    for bound in bounds.values():
        for value in range(bound - 3, bound + 4):
            assert not accepts(grammar, str(value)) or is_valid(schema, value), value


@settings(max_examples=100, deadline=None)
@given(st.lists(large, min_size=1, max_size=3, unique=True))
def test_large_enum_values_are_enforced_exactly(listed):
    try:
        grammar = grammar_of({"enum": listed})
    except GrammarError:
        return
    for value in {near for number in listed for near in range(number - 3, number + 4)}:
        assert not accepts(grammar, str(value)) or value in listed, value


def test_bounds_that_a_double_represents_are_supported():
    """Bounds of 64-bit integers, as schema generators write them, and exclusive bounds rewritten as inclusive."""
    highest = (1 << 63) - 1
    grammar = grammar_of({"type": "integer", "minimum": 0, "maximum": highest})
    assert accepts(grammar, str(highest)) and not accepts(grammar, str(highest + 1))
    rewritten = rewrite_schema(
        json.dumps({"type": "integer", "exclusiveMinimum": (1 << 53) + 1, "maximum": 1 << 54})
    ).schema
    assert rewritten == {"type": "integer", "minimum": (1 << 53) + 2, "maximum": 1 << 54}
    grammar = grammar_of({"type": "integer", "exclusiveMaximum": 1 << 63})
    assert accepts(grammar, str(highest)) and not accepts(grammar, str(highest + 1))
    with pytest.raises(GrammarError) as caught:
        grammar_of({"properties": {"a": {"type": "integer", "minimum": (1 << 53) + 1}}})
    assert caught.value.where == "/properties/a/minimum"


def test_a_bound_of_fractions_is_rounded_towards_the_inside():
    unsigned = (1 << 64) - 1  # as generators write the range of a 64-bit integer; larger than the compiler can bound
    grammar = grammar_of({"type": "number", "minimum": 1, "maximum": unsigned})
    assert accepts(grammar, "1.5") and accepts(grammar, "9223372036854770000")
    assert not any(accepts(grammar, text) for text in (str(unsigned + 1), "1.8446744073709552e19", "0.5"))
    grammar = grammar_of({"exclusiveMaximum": (1 << 60) + 1})
    assert accepts(grammar, str((1 << 60) - 200)) and not accepts(grammar, str((1 << 60) + 1))
    grammar = grammar_of({"type": "integer", "allOf": [{"minimum": (1 << 53) + 1}]})
    assert accepts(grammar, str((1 << 53) + 2)) and not accepts(grammar, str(1 << 53))
