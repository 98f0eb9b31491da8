"""The automaton of small patterns, against Python's `re`."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from plait.constrained.dfa.token_dfa import DfaTooLarge
from plait.constrained.regex.python_syntax import to_plain_pattern
from plait.constrained.regex.small_dfa import build_small_dfa

PIECES = st.sampled_from(["a", "b", "[ab]", "[b-d]", "é", "(?:a|bc)", "(?:|a)", "-?", "0", "[01]", "(?:ab){2}"])


@st.composite
def patterns(draw: st.DrawFn, depth: int = 2) -> str:
    if not depth:
        return draw(PIECES)
    inner = patterns(depth - 1)
    kind = draw(st.sampled_from(["concat", "either", "repeat", "leaf"]))
    if kind == "concat":
        return draw(inner) + draw(inner)
    if kind == "either":
        return f"(?:{draw(inner)}|{draw(inner)})"
    if kind == "repeat":
        return f"(?:{draw(inner)})" + draw(st.sampled_from(["*", "+", "?", "{0,3}", "{2}", "{1,2}", "{2,}"]))
    return draw(inner)


def matches(pattern: str, text: str) -> bool:
    states, state, accepting = build_small_dfa(to_plain_pattern(pattern).pattern)
    for byte in text.encode():
        state = int(states[state, byte])
        if state < 0:
            return False
    return bool(accepting[state])


@settings(max_examples=300, deadline=None)
@given(patterns(), st.lists(st.text("abcd01-é", max_size=7), min_size=1, max_size=12))
def test_it_matches_what_python_matches(pattern: str, texts: list[str]) -> None:
    try:
        build_small_dfa(to_plain_pattern(pattern).pattern)
    except DfaTooLarge:
        assume("é" not in pattern)  # Python's parser joins é|a to a class
        raise
    for text in ("", *texts):
        assert matches(pattern, text) == (re.fullmatch(pattern, text) is not None), text


@pytest.mark.parametrize(
    "pattern", ["[^a]", r"\w", ".", "[ab]*a" + "[ab]" * 20, "a{513}", "(?:a{100}){100}", "[éa]b|[è-ê]"]
)
def test_other_patterns_are_left_to_outlines_core(pattern: str) -> None:
    with pytest.raises(DfaTooLarge):
        build_small_dfa(to_plain_pattern(pattern).pattern)


@pytest.mark.parametrize("count", [17, 200])
def test_a_bounded_repeat_after_another_class_has_few_states(count: int) -> None:
    """outlines-core takes twice as long for each further digit."""
    states, _, accepting = build_small_dfa(to_plain_pattern(f"-?(?:0|[1-9][0-9]{{0,{count}}})").pattern)
    assert len(states) == count + 4
    assert int(accepting.sum()) == count + 2
