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
        ('start[max_tokens=3]: "a"', 5, "max_tokens"),
        ("start: nothing", 7, "unknown name"),
        ('rule: "a"', None, "start"),
        ("start: s\ns: s", None, "can be written|infinite|rule|start"),
    ],
)
def test_errors_have_a_position(grammar: str, where: int | None, reason: str) -> None:
    error = refusal(Lark(grammar))
    assert re.search(reason, error.reason)
    assert error.where == where
