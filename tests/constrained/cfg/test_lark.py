"""Lark grammars: accepted texts, and the position of errors."""

from __future__ import annotations

import re

import pytest
from byte_grammars import accepts, refusal

from plait.constrained import GrammarError, Lark
from plait.constrained.cfg.lark_depth import MAX_DEPTH, check_depth


def test_accepted_texts() -> None:
    grammar = Lark('start: "(" start ")" | NUMBER ("," NUMBER)*\nNUMBER: /[0-9]+/')
    assert accepts(grammar, "12,3", "((1))", "(1", "", "1,") == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("grammar", "where", "reason"),
    [
        ("start: <|im_end|>", 7, "control token"),
        ("start: <[256]>", 7, "control token"),
        ('start: %other {"a": 1}', 7, "%other"),
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
        ('start: a b\na[max_tokens=3]: b\nb: "b"', 28, "b is a rule"),
        ("start: nothing", 7, "no rule or terminal is named nothing"),
        ('start: "a" NUMBER', 11, "no terminal is named NUMBER"),
        (
            'start: A\nA: "a" b\nb: "c"',
            16,
            "b is a rule; terminals, and rules with max_tokens, refer to terminals only",
        ),
        ('start: "a', 7, "not closed"),
        ('start: "\\q"', 7, "escape that JSON does not know"),
        ("start: 'a'", 7, "double quotes"),
        ('start: "a" \u201cb\u201d', 11, "has no meaning here"),
        ("start: /a(/", 9, "in this pattern: missing"),
        ("start: /(?=a)b/", 8, "in this pattern: lookaround is not supported"),
        ('start "a"', 6, "expected ':', found '\"a\"'"),
        ('start: ("a"', 11, "expected '\\)', found the end"),
        ('start: "a")', 10, "expected a definition such as"),
        ('start: "a"*+', 11, "expected a name, a text, a pattern or a group"),
        ('Start: "a"', 0, "the name Start is neither in lower case"),
        ("start: x[max_tokens=3]\nx: /a/", 19, "belong to the definition of a rule"),
        ('start: a\na: "x"\na: "y"', 19, "a is defined twice"),
        ("start: A\nA: B\nB: A", 17, "refers to itself"),
        ('start: "a"{3,2}', 7, "3 to 2 times"),
        ("%import foo.BAR\nstart: BAR", 0, "foo.BAR cannot be imported; known are common"),
        ('start.2: "a"', 9, "priorities"),
        ("start: " + "(" * 50 + '"a"' + ")" * 50, 36, "more than 28 deep"),
        ("", None, "no rule named start"),
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


def _chain(head: str, body: str, length: int) -> str:
    rules = [f"{head}{i}: " + body.replace("next", f"{head}{i + 1}") for i in range(length)]
    return "\n".join([f"start: {head}0", *rules, f'{head}{length}: "x"'])


@pytest.mark.parametrize(
    ("head", "body", "levels"),
    [
        ("r", "next", 1),
        ("r", '"a" next | "b"', 1),
        ("r", 'next? "a" // (((("', 1),
        ("r", '((("a" next)?)?)?', 4),
        ("r", '["a" next]', 2),
        ("T", '("a" next)? "b"', 2),
        ("T", "/[(]/ next & /[a-z(]*/", 1),
        ("r", '%json {"type": "array", "items": {"const": null}} next', 1),
        ("r", '%regex {"substring_words": "a (b"} next', 1),
        ("r", '"a"{1,3} <|sep(|> next', 1),
    ],
)
def test_definitions_nest_to_a_limit_that_is_far_from_the_end_of_the_stack(head: str, body: str, levels: int) -> None:
    """A chain of thousands would end the process that compiles it."""
    longest = (MAX_DEPTH - 2) // levels
    check_depth(_chain(head, body, longest))
    for length in (longest + 1, 5000, 50_000):
        with pytest.raises(GrammarError, match=f"more than {MAX_DEPTH} deep") as caught:
            check_depth(_chain(head, body, length))
        assert isinstance(caught.value.where, int)


def test_the_limit_counts_what_is_nested_and_not_how_many_definitions_there_are() -> None:
    wide = "\n".join(["start: " + " | ".join(f"r{i}" for i in range(3000)), *(f'r{i}: "{i}"' for i in range(3000))])
    check_depth(wide)
    referred_to_twice = "\n".join(
        ["start: r0", *(f"r{i}: r{i + 1} r{i + 1} (r{i})?" for i in range(300)), 'r300: "x"', '// r300: "x" (((']
    )
    check_depth(referred_to_twice)
    attributes = "\n".join(
        ["start: r0", *(f'r{i}[capture="a[(", lazy]: r{i + 1}' for i in range(600)), 'r600[lazy]: "x"']
    )
    for grammar in (attributes, _chain("T", "next", 600).replace("start: T0", 'start: "a"\n%ignore T0')):
        with pytest.raises(GrammarError, match="deep"):
            check_depth(grammar)
