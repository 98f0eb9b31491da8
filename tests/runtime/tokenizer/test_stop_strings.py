"""The stop scanner compared with str.find for strings and with re at every position for patterns."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from plait.runtime.tokenizer.stop_strings import StopScanner

word = st.text("ab", min_size=1, max_size=6)


@given(st.lists(word, max_size=4, unique=True), st.lists(st.text("ab", max_size=4), max_size=12))
def test_the_stop_string_completed_first_matches(stops, pieces):
    scanner, text, hit = StopScanner(tuple(stops)), "", None
    for piece in pieces:
        hit = scanner.push(piece.encode())
        text += piece
        if hit is not None:
            break
        longest = max(
            (n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0
        )  # the longest end of the text that may become a stop string
        assert scanner.num_safe == len(text) - longest
    ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if not ends:
        assert hit is None
    else:
        assert hit is not None
        _, start, stop = min(ends)
        assert (hit.start, hit.text) == (start, stop)


pattern = st.recursive(
    st.sampled_from(["a", "b", "[^a]", ".", "é", r"\w", "(?i:B)"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["+", "?", "*", "{2}", "{1,3}", "{2,}", "*?"])).map(
            lambda two: f"(?:{two[0]}){two[1]}"
        ),
    ),
    max_leaves=6,
)


def first_match(patterns, text):
    """Returns (start, pattern) of the match that ends first; of several, the one that begins first."""
    for end in range(1, len(text) + 1):
        matches = [(start, regex) for start in range(end) for regex in patterns if re.fullmatch(regex, text[start:end])]
        if matches:
            return min(matches)
    return None


@given(st.lists(pattern, min_size=1, max_size=2, unique=True), st.text("abBé\n", max_size=12), st.data())
def test_the_pattern_match_completed_first_is_found(patterns, text, data):
    if any(re.fullmatch(regex, "") for regex in patterns):
        return
    scanner, data_bytes, num_safe = StopScanner((), tuple(patterns)), text.encode(), 0
    expected = first_match(patterns, text)
    end = len(data_bytes) if expected is None else len(text[: expected[0]].encode())
    hit, offset = None, 0
    while offset < len(data_bytes) and hit is None:
        size = data.draw(st.integers(1, 4))
        hit = scanner.push(data_bytes[offset : offset + size])  # pieces may end inside a character
        offset += size
        if hit is None:
            assert num_safe <= scanner.num_safe <= end, "num_safe never decreases and never reaches into a match"
            num_safe = scanner.num_safe
    assert (None if hit is None else (hit.start, hit.text)) == (None if expected is None else (end, expected[1]))


def test_of_a_string_and_a_pattern_the_one_completed_first_matches():
    for size in (1, 3, 100):
        data = b"one 12 END 345;"
        for stops, patterns, expected in (
            (("END",), ("[0-9]+;",), ("END", 7)),
            (("5;",), ("[0-9]{2}",), ("[0-9]{2}", 4)),
            (("END",), (" E",), (" E", 6)),
            (("2 EN",), ("[0-9]+ EN",), ("[0-9]+ EN", 4)),
        ):
            scanner = StopScanner(stops, patterns)
            hits = [hit for at in range(0, len(data), size) if (hit := scanner.push(data[at : at + size]))]
            assert hits[0] == (expected[0], expected[1]), (size, stops, patterns)


def test_of_matches_that_end_together_the_one_that_begins_first_is_reported():
    for pattern, text, start in (("(?:ab?|b)c", "abc", 0), ("(?:b|ab)c", "xabc", 1), ("(?:b?|ab)+c", "babc", 0)):
        hit = StopScanner((), (pattern,)).push(text.encode())
        assert hit is not None and hit.start == start == first_match([pattern], text)[0]


def test_invalid_bytes_match_as_the_replacement_character():
    scanner = StopScanner((), ("\ufffdx",))
    assert scanner.push(b"ab\xe2\x82") is None and scanner.num_safe == 2
    hit = scanner.push(b"x")
    assert hit is not None and hit.start == 2
