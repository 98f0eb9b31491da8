"""The search of stop patterns in a growing text: each character tells the earliest match that ends with it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.constrained import GrammarError
from plait.constrained.regex.incremental_search import MAX_EDGES, IncrementalSearch, search_automaton

PIECES = st.recursive(
    st.sampled_from(["a", "b", "[^a]", "(?i:B)", "."]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,3}?", "{2,}"])).map(
            lambda two: f"(?:{two[0]}){two[1]}"
        ),
    ),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None)
@given(PIECES, st.text("abB", max_size=7))
def test_each_character_tells_the_earliest_match_that_ends_with_it(pattern: str, text: str) -> None:
    if re.fullmatch(pattern, ""):
        with pytest.raises(GrammarError, match="empty text"):
            search_automaton(pattern)
        return
    search = IncrementalSearch(search_automaton(pattern))
    for end in range(1, len(text) + 1):
        starts = [start for start in range(end) if re.fullmatch(pattern, text[start:end])]
        assert search.step(text[end - 1], end - 1) == min(starts, default=None)


def test_a_counted_repeat_has_few_edges() -> None:
    assert search_automaton("a{0,200}b").num_edges < 4 * 200 < MAX_EDGES
    assert search_automaton("(?:){0,1000000}a").num_edges == 1


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("a$", "an anchor"),
        ("(?=a)b", "lookaround"),
        (r"(a)\1", "backreference"),
        ("a++", "possessive"),
        ("a(b", "missing"),
        ("a{300}", "more than 256 characters"),
        ("(?:a?b?c?d?e?f?g?h?){8}" * 4 + "x", f"more than {MAX_EDGES} edges"),
    ],
)
def test_others_are_refused(pattern: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        search_automaton(pattern)
