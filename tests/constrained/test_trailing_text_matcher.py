"""A value with text behind it, against a slow reference that tries every token and every split of the text."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matchers import allowed_tokens, compile_in_process

from plait.constrained import Choices, Ebnf, Grammar, JsonSchema, Lark, Matcher, Regex, Vocabulary, mask_words
from plait.constrained.specs import Spec
from plait.constrained.trailing_text_matcher import TrailingText, TrailingTextMatcher

WORDS = ["ab", "ba", "aa", "1.", ".1", "a.", "b,", '",', "11", " a", "a b", "}.", "ab,1", "é,", "yes", " yes", "s p"]
CHARACTERS = 'ab1.,{}":é -yesp'
TOKENS = (b"", b"</s>", *(bytes([byte]) for byte in sorted(set(CHARACTERS.encode()))), *(w.encode() for w in WORDS))
IDS = {token: number for number, token in enumerate(TOKENS)}


def encode(text: str) -> list[int]:
    data, ids = text.encode(), list[int]()
    while data:
        length = next(n for n in range(len(data), 0, -1) if data[:n] in IDS)
        ids.append(IDS[data[:length]])
        data = data[length:]
    return ids


VOCABULARY = Vocabulary(TOKENS, (1,), encode)
KINDS: dict[str, tuple[Spec, str]] = {
    "integer": (Regex("-?(?:0|[1-9][0-9]{0,3})"), "-?(?:0|[1-9][0-9]{0,3})"),
    "float": (Regex(r"(?:0|1{1,3})(?:\.1{1,3})?"), r"(?:0|1{1,3})(?:\.1{1,3})?"),
    "words": (Regex("[ab ]{1,6}"), "[ab ]{1,6}"),
    "quoted": (Regex('"[aby]{0,4}"'), '"[aby]{0,4}"'),
    "choices": (Choices(("a", "ab", "a b", "yes", "yes, a")), "a|ab|a b|yes|yes, a"),
    "json object": (JsonSchema({"type": "object", "properties": {"a": {"enum": ["b", "ab"]}}, "required": ["a"],
                                "additionalProperties": False}), r'\{"a": "(?:b|ab)"\}'),
    "ebnf": (Ebnf('root ::= "a" ("," "a"){0,2}'), "a(?:,a){0,2}"),
    "lark": (Lark('start: "a" ("." "a"){0,2}'), r"a(?:\.a){0,2}"),
}  # fmt: skip
SPELLED_FREELY = ("integer", "float", "words", "quoted", "choices")
GRAMMARS: dict[str, Grammar] = {name: compile_in_process(spec, VOCABULARY) for name, (spec, _) in KINDS.items()}
TEXTS = st.text(alphabet='ab1., é"', min_size=1, max_size=4)


def followed(kind: str, text: str) -> TrailingTextMatcher:
    return TrailingTextMatcher(GRAMMARS[kind].matcher(), TrailingText(text, VOCABULARY))


def can_begin(kind: str) -> Callable[[str], bool]:
    """Whether a text is a beginning of a value, by a matcher that takes one byte at a time."""

    def check(text: str) -> bool:
        matcher = GRAMMARS[kind].matcher()
        return all(matcher.accept(IDS[bytes([byte])]) for byte in text.encode())

    return check


def borders(tokens: list[int]) -> set[int]:
    """The bytes at which a value may end: behind a token, or within one behind a part that is a token too."""
    found, at = {0}, 0
    for data in (TOKENS[token] for token in tokens):
        found |= {at + length for length in range(1, len(data) + 1) if data[:length] in IDS}
        at += len(data)
    return found


def is_viable(kind: str, text: str, written: str, ends: set[int]) -> bool:
    """Whether `written` is a beginning of a value, which may end at `ends`, and the text behind it."""
    splits = (end for end in range(len(written) + 1) if text.startswith(written[end:]))
    if any(len(written[:end].encode()) in ends and re.fullmatch(KINDS[kind][1], written[:end]) for end in splits):
        return True
    return can_begin(kind)(written)


def spans_after_no_token(kind: str, text: str, written: str, token: str) -> bool:
    """Whether a token ends the value and begins the text, and its part of the value is no token. It is left out."""
    if can_begin(kind)(written + token):
        return False
    splits = [
        token[:end]
        for end in range(1, len(token))
        if text.startswith(token[end:]) and re.fullmatch(KINDS[kind][1], written + token[:end])
    ]
    return bool(splits) and all(part.encode() not in IDS for part in splits)


def text_of(tokens: list[int]) -> str:
    return b"".join(TOKENS[token] for token in tokens).decode(errors="replace")


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(sorted(KINDS)), text=TEXTS, seed=st.integers(0, 1000))
def test_the_mask_is_that_of_a_slow_reference(kind: str, text: str, seed: int) -> None:
    """Every token is tried at every step. What ends is value + text, and the value matches its constraint."""
    matcher, rng, tokens = followed(kind, text), random.Random(seed), list[int]()
    for _ in range(30):
        written = text_of(tokens)
        value = written.removesuffix(text)
        ends = borders(tokens)
        has_border = len(value.encode()) in ends and re.fullmatch(KINDS[kind][1], value) is not None
        is_whole = written.endswith(text) and has_border
        assert matcher.is_accepting == is_whole
        has_ended = is_whole and not matcher.may_end
        if "�" not in written:
            within_next = set(range(len(written.encode()), len(written.encode()) + 20))
            expected = {1} if is_whole else set[int]()
            if not has_ended:
                expected |= {
                    token
                    for token, data in enumerate(TOKENS)
                    if token > 1 and b"\xc3" not in data[-1:] and b"\xa9" not in data[:1]
                    and is_viable(kind, text, written + data.decode(), ends | within_next)
                }  # fmt: skip
            plain = {t for t in allowed_tokens(matcher, VOCABULARY) if TOKENS[t] not in (b"\xc3", b"\xa9")}
            assert plain <= expected, [TOKENS[token] for token in plain - expected]
            missing = {TOKENS[token] for token in expected - plain}
            if kind in SPELLED_FREELY:  # the others may leave out tokens where the tokenizer would spell otherwise
                assert not [data for data in missing if not spans_after_no_token(kind, text, written, data.decode())]
        choices = [token for token in allowed_tokens(matcher, VOCABULARY) if token != 1]
        if has_ended or not choices:
            break
        token = rng.choice(choices)
        assert matcher.accept(token)
        tokens.append(token)
    assert matcher.is_accepting or len(tokens) == 30


def snapshot(matcher: TrailingTextMatcher) -> tuple[bytes, bytes, bool, bool, int]:
    row = np.zeros(mask_words(len(VOCABULARY)), np.int32)
    matcher.fill_mask(row)
    return row.tobytes(), matcher.forced_bytes(), matcher.is_accepting, matcher.may_end, matcher.num_trailing_bytes


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(sorted(KINDS)), text=TEXTS, seed=st.integers(0, 1000))
def test_rollback_forced_tokens_and_completions(kind: str, text: str, seed: int) -> None:
    matcher, rng = followed(kind, text), random.Random(seed)
    snapshots, tokens = [snapshot(matcher)], list[int]()
    for _ in range(20):
        plan = matcher.completion(12)
        assert plan is not None
        assert all(map(matcher.accept, plan)) and matcher.is_accepting
        matcher.rollback(len(plan))
        forced = matcher.forced_tokens()
        assert all(map(matcher.accept, forced))
        matcher.rollback(len(forced))
        assert snapshot(matcher) == snapshots[-1]
        allowed = allowed_tokens(matcher, VOCABULARY)
        for token in range(-1, len(TOKENS) + 1):
            if token not in allowed and not matcher.accept(token):
                assert snapshot(matcher) == snapshots[-1]
            elif token not in allowed:
                matcher.rollback(1)
        choices = [token for token in allowed if token != 1]
        if not choices:
            break
        tokens.append(rng.choice(choices))
        assert matcher.accept(tokens[-1])
        snapshots.append(snapshot(matcher))
    n = rng.randrange(len(snapshots))
    matcher.rollback(n)
    assert snapshot(matcher) == snapshots[len(snapshots) - 1 - n]
    with pytest.raises(ValueError, match="cannot roll back"):
        matcher.rollback(len(snapshots) + 1)


@pytest.mark.parametrize(
    ("kind", "text", "spelled", "held", "may_end"),
    [
        ("integer", " a", [b"1"], 0, False),
        ("integer", " a", [b"1", b" a"], 2, False),
        ("integer", "1.", [b"1", b"1."], 2, False),  # the text begins with what could extend the value
        ("float", ".", [b"1."], 1, True),  # "1" ended before ".", or goes on as "1.1"
        ("float", ".", [b"1", b".1"], 0, False),
        ("words", "a", [b"b", b"a"], 1, False),  # the value could end here as well, so it has ended before
        ("quoted", ",", [b'"', b"a", b'",'], 1, False),  # a token spans the border
        ("choices", ", a", [b"yes", b",", b" a"], 3, False),
    ],
)
def test_what_may_belong_to_the_text_is_held(
    kind: str, text: str, spelled: list[bytes], held: int, may_end: bool
) -> None:
    matcher = followed(kind, text)
    assert all(matcher.accept(IDS[data]) for data in spelled)
    assert (matcher.num_trailing_bytes, matcher.may_end) == (held, may_end)


def test_the_rest_of_the_text_is_forced() -> None:
    matcher: Matcher = followed("integer", " ab, a")
    assert matcher.accept(IDS[b"1"]) and matcher.forced_tokens() == []
    assert matcher.accept(IDS[b" a"])
    assert matcher.forced_bytes() == b"b, a"
    assert [TOKENS[token] for token in matcher.forced_tokens()] == [b"b,", b" a"]
