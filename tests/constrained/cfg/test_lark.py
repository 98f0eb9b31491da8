"""Lark grammars: accepted texts, and the position of errors."""

from __future__ import annotations

import re

import pytest
from byte_grammars import accepts, refusal

from plait.constrained import Lark


def test_accepted_texts() -> None:
    grammar = Lark('start: "(" start ")" | NUMBER ("," NUMBER)*\nNUMBER: /[0-9]+/')
    assert accepts(grammar, "12,3", "((1))", "(1", "", "1,") == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("grammar", "where", "reason"),
    [
        ("start: <|im_end|>", 7, "control token"),
        ("start: <[256]>", 7, "control token"),
        ('start: %json {"type": "object"}', 7, "%json"),
        ('%llguidance {}\nstart: "a"', 0, "%llguidance"),
        ("start: @other", 7, "references to other grammars"),
        ('start[temperature=3]: "a"', 5, "temperature is not supported; known are capture, lazy, max_tokens"),
        ('start[lazy, temperature=3]: "a"', 5, "temperature"),
        ('start: a\na[max_tokens=3, capture]: "a"', 10, "both capture and max_tokens"),
        ('start: a\na[capture="x", max_tokens=3]: "a"', 10, "both capture and max_tokens"),
        ('start: a\na[capture="x]", max_tokens=3]: "a"', 10, "both capture and max_tokens"),
        ('start: a\na[capture="x\\"]", temperature=0.5]: "a"', 10, "attribute temperature is not supported"),
        ('start[max_tokens=-1]: "a"', 19, "unsigned integer"),
        ('start: a b\na[max_tokens=3]: "a"\nb[capture]: "b"', 33, "both capture and max_tokens"),
        ('start: a b\na[max_tokens=3]: b\nb: "b"', 28, "unknown name"),
        ("start: nothing", 7, "unknown name"),
        ('rule: "a"', None, "start"),
        ("start: s\ns: s", None, "can be written|infinite|rule|start"),
    ],
)
def test_errors_have_a_position(grammar: str, where: int | None, reason: str) -> None:
    error = refusal(Lark(grammar))
    assert re.search(reason, error.reason)
    assert error.where == where


@pytest.mark.parametrize(
    ("body", "allowed", "refused"),
    [
        ("/[a-z]+/", ["a", "ab", "abc"], ["", "abcd"]),
        ("LETTER+", ["a", "ab", "abc"], ["", "abcd"]),
        ('("ab" | "c")+', ["c", "ab", "abc", "cab", "ccc"], ["a", "abca", "abab"]),
        ('/[a-z]+/ "."', ["a.", "ab.", "abc"], ["a", "ab", "abc.", "abcd"]),  # "abc" is cut off
    ],
)
def test_a_rule_ends_after_max_tokens(body: str, allowed: list[str], refused: list[str]) -> None:
    """The tokens are bytes. The budget counts anew at each use of the rule."""
    grammar = Lark(f'start: "<<" word "> " word ">"\nword[max_tokens=3]: {body}\nLETTER: /[a-z]/')
    for first in [*allowed, *refused]:
        for second in [*allowed, *refused]:
            is_allowed = first in allowed and second in allowed
            assert accepts(grammar, f"<<{first}> {second}>") == [is_allowed], (first, second)
