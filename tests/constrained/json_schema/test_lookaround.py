"""Patterns with lookaround: the plain pattern matches exactly the texts in which jsonschema-rs finds them."""

from __future__ import annotations

import itertools
import random
import re

import jsonschema_rs
import pytest
from schema_strategies import accepts, grammar_of

from plait.constrained import GrammarError
from plait.constrained.json_schema.rewrite.patterns import ecma_to_plain_pattern
from plait.constrained.regex.pattern_algebra import intersect

PATTERNS = [
    r"^(?!aws:)[a-z:]+$",
    r"(?<!\\)\$\{(.*?)\}",
    r"^(?=^[a-z0-9-]+$).{3,5}$",
    r"^(?!.* {2})[ a]*$",
    r"^(?!\s*$).+$",
    r"^(?!(a|b|ab)$)[a-z]+$",
    r"^a(?!b)",
    r"(?<=a)b$",
    r"a(?=b)(?!bc)",
    r"^(?!^AWS).*",
    r"^.*(?<!-)$",
    r"a(?<!b)(?=b)b",
    r"^(a(?=b)[ab]+)$",
    r"(?=ab)a|^(?!b)$",
    r".*(?<!\\)\$\{(.*?)\}|(?<!\\)\$([_a-z][_a-z0-9]*).*",
    r"(?:x|(?!a)[ab])$",
]
TEXTS = ["".join(text) for size in range(5) for text in itertools.product("ab$-", repeat=size)]
RANDOM = random.Random(1)
TEXTS += ["".join(RANDOM.choice("ab1 -{}$\\:wsAWS\nx") for _ in range(RANDOM.randrange(8))) for _ in range(1500)]
TEXTS += [
    "aws:a",
    "aw",
    "a${b}",
    "\\${b}",
    "AWSx",
    "xAWS",
    "éa",
]  # not U+2028, where the reference departs from ECMA 262


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_plain_pattern_matches_the_same_texts(pattern: str) -> None:
    validator = jsonschema_rs.validator_for({"pattern": pattern})
    plain = re.compile(ecma_to_plain_pattern(pattern).pattern)
    found = [text for text in TEXTS if plain.fullmatch(text)]
    assert found == [text for text in TEXTS if validator.is_valid(text)]


def test_a_schema_with_lookahead_compiles() -> None:
    grammar = grammar_of({"type": "string", "pattern": "^(?!no)[a-z]+(?<!s)$"})
    assert [text for text in ("on", "no", "nod", "ons", "o") if accepts(grammar, f'"{text}"')] == ["on", "o"]


@pytest.mark.parametrize(("one", "other", "negated"), [("a|b", "b|c", False), ("[a-c]{1,3}", "a(?:b){0,}", True)])
def test_intersections_and_differences(one: str, other: str, negated: bool) -> None:
    plain = intersect(one, other, negated=negated).pattern
    for text in map("".join, itertools.chain(*(itertools.product("abcd", repeat=size) for size in range(5)))):
        expected = bool(re.fullmatch(one, text)) and bool(re.fullmatch(other, text)) is not negated
        assert bool(re.fullmatch(plain, text)) is expected, text


def test_large_lookaround_is_refused() -> None:
    with pytest.raises(GrammarError, match="too large"):
        ecma_to_plain_pattern("^(?!" + "|".join(f"word{i}x" for i in range(2000)) + ")[a-z]+$")
