"""The texts of named groups and captured rules in a finished text, against `re` and against texts that are composed."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.constrained import Choices, GrammarError, JsonSchema, Lark, Regex, capture_names, captured_texts, captures

PATTERNS = [
    r"(?P<year>[0-9]{4})-(?P<month>[0-9]{2})",
    r"(?P<a>x+)(?P<b>y)?z",
    r"(?:(?P<word>[a-z]+) )*end",
    r"(?P<outer>a(?P<inner>b|c)+)",
    r"(?P<first>.*?)-(?P<rest>.*)",
    r"no group",
]


@pytest.mark.parametrize("pattern", PATTERNS)
@given(st.data())
def test_groups_are_those_of_re(pattern, data):
    text = data.draw(st.from_regex(pattern, fullmatch=True) | st.text(alphabet="abxyz-0 end", max_size=8))
    match = re.fullmatch(pattern, text)
    names = tuple(re.compile(pattern).groupindex)
    assert capture_names(Regex(pattern)) == names
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captures, "SHORT_TEXT_CHARS", data.draw(st.sampled_from([0, 16])))
        assert captured_texts(Regex(pattern), text) == (match.groupdict() if match else dict.fromkeys(names))


def test_a_long_text_that_is_cut_off_takes_no_time():
    """`re` alone would need hours for each."""
    for pattern, text in ((r"(?P<x>(a+)+)b", "a" * 60), (r"(?P<x>(?:é|é)*)(?P<y>b$)", "é" * 50)):
        names = capture_names(Regex(pattern))
        assert captured_texts(Regex(pattern), text) == dict.fromkeys(names)
        assert captured_texts(Regex(pattern), text + "b")["x"] == text
    assert captured_texts(Regex(r"(?P<x>(?=a)a+)"), "a" * 60) == {"x": "a" * 60}


RECORD = """
start: item ("; " item)*
item[capture]: key "=" value
key[capture]: /[a-z]+/
value[capture="content"]: NUMBER | /"[^"]*"/
NUMBER: /[0-9]+/
"""


@given(
    st.lists(
        st.tuples(st.from_regex("[a-z]+", fullmatch=True), st.from_regex('[0-9]+|"[^"]*"', fullmatch=True)), min_size=1
    )
)
def test_a_captured_rule_has_its_last_text(items):
    text = "; ".join(f"{key}={value}" for key, value in items)
    key, value = items[-1]
    assert capture_names(Lark(RECORD)) == ("item", "key", "content")
    assert captured_texts(Lark(RECORD), text) == {"item": f"{key}={value}", "key": key, "content": value}


def test_a_text_outside_of_the_language_has_no_captures():
    for text in ("", "a", "a=", "a=1;", "a=1; ", "a=1; b", "A=1", "a=1é"):
        assert set(captured_texts(Lark(RECORD), text).values()) == {None}
    assert captured_texts(Lark('start: a b?\na[capture]: "é"+\nb[capture]: "x"'), "éé") == {"a": "éé", "b": None}


def test_other_constraints_and_rules_have_none():
    assert (
        capture_names(Choices(("a", "b"))) == capture_names(JsonSchema({"type": "null"})) == capture_names(None) == ()
    )
    assert capture_names(Lark('start: a // b[capture]: "x"\na[lazy]: /capture[capture]:/')) == ()
    assert capture_names(Lark('start: a\na[lazy, capture="x"]: /[a-z]+/')) == ("x",)
    assert capture_names(Regex("(?P<broken")) == ()
    with pytest.raises(GrammarError, match="the name of a capture must be an identifier, not 'x]'"):
        capture_names(Lark('start: a\na[lazy, capture="x]"]: "x"'))
    with pytest.raises(GrammarError, match="the name of a capture must be an identifier, not 'no name'"):
        capture_names(Lark('start: a\na[capture="no name"]: "x"'))
