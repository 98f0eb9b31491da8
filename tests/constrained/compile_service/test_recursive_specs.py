"""Grammars that recurse without end, or nest too deep, for a compiler: they end the server of other engines."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from plait.constrained import Ebnf, GrammarError, JsonSchema, Lark, Regex, Spec, Vocabulary, compile_grammar
from plait.constrained.cfg.lark_depth import MAX_DEPTH

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
    "a chain of rules": Lark("start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(2650)) + '\nr2650: "a"'),
    "a chain of terminals": Lark(
        "start: T0\n" + "\n".join(f'T{i}: ("a" T{i + 1})? "b"' for i in range(5000)) + '\nT5000: "a"'
    ),
    "a chain that recurs": Ebnf(
        "root ::= r0\n" + "\n".join(f'r{i} ::= "a" r{i + 1} | "b"' for i in range(4000)) + "\nr4000 ::= root"
    ),
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


_COMPILE_A_CHAIN = """
import resource, sys, llguidance
from plait.constrained.compile_service.worker import _limit_stack
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))
if sys.argv[2] == "worker":
    _limit_stack()
length = int(sys.argv[1])
lark = "start: r0\\n" + "\\n".join(f"r{i}: r{i + 1}" for i in range(length)) + f'\\nr{length}: "a"'
source = llguidance.LLMatcher.grammar_from_lark(lark)
llguidance.LLMatcher(llguidance.LLTokenizer("byte"), source, log_level=0).compute_bitmask()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems give a thread another stack (2026-11-26)")
def test_a_worker_has_half_of_the_callers_stack_so_what_it_compiles_does_not_end_the_caller() -> None:
    def ended_with(length: int, process: str) -> int:
        command = [sys.executable, "-P", "-c", _COMPILE_A_CHAIN, str(length), process]
        return subprocess.run(command, stderr=subprocess.DEVNULL, timeout=60).returncode

    assert ended_with(MAX_DEPTH - 2, "worker") == 0
    assert ended_with(2000, "worker") == -signal.SIGSEGV
    assert ended_with(2000, "caller") == 0
