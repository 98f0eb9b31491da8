"""A text matches a pattern or grammar exactly if its JSON string matches the rewritten one."""

from __future__ import annotations

import json
import re

import llguidance
import pytest
from byte_grammars import accepts as accepted
from byte_grammars import refusal
from example_share import sample_of
from hypothesis import given
from hypothesis import strategies as st

from plait.constrained.specs import GrammarError, JsonString, Lark, Regex, Structural, Trigger
from plait.constrained.structural.json_string import _COMMON, grammar_in_json, pattern_in_json

BYTES = llguidance.LLTokenizer("byte")
PARTS = ["a", "b", r"\"", r"\\", r"\n", r"\t", r"\x01", ".", r"[^a\n]", r"[\s\S]", r"\w", r"[\"-b]", "(?i:k)", r"[^\"]"]
TEXTS = st.text(alphabet='aAkK"\\\n\t\x01\x1f\x7f/é😀', max_size=6)
CODE = r"""
start: pragma_line? SOURCE
pragma_line: /[ \t]*\/\/ @exec:[^\r\n]*/ NEWLINE
NEWLINE: /\r?\n/
SOURCE: /[^@][\s\S]*/
"""
PATCH = """
start: "begin" LF (file line+)+ "end" LF?
?file: "file " /(.+)/ LF -> name
line: ("+" | "-") /(.*)/ LF
%import common.LF
"""
SUM = """
start: term ("+" term)* | "\\""  // a quote alone
term: NUMBER | "(" start ")" | "é".."ü" | "x"i{2,3}
%import common.NUMBER
%import common (WS, ESCAPED_STRING)
%ignore WS
"""


def accepts(grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(BYTES, llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def terminal(pattern: str) -> str:
    return f"start: /{llguidance.regex_to_lark(pattern)}/"


@given(st.lists(st.sampled_from([*PARTS, "|", "*", "{1,2}"]), min_size=1, max_size=6), TEXTS)
def test_random_patterns(parts: list[str], text: str) -> None:
    pattern = "a" + "".join(parts)
    try:
        plain = pattern_in_json(pattern)
    except GrammarError:  # two quantifiers in a row
        return
    assert accepts(terminal(plain), in_json(text)) == bool(re.fullmatch(pattern, text))


@pytest.mark.parametrize("name", sample_of(list(_COMMON), least=4))
def test_terminals_of_the_library(name: str) -> None:
    """Those that are written out here have the same texts as the library's."""

    @given(st.text(alphabet='"\\/*-# \t\f\r\na', max_size=8))
    def check(text: str) -> None:
        for candidate in (text, f'"{text}"', f"/*{text}*/", f"//{text}", f"--{text}", f"#{text}"):
            library = f"%import common.{name}\nstart: {name}"
            assert accepts(library, candidate) == accepts(grammar_in_json(library), in_json(candidate)), candidate

    check()


@pytest.mark.parametrize(
    ("grammar", "texts"),
    [
        (CODE, ["text(1)", '// @exec: fast\ntext("a\\n")', "\t// @exec:\r\n", "@", 'x\n\t"\x01\\']),
        (PATCH, ['begin\nfile a"\n+\n-b\\\nend', "begin\nfile a\nend", "begin\nfile \t\n+\t\\nend\nend\n", "begin"]),
        (SUM, ["1 + (2.5+\n3)", '"', "é+ü", "xX", "x", "(1", "1\t+ XXX"]),
    ],
)
def test_grammars(grammar: str, texts: list[str]) -> None:
    rewritten = grammar_in_json(grammar)
    answers = [(accepts(grammar, text), accepts(rewritten, in_json(text))) for text in texts]
    assert all(one == other for one, other in answers) and {one for one, _ in answers} == {True, False}


@given(TEXTS)
def test_a_grammar_with_any_text(text: str) -> None:
    assert accepts(grammar_in_json(CODE), in_json(text)) == accepts(CODE, text)


def test_no_other_form_of_a_character_is_possible() -> None:
    """Else the call rendered again would have other tokens."""
    grammar = grammar_in_json("start: /[\\s\\S]/")
    for other in ('"', "\n", "\\/", "\\u0041", "\\u000a", "\\u001F"):
        assert not accepts(grammar, other)


@pytest.mark.parametrize(
    ("grammar", "where"),
    [("start: A\nA: ~/a/", 12), ('start: %regex {"substring_chars": "a"}', 7), ("start: /a(?=b)/", 8)],
)
def test_what_is_refused_has_its_place(grammar: str, where: int) -> None:
    with pytest.raises(GrammarError) as caught:
        grammar_in_json(grammar)
    assert caught.value.where == where


@pytest.mark.parametrize("of", [Lark(CODE), Regex(r"(// @exec:.*\n)?[^@](?s:.*)"), Regex(r"(?!@)[^/](?s:.*)")])
def test_calls_with_a_json_string(of: Lark | Regex) -> None:
    if isinstance(of, Regex) and of.pattern.startswith("(?!"):  # lookaround has no such form
        assert refusal(calls_of(of)).where == "/triggers/0/content"
        return
    texts = ["text(1)", '// @exec: fast\ntext("a\\n")', "@", 'x\n\t"\x01\\</c>', ""]
    values = [json.dumps(text, ensure_ascii=False) for text in texts]
    whole = [f'so <c>{{"input": {value}}}</c> and <c>{{"input": {value}}}</c>' for value in values]
    assert accepted(calls_of(of), *whole) == [True, True, False, True, False]
    assert not any(accepted(calls_of(of), '<c>{"input": "a\nb"}</c>', '<c>{"input": "a', '<c>{"input": "a"}</c'))


def calls_of(of: Lark | Regex) -> Structural:
    return Structural([Trigger('<c>{"input": ', JsonString(of), "}</c>"), ("<d>", {}, "</d>")])


def test_a_wrong_grammar_in_a_call_is_named() -> None:
    assert refusal(calls_of(Lark("start: ~/a/"))).where == "/triggers/0/content"
    assert "/triggers/0/content" in str(refusal(calls_of(Lark("start: %json {}"))).where)
