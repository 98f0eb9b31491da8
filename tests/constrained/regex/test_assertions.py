"""Lookaround, anchors and word boundaries in patterns: the automata accept what `re.fullmatch` matches."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from regex_oracles import WORDS

from plait.constrained import GrammarError, Regex, captured_texts
from plait.constrained.compiler import build_grammar, compile_spec
from plait.constrained.regex.lookaround_dfa import build_lookaround_dfa

TEXTS = ["".join(text) for size in range(5) for text in itertools.product("ab-\n", repeat=size)]
TEXTS += ["é", "éa", "aé", "é-", "a é", "١a", "Aé", "日b", "a\U0001f600", "\u2028", "_", "ab1", "1a!", "A", "AB", "ſ"]
PATTERNS = [
    r"\bab\b",
    r".*\b[ab]\b.*",
    r"(?a)é\ba",
    r"é\Ba",
    r"(?=.*[0-9])(?=.*[a-z])\w{2,3}",
    r"(?!.*ab)[ab-]{1,4}",
    r"(?i)(?=A)a.|B",
    r"(?i:(?=a)A)b",
    r"(?s)(?!a).*",
    r"a$\n|b\n$",
    r"(?<!a)b|a(?<!b)b",
    r"(?:a|^b|-$)+",
    r"(?!)|a(?!.*\ba\b).*",
    r"(?<=\b)a|(?<!\b)b",
    r"(?:a(?<!\b)|b(?<=\b)|[ -])*",
    r".*(?<=a\b)-?b?",
    r".*(?<!\ba|[ab]\B)b.*",
    r".*(?<=b\Z).?|(?<!a\Z)a",
    r".*(?<=(?<!\bab)b)-.*",
    r".*(?<!(?<=\b)b(?<!a-b))a?",
    r".*(?!(?<=\B)).",
    r".*(?=(?<=a\b)-).*",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_automaton_accepts_what_fullmatch_matches(pattern: str) -> None:
    states, start, accepting = build_lookaround_dfa(pattern)
    for text in TEXTS:
        at = start
        for byte in text.encode():
            at = int(states[at, byte]) if at >= 0 else at
        assert (at >= 0 and bool(accepting[at])) is (re.fullmatch(pattern, text) is not None), text


ATOMS = st.sampled_from(["a", "b", "[ab]", ".", "[^a]", r"\w", "-", "", "é"])
ASSERTIONS = st.sampled_from(
    [r"\b", "^", "$", r"(?=a)", r"(?!b)", r"(?<=a)", r"(?<!b)", r"(?=.*b)", r"(?!.*-)", r"(?<!\b)"]
)


PIECES = st.one_of(ATOMS.filter(bool), st.sampled_from([r"\b", r"\B", "^", r"\Z", "(?<=a)", r"(?<!\b)", r"(?<!b\b)"]))
SEQUENCES = st.lists(PIECES, max_size=3).map("".join)
BEHIND = st.tuples(st.sampled_from(["(?<=", "(?<!"]), SEQUENCES).map(lambda two: f"{two[0]}{two[1]})")


def _composed(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from("*?+")).map(lambda two: f"(?:{two[0]}){two[1]}"),
        inner.map(lambda one: f"(?={one})"),
        inner.map(lambda one: f"(?!{one})"),
        inner.map(lambda one: f"(?i:{one})"),
        st.tuples(inner, BEHIND, inner).map("".join),
    )


@settings(max_examples=150, deadline=None)
@given(
    st.recursive(st.one_of(ATOMS, ASSERTIONS, BEHIND), _composed, max_leaves=6), st.sampled_from(["", "(?a)", "(?s)"])
)
def test_random_patterns(body: str, flags: str) -> None:
    pattern = flags + body
    try:
        states, start, accepting = build_lookaround_dfa(pattern)
    except GrammarError as caught:
        reason = caught.reason
        if "empty text" in reason or "too many states" in reason:
            return
        raise
    for text in TEXTS[:120] + TEXTS[-16:]:
        at = start
        for byte in text.encode():
            at = int(states[at, byte]) if at >= 0 else at
        assert (at >= 0 and bool(accepting[at])) is (re.fullmatch(pattern, text) is not None), (pattern, text)


def test_tokens_and_captures() -> None:
    pattern = r"(?P<word>\b(?!no)[a-z]+\b)!"
    matcher = build_grammar(compile_spec(Regex(pattern), WORDS), WORDS).matcher()
    for char in "na":
        assert matcher.accept(1 + ord(char))
    assert not build_grammar(compile_spec(Regex(pattern), WORDS), WORDS).matcher().accept(1 + ord("!"))
    assert not matcher.is_accepting and matcher.accept(1 + ord("!")) and matcher.is_accepting
    assert captured_texts(Regex(pattern), "na!") == {"word": "na"}
