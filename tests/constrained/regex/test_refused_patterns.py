"""Patterns that are refused, with the position and the reason of the error."""

from __future__ import annotations

import pytest

from plait.constrained import GrammarError, Regex, Vocabulary
from plait.constrained.compiler import compile_spec
from plait.constrained.specs import MAX_PATTERN_BYTES


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda: Regex("a" * (MAX_PATTERN_BYTES + 1)), None),
        (lambda: Regex("ab\udc00"), 2),
        (lambda: Regex(5), None),
    ],
)
def test_invalid_arguments_of_regex_raise_when_the_spec_is_made(make: object, where: int | None) -> None:
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
        ("x(?=a)b", None, "no text"),
        (r"a(?<=(?=b)a)", 1, "lookahead within lookbehind"),
        (r"a(?<=(?:(?!b)a|c))", 1, "lookahead within lookbehind"),
        (r"x(?<=a*)", 1, "fixed-width"),
        (r"x(?<=a$)", 1, r"\$ or lookahead within lookbehind"),
        (r"(?=a)(a)\1", 8, "backreference"),
        (r"\B", 0, "empty text"),
        (r"(?=.*(a|b).{12}c)[ab].*", 0, "too many states"),
        (r"(a)\1", 3, "backreference"),
        ("(?P<n>a)(?P=n)", 8, "backreference"),
        ("(a)?(?(1)b|c)", 4, "conditional"),
        ("a(?>b)", 1, "atomic"),
        ("ab*+", 2, "possessive"),
        ("a^b", None, "no text"),
        ("(?m)a^b", 5, "start of the pattern"),
        ("a{9999999}", None, "too large"),
        ("(" * 5000 + ")" * 5000, None, "nested"),
        ("a\U0010ffff", 1, "cannot occur"),
    ],
)
def test_an_unsupported_pattern_raises_with_position_and_reason(
    small: Vocabulary, pattern: str, where: int | None, reason: str
) -> None:
    with pytest.raises(GrammarError, match=reason) as caught:
        compile_spec(Regex(pattern), small)
    assert caught.value.where == where
