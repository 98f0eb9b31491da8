"""The automaton of small patterns, against Python's `re`."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from plait.constrained.dfa.token_dfa import DfaTooLarge
from plait.constrained.regex.python_syntax import to_plain_pattern
from plait.constrained.regex.small_dfa import build_small_dfa

PIECES = st.sampled_from(
    [
        "a",
        "b",
        "[ab]",
        "[b-d]",
        "é",
        "[^a]",
        ".",
        r"\d",
        "[é-ÿ日]",
        "[^é]",
        r"[^\W日]",
        "(?:a|bc)",
        "(?:|a)",
        "-?",
        "0",
        "[01]",
        "(?:ab){2}",
    ]
)


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


def matches(automaton: tuple[Any, int, Any], text: str) -> bool:
    states, state, accepting = automaton
    for byte in text.encode():
        state = int(states[state, byte])
        if state < 0:
            return False
    return bool(accepting[state])


@settings(max_examples=300, deadline=None)
@given(
    patterns(),
    st.lists(st.text("abcd01-éê日\u07ff\u0800\uffff\U00010000\U0010fffe٣\n", max_size=7), min_size=1, max_size=12),
)
def test_it_matches_what_python_matches(pattern: str, texts: list[str]) -> None:
    try:
        automaton = build_small_dfa(to_plain_pattern(pattern).pattern)
    except DfaTooLarge:
        assume(r"\W" not in pattern)  # hundreds of ranges, in each state
        raise
    for text in ("", *texts):
        assert matches(automaton, text) == (re.fullmatch(pattern, text) is not None), text


@pytest.mark.parametrize("pattern", [r"\w{400}", "[ab]*a" + "[ab]" * 20, "a{513}", "(?:a{100}){100}", ".{0,513}"])
def test_other_patterns_are_left_to_outlines_core(pattern: str) -> None:
    with pytest.raises(DfaTooLarge):
        build_small_dfa(to_plain_pattern(pattern).pattern)


@pytest.mark.parametrize("count", [17, 200])
def test_a_bounded_repeat_after_another_class_has_few_states(count: int) -> None:
    """outlines-core takes twice as long for each further digit."""
    states, _, accepting = build_small_dfa(to_plain_pattern(f"-?(?:0|[1-9][0-9]{{0,{count}}})").pattern)
    assert len(states) == count + 4
    assert int(accepting.sum()) == count + 2


@pytest.mark.parametrize("pattern", [".", r"\w", r"\d", r"\W", "[^a]", r"[\s\S]", "é|[è-ê]|日", "[\x7f-\x80]"])
def test_a_class_accepts_each_character_that_python_matches(pattern: str) -> None:
    states, start, accepting = build_small_dfa(to_plain_pattern(pattern).pattern)
    for code in (*range(0x0900), *range(0x900, 0x10FFFF, 61), 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x3FFFF, 0x40000):
        if 0xD800 <= code <= 0xDFFF:
            continue
        state = start
        for byte in chr(code).encode():
            state = int(states[state, byte]) if state >= 0 else -1
        assert (state >= 0 and bool(accepting[state])) == (re.fullmatch(pattern, chr(code)) is not None), hex(code)
    for invalid in (b"\x80", b"\xc0\x80", b"\xc1\xbf", b"\xe0\x80\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xff"):
        state = start
        for byte in invalid:
            state = int(states[state, byte]) if state >= 0 else -1
        assert state < 0, invalid
