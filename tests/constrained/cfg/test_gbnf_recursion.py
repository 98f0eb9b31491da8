"""GBNF with recursion: small random grammars against a slow recognizer, and long texts of whatever compiles."""

from __future__ import annotations

import os
import random
from itertools import product

import numpy as np
import pytest
from byte_grammars import accepts
from matchers import compile_in_process
from schema_strategies import BYTE_VOCABULARY

import plait
from plait.constrained import Ebnf, GrammarError, Vocabulary, mask_words
from plait.constrained.cfg.gbnf_parser import Alternatives, CharClass, Node, Repeat, RuleReference, Sequence, parse_gbnf

EXAMPLES = int(os.environ.get("PLAIT_EXAMPLES", "12"))  # 150 in a long run
LETTERS = "ab("
NAMES = ("root", "x", "y")
TEXTS = ["".join(text) for size in range(6) for text in product(LETTERS, repeat=size)]
JSON = (
    'root ::= "{" w s ":" w (s | root) "}"\nw ::= [ \\n\\t]*\ns ::= "\\"" t "\\""\n'
    't ::= "" | [^"\\\\\\r\\n] t | "\\\\" ["\\\\/bfnrt] t\n'
)
COMPILE = {
    "right recursion": JSON,
    "left recursion": 'root ::= "(" e ")"\ne ::= e "+" t | t\nt ::= [0-9]+ | root',
    "binary": 'root ::= root "+" root | "-" root | "(" root ")" | [0-9]+',
    "mutual": 'root ::= "[" a "]"\na ::= "x" b | ""\nb ::= "y" a | "z" b | root',
    "optional between spaces": 'root ::= "[" ws (root (ws "," ws root)*)? ws "]"\nws ::= [ \\n]*',
    "elements": 'root ::= "<" n ">" (t | root)* "</" n ">"\nn ::= [a-z] n | [a-z]\nt ::= [^<>] t | [^<>]',
    "newline within and after spaces": (
        'root ::= (e "=" ws t "\\n")+\ne ::= t ([-+] t)*\nt ::= i | "(" ws e ")" ws\n'
        "i ::= [a-z] [a-z0-9_]* ws\nws ::= [ \\n]*"
    ),
    "any character": 'root ::= "\\"" t "\\"" | "(" root ")"\nt ::= "" | [^"] t | "\\\\" . t',
}


def _matches(rules: dict[str, Node], text: str) -> bool:
    """Whether the rules match `text`, by fixed points over all (rule, begin): the ends of its matches."""
    ends: dict[tuple[str, int], set[int]] = {(name, at): set() for name in rules for at in range(len(text) + 1)}

    def after(node: Node, at: int) -> set[int]:
        match node:
            case CharClass():
                found = at < len(text) and any(low <= ord(text[at]) <= high for low, high in node.ranges)
                return {at + 1} if at < len(text) and found != node.negated else set()
            case RuleReference():
                return ends[node.name, at]
            case Sequence():
                reached = {at}
                for part in node.parts:
                    reached = {end for begin in reached for end in after(part, begin)}
                return reached
            case Alternatives():
                return {end for arm in node.alternatives for end in after(arm, at)}
            case Repeat():
                reached, found, count = {at}, {at} if node.low == 0 else set(), 0
                while reached and count < (node.high if node.high is not None else node.low + len(text) + 1):
                    reached, count = {end for begin in reached for end in after(node.part, begin)}, count + 1
                    found |= reached if count >= node.low else set()
                return found
        raise AssertionError(node)

    size = -1
    while size != (new := sum(map(len, ends.values()))):
        size = new
        for name, at in ends:
            ends[name, at] = ends[name, at] | after(rules[name], at)
    return len(text) in ends["root", 0]


def _random_grammar(chance: random.Random) -> str:
    def item(depth: int) -> str:
        kind = chance.randrange(10)
        if kind < 4:
            return chance.choice(('"a"', '"b"', '"("', "[ab]", "[^a]", '"ab"'))
        if kind < 8:
            return chance.choice(NAMES)
        inner = f"({arms(depth + 1)})" if depth < 1 else chance.choice(NAMES)
        return inner + chance.choice(("", "*", "?", "+", "{1,2}"))

    def arms(depth: int) -> str:
        return " | ".join(
            " ".join(item(depth) for _ in range(chance.randrange(1, 4))) if chance.random() < 0.85 else '""'
            for _ in range(chance.randrange(1, 4))
        )

    return "\n".join(f"{name} ::= {arms(0)}" for name in NAMES)


def test_random_grammars_mean_what_a_slow_recognizer_says() -> None:
    refused = {"no text": 0, "more and more ways": 0}
    for seed in range(EXAMPLES):
        grammar = _random_grammar(random.Random(seed))
        try:
            found = accepts(Ebnf(grammar), *TEXTS)
        except GrammarError as error:
            refused[next(reason for reason in refused if reason in error.reason)] += 1
            continue
        rules = parse_gbnf(grammar)
        assert found == [_matches(rules, text) for text in TEXTS], grammar
    assert refused["no text"] <= EXAMPLES // 4, refused
    assert refused["more and more ways"] <= EXAMPLES * 2 // 5, refused


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return plait.load_vocabulary()


@pytest.mark.parametrize("name", COMPILE)
def test_whatever_compiles_answers_in_long_texts(name: str, vocabulary: Vocabulary) -> None:
    grammar, chance = compile_in_process(Ebnf(COMPILE[name]), vocabulary), random.Random(1)
    row, size, matcher = np.zeros(mask_words(len(vocabulary)), np.int32), 0, None
    while size < 2000:
        matcher = matcher or grammar.matcher()
        matcher.fill_mask(row)
        bits = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[: len(vocabulary)])
        tokens = sorted(set(bits.tolist()) - set(vocabulary.eos_ids))
        if not tokens:
            assert matcher.is_accepting
            matcher = None
            continue
        token = chance.choice(tokens)
        assert matcher.accept(token)
        size += len(vocabulary.token_bytes[token])


@pytest.mark.parametrize(
    "grammar",
    ['root ::= "a" root "b"? | ""', 'root ::= "[" w (root ("," root)*)? w "]" w | "x" w\nw ::= [ \\n]* [ \\t]*'],
)
def test_a_grammar_whose_texts_divide_in_ever_more_ways_is_refused_at_once(
    grammar: str, vocabulary: Vocabulary
) -> None:
    with pytest.raises(GrammarError, match="in more and more ways as they grow"):
        compile_in_process(Ebnf(grammar), vocabulary)


@pytest.mark.parametrize("grammar", ['root ::= "a" root', "root ::= x\nx ::= root x", 'root ::= "a" root "b"'])
def test_a_grammar_without_texts_is_refused(grammar: str) -> None:
    with pytest.raises(GrammarError, match="no text"):
        compile_in_process(Ebnf(grammar), BYTE_VOCABULARY)
