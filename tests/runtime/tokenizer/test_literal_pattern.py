"""The pattern of many texts: it finds what alternatives would find, without trying them one by one."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from plait.runtime.tokenizer.literal_pattern import MAX_DEPTH, literal_pattern

TEXTS = st.text(alphabet="ab<>|.(\n", max_size=6)


def widest_branch(tree: Any) -> int:
    """The largest number of alternatives at one place of a parsed pattern."""
    width = 1
    for operation, argument in tree:
        values = list(argument) if isinstance(argument, tuple | list) else [argument]
        for value in values:
            branches = value if isinstance(value, list) else [value]
            parsed = [branch for branch in branches if hasattr(branch, "data")]
            width = max([width, *map(widest_branch, parsed)])
            if str(operation) == "BRANCH" and isinstance(value, list):
                width = max(width, len(parsed))
    return width


@given(st.lists(TEXTS, max_size=12), st.text(alphabet="ab<>|.(\n", max_size=60))
def test_it_finds_the_longest_text_at_every_place(texts: list[str], searched: str) -> None:
    pattern = literal_pattern(texts)
    longest_first = sorted({text for text in texts if text}, key=len, reverse=True)
    if pattern is None:
        assert not longest_first
        return
    alternatives = re.compile("|".join(map(re.escape, longest_first)))
    assert [m.span() for m in pattern.finditer(searched)] == [m.span() for m in alternatives.finditer(searched)]


def test_thousands_of_texts_are_few_alternatives_at_any_place() -> None:
    texts = [f"<unused{number}>" for number in range(6242)] + ["<start_of_turn>", "<end_of_turn>", "\n\n", "\n\n\n"]
    pattern = literal_pattern(texts)
    assert pattern is not None and all(pattern.fullmatch(text) for text in texts)
    assert pattern.fullmatch("<unused6242>") is None
    assert widest_branch(re._parser.parse(pattern.pattern)) <= 12  # type: ignore[attr-defined]
    assert widest_branch(re._parser.parse("|".join(map(re.escape, texts)))) > 6000  # type: ignore[attr-defined]


def test_texts_that_begin_with_each_other_nest_up_to_a_limit() -> None:
    texts = ["ab" * length for length in range(1, 20 * MAX_DEPTH)]
    pattern = literal_pattern(texts)
    assert pattern is not None
    match = pattern.match("ab" * 300 + "c")
    assert match is not None and len(match[0]) == 600
