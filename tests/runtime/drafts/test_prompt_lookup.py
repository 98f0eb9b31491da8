"""Prompt lookup: which match is found, and how it is followed."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from plait.runtime.drafts import prompt_lookup
from plait.runtime.drafts.prompt_lookup import MAX_NGRAM, PromptLookup, find_ngram_match
from plait.runtime.drafts.proposer import Guess

# Token ids whose bytes look like those of other ids at a misaligned offset.
ids = st.sampled_from([0, 1, 256, 65536, 1 << 24])


def array(tokens):
    return np.array(tokens, dtype=np.int32)


@given(st.lists(st.integers(0, 2), max_size=60) | st.lists(ids, max_size=40))
@example([1, 65536, 1, 65536])
@example([256, 0, 1, 256, 0])
def test_the_latest_of_the_longest_matches_is_found(tokens):
    expected = 0, 0
    for at in range(1, len(tokens)):
        length = 0
        while length < min(at, MAX_NGRAM) and tokens[at - 1 - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        if length and length >= expected[1]:
            expected = at, length
    assert find_ngram_match(array(tokens)) == expected


def test_matches_beyond_the_lookback_are_not_found(monkeypatch):
    monkeypatch.setattr(prompt_lookup, "LOOKBACK_TOKENS", 20)
    tokens = array([7, 8, *range(10, 27), 8])
    assert find_ngram_match(tokens) == (2, 1)
    assert find_ngram_match(np.insert(tokens, 10, [1, 2])) == (0, 0)
    assert find_ngram_match(np.insert(tokens, 0, [1, 2])) == (4, 1)


def guesses_along(text, proposer, count):
    """Guesses that follow each other, each appended to the text."""
    text, found = list(text), []
    for _ in range(count):
        found += proposer.guesses(array(text), 0)
        text.append(found[-1].token)
    return found


def test_guesses_repeat_the_text_behind_the_match_and_beyond_its_own_end():
    guesses = guesses_along([7, 8, 1, 2, 3, 7, 8], PromptLookup(), 8)
    assert [guess.token for guess in guesses] == [1, 2, 3, 7, 8, 1, 2, 3]
    assert [guess.level for guess in guesses] == [1, 2, 3, 4, 5, 5, 5, 5]


def test_a_long_match_is_followed_without_a_search(monkeypatch):
    searches, search = [], prompt_lookup.find_ngram_match
    monkeypatch.setattr(prompt_lookup, "find_ngram_match", lambda text: searches.append(len(text)) or search(text))
    proposer, text = PromptLookup(), [*range(100), *range(6)]
    guesses_along(text, proposer, 20)
    assert searches == [106]
    assert proposer.guesses(array([*text, 50]), 0) == [Guess(51, 0)]  # the draft was refused
    assert searches == [106, 107]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=4))
def test_a_followed_match_is_as_long_as_the_longest(parts):
    """Whatever texts a proposer saw before, its guess follows a match of the greatest length."""
    proposer = PromptLookup()
    for number in range(len(parts)):
        text = [token for part in parts[: number + 1] for token in part] * 2
        end, length = find_ngram_match(array(text))
        guesses = proposer.guesses(array(text), 0)
        assert [guess.level for guess in guesses] == [length - 1] * bool(length)
        if length:
            distance = len(text) - next(
                at
                for at in range(end, 0, -1)
                if text[max(0, at - length) : at] == text[-length:] and text[at] == guesses[0].token
            )
            assert distance > 0
