"""Grammars that recurse without end, or nest too deep, for a compiler: they end the server of other engines."""

from __future__ import annotations

import pytest

from plait.constrained import Ebnf, GrammarError, JsonSchema, Lark, Regex, Spec, Vocabulary, compile_grammar

# xgrammar CVE-2025-57809 and issues 126, 250 (recursion); llama.cpp issue 18988 (nested repetition)
RECURSIVE: dict[str, Spec] = {
    "itself": Ebnf("root ::= root"),
    "left": Ebnf('root ::= root "a" | "b"'),
    "hidden left": Ebnf('root ::= ws root "a" | "b"\nws ::= [ ]*'),
    "mutual": Ebnf("root ::= a\na ::= b\nb ::= a"),
    "nullable": Ebnf('root ::= a\na ::= ("" | [a-z] a) b\nb ::= a | ""'),
    "repetition": Ebnf("root ::= " + "(" * 2000 + '"a"' + ")*" * 2000),
    "alternatives": Ebnf("root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
    "a grammar of Lark": Lark("start: start start | start"),
    "brackets in Lark": Lark("start: " + "(" * 5000 + '"a"' + ")" * 5000),
    "groups": Regex("(" * 5000 + "a" + ")" * 5000),
    "stars": Regex("(" * 300 + "a" + ")*" * 300),
    "a schema": JsonSchema('{"$ref":"#"}'),
    "schemas": JsonSchema('{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}}'),
    "all of itself": JsonSchema('{"allOf":[{"$ref":"#"},{"type":"object"}]}'),
}


@pytest.mark.parametrize("name", RECURSIVE)
def test_a_recursive_grammar_compiles_or_raises_and_the_next_one_compiles(small: Vocabulary, name: str) -> None:
    reason = ""
    try:
        compile_grammar(RECURSIVE[name], small, deadline_s=10.0)
    except GrammarError as error:
        reason = str(error)
    assert len(reason) < 500
    matcher = compile_grammar(Regex("a+"), small).matcher()
    assert not matcher.is_terminated
