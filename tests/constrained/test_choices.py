"""Choices: masks and forced bytes follow the listed texts; invalid lists raise."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matchers import allowed_tokens

from plait.constrained import Choices, GrammarError, Vocabulary, compile_grammar

choice_texts = st.text(alphabet="ab1é日 ", min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(choices=st.lists(choice_texts, min_size=1, max_size=8, unique=True), seed=st.integers(0, 1000))
def test_only_the_listed_texts_are_accepted_and_common_bytes_are_forced(
    small: Vocabulary, choices: list[str], seed: int
) -> None:
    texts, rng = [choice.encode() for choice in choices], random.Random(seed)
    matcher, text = compile_grammar(Choices(tuple(choices)), small).matcher(), b""
    while True:
        continuations = [other for other in texts if other.startswith(text)]
        expected = [
            token
            for token, piece in enumerate(small.token_bytes)
            if (text in texts if token in small.eos_ids else piece and any(o.startswith(text + piece) for o in texts))
        ]
        assert allowed_tokens(matcher, small) == expected
        low, high = min(continuations), max(continuations)
        shared = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
        common = low[len(text) : shared]
        assert matcher.forced_bytes() == (b"" if text in texts else common)
        token = rng.choice(expected)
        assert matcher.accept(token)
        if matcher.is_terminated:
            assert text in texts
            return
        text += small.token_bytes[token]


def test_choices_accepts_a_list() -> None:
    assert Choices(["a", "b"]) == Choices(("a", "b"))  # type: ignore[arg-type]


def test_a_choice_that_the_vocabulary_cannot_spell_raises_with_its_index(small: Vocabulary) -> None:
    with pytest.raises(GrammarError, match="cannot spell") as caught:
        compile_grammar(Choices(("yes", "no", "a~b")), small)
    assert caught.value.where == 2


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda: Choices(()), None),
        (lambda: Choices(("a", "")), 1),
        (lambda: Choices(("a", "b", "a")), 2),
        (lambda: Choices(("a", "\ud800")), 1),
        (lambda: Choices(("a", 5)), 1),
        (lambda: Choices({"a"}), None),
        (lambda: Choices(tuple(map(str, range(10_001)))), None),
        (lambda: Choices(("a" * (1 << 19), "b" * (1 << 19), "c")), 2),
    ],
)
def test_invalid_choices_raise_with_the_index(make: object, where: int | None) -> None:
    with pytest.raises(GrammarError) as caught:
        make()  # type: ignore[operator]
    assert caught.value.where == where
