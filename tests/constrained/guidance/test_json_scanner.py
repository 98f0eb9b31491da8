"""The JSON scanner: whether a position of a text with calls is inside a JSON string."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from plait.constrained.tokens.json_scanner import JsonDelimiters, JsonRegions, ends_in_string

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

FREE = st.text("ab1.\n", max_size=5)  # no quotes: they would make the text before a call ambiguous


def in_strings(value_text: str) -> list[bool]:
    """Whether the position after each character is inside a string."""
    flags, inside, escaped = [], False, False
    for char in value_text:
        if inside:
            inside, escaped = char != '"' or escaped, char == "\\" and not escaped
        else:
            inside = char == '"'
        flags.append(inside)
    return flags


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(FREE, st.sampled_from(CALLS.delimiters), VALUES, st.booleans()), min_size=1, max_size=3))
def test_ends_in_string_after_every_digit_of_a_value(json_regions) -> None:
    """Begin tags may occur inside strings, and quotes inside free text."""
    text = b""
    for number, (free, kind, value, is_dense) in enumerate(json_regions):
        prefix = free + '"' * (number % 2)
        text += prefix.encode() + kind.begin
        value_text = json.dumps(value, separators=(",", ":") if is_dense else None)
        for at, inside in enumerate(in_strings(value_text), start=1):
            if value_text[at - 1].isdigit():
                assert ends_in_string(text + value_text[:at].encode(), CALLS) == inside, (text, value_text[:at])
        text += value_text.encode() + kind.end
        assert ends_in_string(text + b"a 12", CALLS), "free text after a call counts as a string"


def test_white_space_before_an_end_tag_that_equals_the_begin_tag() -> None:
    """The end tag does not begin another call."""
    json_regions = JsonRegions((JsonDelimiters(b"#", b"#"),), True)
    assert not ends_in_string(b'#{"a": 1} # he said "x #{"b": 10', json_regions)
    assert ends_in_string(b'#{"a": 1} # he said "x #{"b": "10', json_regions)
