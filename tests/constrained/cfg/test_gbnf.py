"""GBNF grammars: accepted texts, and the position of errors."""

from __future__ import annotations

import re
from itertools import product

import pytest
from byte_grammars import accepts, refusal
from matchers import compile_in_process
from schema_strategies import BYTE_VOCABULARY

from plait.constrained import Ebnf
from plait.constrained.dfa.dfa_grammar import DfaGrammar


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ('root ::= "a" [b-d]+ | num\nnum ::= [0-9]{1,2} # digits\n', "a[b-d]+|[0-9]{1,2}"),
        ('root ::= ("a" | "b"\n | "c")* "d"?', "[abc]*d?"),
        ('root ::= [^a-c] "\\n"{0,1} .', "[^a-c]\n?(?s:.)"),
        ('root ::= "ab"{2} | "\\x64\\u0031"', "abab|d1"),
        ('root ::= "a" {2, 3} [b] + | ("d"\n * "1" {1 , })', "a{2,3}b+|d*1+"),
        ("root ::= x x\nx ::= y?\ny ::= [1a]", "[1a]{0,2}"),
    ],
)
def test_a_grammar_without_recursion_compiles_to_an_automaton(grammar: str, pattern: str) -> None:
    assert isinstance(compile_in_process(Ebnf(grammar), BYTE_VOCABULARY), DfaGrammar)
    texts = ["".join(text) for size in range(5) for text in product("abd1\n", repeat=size)]
    assert accepts(Ebnf(grammar), *texts) == [re.fullmatch(pattern, text) is not None for text in texts]


def test_a_recursive_grammar_considers_every_split_of_a_text() -> None:
    grammar = Ebnf('root ::= "ab" | [ab]* "b" tail\ntail ::= "!" | "(" root ")"')

    def is_in_language(text: str) -> bool:
        head = re.fullmatch(r"[ab]*b(.*)", text, re.DOTALL)
        if text == "ab" or (head and head[1] == "!"):
            return True
        return bool(head and head[1][:1] == "(" and head[1][-1:] == ")" and is_in_language(head[1][1:-1]))

    texts = ["".join(text) for size in range(6) for text in product("ab!()", repeat=size) if text.count("!") < 2]
    assert accepts(grammar, *texts) == [is_in_language(text) for text in texts]


@pytest.mark.parametrize(
    ("grammar", "where", "reason"),
    [
        ("", None, "no rule named root"),
        ("root ::= x", 9, "no rule named x"),
        ('root ::= "a', 9, "not closed"),
        ("root ::= [a", 9, "not closed"),
        ("root ::= [b-a]", 9, "out of order"),
        ("root ::= (a", 9, "not closed"),
        ('root ::= "a" )', 13, "unexpected text"),
        ('root = "a"', 5, "::= is expected"),
        ('root ::= "a"{2,1}', 12, "out of order"),
        ('root ::= "a"{x}', 12, "a count is written"),
        ("root ::= <[9999]> [a]", 9, "no token 9999"),
        ('root ::= "a" !<|end|>', 13, "not one token"),
        (r'root ::= "\q"', 10, "escape"),
        ('root ::= "a"\nroot ::= "b"', 13, "given twice"),
        ("root ::= " + "(" * 200, None, "nested"),
        ("root ::= a{1000}\na ::= b{1000}\nb ::= [a-z]{1000}", None, "too large"),
    ],
)
def test_errors_have_a_position(grammar: str, where: int | None, reason: str) -> None:
    error = refusal(Ebnf(grammar))
    assert re.search(reason, error.reason)
    assert where is None or error.where == where
