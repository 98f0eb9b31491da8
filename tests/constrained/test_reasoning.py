"""Reasoning before a value: any text up to the end mark, then the constraint, over tokens that cross their borders."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matchers import allowed_tokens

from plait.constrained import Choices, Grammar, GrammarError, Matcher, Reasoning, Regex, Vocabulary
from plait.constrained.compiler import build_grammar, compile_spec
from plait.constrained.reasoning_matcher import ReasoningGrammar

WORDS = ["</", "t>", "</t", "</t>", ">a", "t>\n", ">\n\n", "\n\n", "<t>", "a<", "<<", "\na", ">\n\na", "é", "ab", "yes"]
CHARACTERS = "abt<>/\n yesno"
TOKENS = (b"", b"</s>", b"\xc3", b"\xa9", b"<</t>", *(bytes([byte]) for byte in sorted(set(CHARACTERS.encode()))),
          *(word.encode() for word in WORDS))  # fmt: skip
IDS = {token: number for number, token in enumerate(TOKENS)}
EOS = 1


def encode(text: str) -> list[int]:
    data, ids = text.encode(), list[int]()
    while data:
        length = next((n for n in range(len(data), 0, -1) if data[:n] in IDS), 0)
        ids += [IDS[data[:length]]] if length else []
        data = data[max(1, length) :]
    return ids


VOCABULARY = Vocabulary(TOKENS, (EOS,), encode)
VALUE = Choices(("yes", "no", "yes no"))
MARKS = [("<t>", "</t>", "\n\n"), ("", "</t>", ""), ("", "<</", "\n"), ("<t>\n", "aab", ""), ("", "\n", "ab")]


def grammar(marks: tuple[str, str, str], max_tokens: int | None = None) -> Grammar:
    inner = build_grammar(compile_spec(VALUE, VOCABULARY), VOCABULARY)
    return ReasoningGrammar(Reasoning(VALUE, *marks, max_tokens), inner, VOCABULARY)


def mask_of(matcher: Matcher) -> set[int]:
    return set(allowed_tokens(matcher, VOCABULARY))


def text_of(tokens: list[int]) -> bytes:
    return b"".join(TOKENS[token] for token in tokens if token != EOS)


def split(text: bytes, marks: tuple[str, str, str]) -> tuple[bytes, bytes, bytes]:
    """(reasoning, what follows the end mark, value), by searching the text."""
    begin, end, separator = (mark.encode() for mark in marks)
    assert text.startswith(begin)
    reasoning, mark, rest = text[len(begin) :].partition(end)
    assert mark, text
    assert rest.startswith(separator)
    return reasoning, rest, rest[len(separator) :]


@pytest.mark.parametrize("marks", MARKS)
@given(seed=st.integers(0, 1 << 20), max_tokens=st.one_of(st.none(), st.integers(0, 6)))
@settings(max_examples=60, deadline=None)
def test_every_text_sampled_under_the_mask_is_reasoning_and_a_value(
    marks: tuple[str, str, str], seed: int, max_tokens: int | None
) -> None:
    matcher, rng, tokens = grammar(marks, max_tokens).matcher(), random.Random(seed), list[int]()
    for _ in range(400):
        allowed = mask_of(matcher)
        assert allowed, text_of(tokens)
        token = rng.choice(sorted(allowed))
        assert matcher.accept(token), (token, text_of(tokens))
        tokens.append(token)
        if token == EOS:
            break
    else:
        assert max_tokens is None  # the model need not end its reasoning
        completion = matcher.completion(20)
        assert completion is not None
        tokens += completion
    _, _, value = split(text_of(tokens), marks)
    assert value.decode() in VALUE.choices
    assert matcher.num_reasoning_tokens <= len(tokens)
    if max_tokens is not None:
        num_marks = sum(len(encode(mark)) for mark in marks) + 12  # a mark may be spelled byte by byte
        assert matcher.num_reasoning_tokens <= max_tokens + 3 + num_marks


@pytest.mark.parametrize("marks", MARKS)
@given(tokens=st.lists(st.integers(0, len(TOKENS) - 1), max_size=12))
@settings(max_examples=150, deadline=None)
def test_the_mask_of_reasoning_is_what_a_search_of_the_text_allows(
    marks: tuple[str, str, str], tokens: list[int]
) -> None:
    begin, end, separator = (mark.encode() for mark in marks)
    matcher, written = grammar(marks).matcher(), begin
    for token in matcher.forced_tokens() if begin else []:
        assert matcher.accept(token)
    for token in tokens:
        allowed = mask_of(matcher)
        for candidate, data in enumerate(TOKENS):
            _, mark, rest = (written + data)[len(begin) :].partition(end)
            is_reasoning = bool(data) and candidate != EOS and (not mark or separator.startswith(rest))
            assert (candidate in allowed) == is_reasoning, (written, data)
        if token not in allowed:
            assert not matcher.accept(token)
            continue
        assert matcher.accept(token)
        written += TOKENS[token]
        if end in written[len(begin) :]:
            assert matcher.is_reasoning == (not written.endswith(end + separator))
            break
        assert matcher.is_reasoning and not matcher.is_accepting


@given(seed=st.integers(0, 1 << 20), back=st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_rollback_returns_to_the_same_state(seed: int, back: int) -> None:
    marks = MARKS[0]
    matcher, rng, tokens = grammar(marks, 4).matcher(), random.Random(seed), list[int]()
    while not matcher.is_terminated:
        tokens.append(rng.choice(sorted(mask_of(matcher))))
        assert matcher.accept(tokens[-1])
    back = min(back, len(tokens))
    matcher.rollback(back)
    fresh = grammar(marks, 4).matcher()
    for token in tokens[: len(tokens) - back]:
        assert fresh.accept(token)
    assert mask_of(matcher) == mask_of(fresh)
    assert matcher.forced_tokens() == fresh.forced_tokens()
    assert matcher.num_reasoning_tokens == fresh.num_reasoning_tokens
    with pytest.raises(ValueError, match="roll back"):
        matcher.rollback(len(tokens) + 1)


def test_a_spent_budget_forces_the_rest_of_a_mark_that_has_begun() -> None:
    matcher = grammar(MARKS[0], 2).matcher()
    for token in (IDS[b"<t>"], IDS[b"ab"], IDS[b"</"]):
        assert matcher.accept(token)
    assert matcher.forced_bytes() == b"t>\n\n"
    assert text_of(matcher.forced_tokens()) == b"t>\n\n"
    assert not matcher.accept(IDS[b"a"])
    for token in matcher.forced_tokens():
        assert matcher.accept(token)
    assert not matcher.is_reasoning and matcher.num_reasoning_tokens == 5


def test_a_character_is_completed_before_a_spent_budget_ends_the_reasoning() -> None:
    matcher = grammar(MARKS[1], 1).matcher()
    assert matcher.accept(IDS[b"\xc3"]) and matcher.forced_bytes() == b""
    assert matcher.accept(IDS[b"\xa9"]) and matcher.forced_bytes() == b"</t>"


def test_the_completion_ends_the_reasoning_and_fits() -> None:
    matcher = grammar(MARKS[0]).matcher()
    plan = matcher.completion(10)
    assert plan is not None and text_of(plan) == b"<t></t>\n\nyes"
    assert matcher.completion(len(plan)) == plan
    assert matcher.completion(len(plan) - 1) is None


def test_marks_that_no_token_spells_are_refused() -> None:
    with pytest.raises(GrammarError, match="no tokens of the vocabulary spell 'xyz'"):
        grammar(("", "xyz", ""))


def test_specs_out_of_range_are_refused() -> None:
    with pytest.raises(GrammarError, match="end is empty"):
        Reasoning(VALUE, end="")
    with pytest.raises(GrammarError, match="max_tokens"):
        Reasoning(VALUE, max_tokens=-1)
    with pytest.raises(GrammarError, match="without reasoning"):
        Reasoning(Reasoning(Regex("a")))  # type: ignore[arg-type]
