"""Token terminals of GBNF: which sequences of tokens are accepted, against patterns over the tokens' letters."""

from __future__ import annotations

import re
from itertools import product

import pytest
from matchers import allowed_tokens, compile_in_process

from plait.constrained import Ebnf, GrammarError, Vocabulary, compile_grammar
from plait.runtime.client.constraint_check import constraint_error, constraint_mismatch

LETTERS = "EABxyzo"
TOKENS = (b"", b"", b"", b"x", b"y", b"xy", b"(")  # E ends a text, A and B are control tokens
IDS = {data.decode(): token for token, data in enumerate(TOKENS) if data}


def encode(text: str) -> list[int]:
    return [IDS[part] for part in re.findall(r"xy|[xy(]", text)]


VOCABULARY = Vocabulary(TOKENS, (0,), encode, {0: "<end>", 1: "<a>", 2: "<b>"})


def accepted(grammar: str, longest: int) -> set[str]:
    """The sequences of tokens, as letters, that a grammar accepts. Each mask has the tokens that are accepted."""
    compiled, found = compile_in_process(Ebnf(grammar), VOCABULARY), set()

    def explore(letters: str) -> None:
        matcher = compiled.matcher()
        for letter in letters:
            assert matcher.accept(LETTERS.index(letter))
        allowed = allowed_tokens(matcher, VOCABULARY)
        assert matcher.is_accepting == (0 in allowed)
        if matcher.is_accepting:
            found.add(letters)
        for token in range(1, len(TOKENS)):
            is_accepted = matcher.accept(token)
            assert is_accepted == (token in allowed), (letters, token)
            if is_accepted:
                matcher.rollback(1)
                if len(letters) < longest:
                    explore(letters + LETTERS[token])

    explore("")
    return found


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ("root ::= <a> inner <b>\ninner ::= (!<b>)*", "A[xyzo]*B"),
        ("root ::= <[1]> !<[2]>+ <[2]> .*", "A[xyzo]+B[xyzo]*"),
        ("root ::= <a> !<a> <b>", "A[xyzo]B"),
        ('root ::= "(" !<[5]> <b>', "o[xyo]B"),
        ('root ::= <[5]> "x"? | <b>{2,3}', "zx?|BBB?"),
        ('root ::= "x"* <[4]> <a>', "x*yA"),
        ('root ::= (<a> | "xy" | <[6]>)* "y"', "(A|z|xy|o)*y"),
        ('root ::= <a> root | "x"', "A*x"),
        ('root ::= t t | "(" <b>\nt ::= <a> | <[2]> "y"', "(A|By)(A|By)|oB"),
    ],
)
def test_sequences_of_tokens(grammar: str, pattern: str) -> None:
    texts = ("".join(some) for size in range(5) for some in product(LETTERS[1:], repeat=size))
    assert accepted(grammar, 4) == {text for text in texts if re.fullmatch(pattern, text)}


def test_a_recursive_grammar_with_tokens() -> None:
    assert accepted('root ::= <a> root <b> | "xy" | "("', 5) == {
        "A" * n + middle + "B" * n for n in range(3) for middle in ("xy", "z", "o") if 2 * n + len(middle) <= 5
    }


@pytest.mark.parametrize(
    ("grammar", "where", "reason"),
    [
        ("root ::= <nothing>", 9, "not one token"),
        ('root ::= "x" <[7]>', 13, "no token 7"),
        ('root ::= "x" !<end>', 13, "ends a text"),
        ('root ::= "x" < y', 13, "not closed"),
        ("root ::= [xy]* <[4]>", None, "only one of them"),
        ('root ::= !<[3]> | "xy"', None, "only one of them"),
        ('root ::= !<[3]> "y" | <[4]>', None, "only one of them"),
        ('root ::= <[5]> "(" | "x" <[4]>', None, "only one of them"),
    ],
)
def test_refusals_have_a_place(grammar: str, where: int | None, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason) as caught:
        compile_in_process(Ebnf(grammar), VOCABULARY)
    assert caught.value.where == where


def test_what_is_forced_and_what_completes() -> None:
    matcher = compile_in_process(Ebnf('root ::= <a> "xy" (<b> "(")* "y"'), VOCABULARY).matcher()
    assert (matcher.forced_bytes(), matcher.forced_tokens()) == (b"", [1, 5])
    assert matcher.completion(9) == [1, 5, 2, 6, 4] or matcher.completion(9) == [1, 5, 4]
    assert all(matcher.accept(token) for token in (1, 5, 2))
    assert (matcher.forced_bytes(), matcher.forced_tokens()) == (b"(", [6])


def test_a_worker_knows_the_names() -> None:
    assert compile_grammar(Ebnf("root ::= <a> !<b>* <b>"), VOCABULARY).matcher().forced_tokens() == [1]


def test_clients_without_a_vocabulary_check_the_text() -> None:
    spec = Ebnf('root ::= <think> !</think>* <[70000]> "<[10]>"')
    assert constraint_error(spec) is None
    assert constraint_mismatch(spec, "hm<[10]>") is None
    assert constraint_mismatch(spec, "hm<[11]>") is not None
