"""What holds for every matcher: refusals change nothing, going back is exact, and after the end come ends only."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.constrained import Choices, Grammar, GrammarError, Matcher, Regex, Vocabulary, compile_grammar, mask_words
from plait.constrained.compiler import build_grammar, compile_spec
from plait.constrained.guidance.llguidance_grammar import LlguidanceGrammar, regex_source
from plait.constrained.specs import MAX_PATTERN_BYTES, Spec


def grammars(vocabulary: Vocabulary) -> list[Grammar]:
    specs: list[Spec] = [Regex("(ab|a)*1?"), Choices(("yes", "yes please", "ab")), Regex("ab{1,3}(é|日本)")]
    lazy = [
        LlguidanceGrammar(regex_source(text, vocabulary), vocabulary) for text in ("(?:ab|a)*1?", "ab{1,3}(?:é|日本)")
    ]
    return [build_grammar(compile_spec(spec, vocabulary), vocabulary) for spec in specs] + lazy


def snapshot(matcher: Matcher, width: int) -> tuple[bytes, bytes, bool, bool]:
    row = np.zeros(mask_words(width), np.int32)
    matcher.fill_mask(row)
    return row.tobytes(), matcher.forced_bytes(), matcher.is_accepting, matcher.is_terminated


def allowed(matcher: Matcher, width: int) -> list[int]:
    bits = np.unpackbits(np.frombuffer(snapshot(matcher, width)[0], np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("seed", range(4))
def test_rollback_is_exact_and_refusals_change_nothing(small: Vocabulary, which: int, seed: int) -> None:
    width, rng = len(small), random.Random(seed)
    matcher = grammars(small)[which].matcher()
    seen = [snapshot(matcher, width)]
    for _ in range(40):
        if rng.random() < 0.3 and len(seen) > 1:
            n = rng.randrange(len(seen))
            matcher.rollback(n)
            del seen[len(seen) - n :]
        else:
            for token in (rng.randrange(width), -1, width, width + 10**12):
                if token not in allowed(matcher, width) and not matcher.accept(token):
                    assert snapshot(matcher, width) == seen[-1]
                    continue
                if token not in range(width) or token not in allowed(matcher, width):
                    seen.append(snapshot(matcher, width))
            token = rng.choice(allowed(matcher, width))
            assert matcher.accept(token)
            seen.append(snapshot(matcher, width))
        assert snapshot(matcher, width) == seen[-1]
    with pytest.raises(ValueError, match="cannot roll back"):
        matcher.rollback(len(seen))
    matcher.rollback(len(seen) - 1)
    assert snapshot(matcher, width) == seen[0]


@pytest.mark.parametrize("which", range(5))
def test_after_the_end_only_ends(small: Vocabulary, which: int) -> None:
    grammar, width = grammars(small)[which], len(small)
    matcher, rng = grammar.matcher(), random.Random(which)
    while not matcher.is_accepting:
        assert not matcher.accept(small.eos_ids[0])
        matcher.accept(rng.choice(allowed(matcher, width)))
    before = snapshot(matcher, width)
    assert set(small.eos_ids) <= set(allowed(matcher, width))
    assert matcher.accept(small.eos_ids[1])
    assert matcher.is_terminated
    assert matcher.is_accepting
    assert allowed(matcher, width) == list(small.eos_ids)
    assert matcher.forced_bytes() == b""
    assert not matcher.accept(small.token_bytes.index(b"a"))
    assert matcher.accept(small.eos_ids[0])
    matcher.rollback(2)
    assert snapshot(matcher, width) == before
    assert not grammar.matcher().is_terminated


def test_an_empty_match_may_end_at_once(small: Vocabulary) -> None:
    matcher = build_grammar(compile_spec(Regex("a*"), small), small).matcher()
    assert matcher.is_accepting
    assert matcher.forced_bytes() == b""
    assert matcher.accept(small.eos_ids[0])


def test_a_lexer_at_its_limit_ends_that_text_only(smollm: Vocabulary) -> None:
    grammar = LlguidanceGrammar(regex_source("(?:(?:a){1,1000}){1,1000}", smollm), smollm)
    neighbour, token = grammar.matcher(), smollm.token_bytes.index(b"aa")
    assert neighbour.accept(token)
    row = np.zeros(mask_words(len(smollm)), np.int32)

    def run_on(matcher: Matcher) -> None:
        for _ in range(2000):
            matcher.fill_mask(row)
            assert matcher.accept(token)

    with pytest.raises(GrammarError):
        run_on(grammar.matcher())
    neighbour.fill_mask(row)
    assert neighbour.accept(token)
    fresh = grammar.matcher()
    fresh.fill_mask(row)
    assert fresh.accept(token)


words = st.text(alphabet="ab1é日 ", min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(choices=st.lists(words, min_size=1, max_size=8, unique=True), seed=st.integers(0, 1000))
def test_choices_are_exactly_the_choices(small: Vocabulary, choices: list[str], seed: int) -> None:
    texts, rng = [choice.encode() for choice in choices], random.Random(seed)
    matcher, text = compile_grammar(Choices(tuple(choices)), small).matcher(), b""
    while True:
        going_on = [other for other in texts if other.startswith(text)]
        expected = [
            token
            for token, piece in enumerate(small.token_bytes)
            if (text in texts if token in small.eos_ids else piece and any(o.startswith(text + piece) for o in texts))
        ]
        assert allowed(matcher, len(small)) == expected
        low, high = min(going_on), max(going_on)
        shared = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
        common = low[len(text) : shared]
        assert matcher.forced_bytes() == (b"" if text in texts else common)
        token = rng.choice(expected)
        assert matcher.accept(token)
        if matcher.is_terminated:
            assert text in texts
            return
        text += small.token_bytes[token]


def test_choices_may_come_as_a_list() -> None:
    assert Choices(["a", "b"]) == Choices(("a", "b"))  # type: ignore[arg-type]


def test_a_choice_that_cannot_be_spelled_is_named(small: Vocabulary) -> None:
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
        (lambda: Regex("a" * (MAX_PATTERN_BYTES + 1)), None),
        (lambda: Regex("ab\udc00"), 2),
        (lambda: Regex(5), None),
    ],
)
def test_limits_are_checked_on_entry(make: object, where: int | None) -> None:
    with pytest.raises(GrammarError) as caught:
        make()  # type: ignore[operator]
    assert caught.value.where == where


@pytest.mark.parametrize(
    ("pattern", "where", "reason"),
    [
        ("ab[c", 2, "unterminated"),
        ("a(b", 1, "missing"),
        ("a{2,1}", 2, "repeat"),
        ("*a", 0, "nothing to repeat"),
        (r"a\p{L}", 1, "escape"),
        ("x(?=a)b", 1, "lookaround"),
        (r"[(?=]\((?<!a)b", 7, "lookaround"),
        (r"(a)\1", 3, "backreference"),
        ("(?P<n>a)(?P=n)", 8, "backreference"),
        ("(a)?(?(1)b|c)", 4, "conditional"),
        ("a(?>b)", 1, "atomic"),
        ("ab*+", 2, "possessive"),
        (r"\ba", 0, "word boundary"),
        ("a^b", 1, "start of the pattern"),
        ("a$b", 1, "end of the pattern"),
        ("(^a)*", 1, "start of the pattern"),
        ("a{9999999}", None, "too large"),
        ("(" * 5000 + ")" * 5000, None, "nested"),
        ("a\U0010ffff", 1, "cannot occur"),
    ],
)
def test_what_is_refused_is_refused_by_name_and_place(
    small: Vocabulary, pattern: str, where: int | None, reason: str
) -> None:
    with pytest.raises(GrammarError, match=reason) as caught:
        compile_spec(Regex(pattern), small)
    assert caught.value.where == where
