"""Patterns with lookaround: the plain pattern matches exactly the texts in which jsonschema-rs finds them."""

from __future__ import annotations

import itertools
import json
import random
import re
import unicodedata

import interegular
import jsonschema_rs
import pytest
from schema_strategies import accepts, grammar_of

from plait.constrained import GrammarError
from plait.constrained.json_schema.rewrite.patterns.conversion import ecma_to_plain_pattern, ecma_to_plain_patterns
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
    r"^((?!ab).)*$",
    r"(?!^a$)b",
    r"\ba\b",
    r"^(?!.*\bab\b).*a",
    r"a(?!\b)b",
    r"(?<!\ba)b",
    r"^(?!.*(?!\ba)b).*$",
    r"(?<=\ba)b(?=\B)",
    r"(?=\ba)a.?\B",
    r"a\Bb",
    r"^([a-z]|[a-z]([a-z-](?!--))*[a-z])$",
    r"^(?=^[^./~])(^((?!-{2}).)*$).*$",
    r"((?<=a)b|(?<!a)-)+$",
    r"^(?:a(?=b)|b(?!b))+$",
    r"^(?:(?=a)[ab]){2}",
    r"(?:a|^b|-$)+$",
    r"(?:(?!a)|b)\$",
    r"a(?=.*(?!b)-$)",
    r"(?:(?:^|-)(?!-)[ab]{1,2})+$",
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


@pytest.mark.parametrize(
    "pattern",
    [r"^(?=.*[0-9])(?=.*[a-z])(?!.*\$\$)[ -z]{3,32}$", r"^(?!.*  )[a-zA-Z][a-zA-Z0-9 _-]{0,48}[a-zA-Z0-9_-]$"],
)
def test_a_large_pattern_is_split_at_its_lookahead(pattern: str) -> None:
    validator = jsonschema_rs.validator_for({"pattern": pattern})
    plain = [re.compile(one.pattern) for one in ecma_to_plain_patterns(pattern)]
    assert len(plain) > 1
    texts = ["".join(RANDOM.choice("aA1 $") for _ in range(RANDOM.randrange(9))) for _ in range(2000)]
    found = [text for text in texts if all(one.fullmatch(text) for one in plain)]
    assert found == [text for text in texts if validator.is_valid(text)] and found
    grammar = grammar_of({"type": "string", "pattern": pattern})
    assert all(accepts(grammar, json.dumps(text)) is (text in found) for text in texts[:100])


@pytest.mark.parametrize("pattern", [r"^[\p{L}\p{N}_.-]*$", r"^\P{Lu}+$", r"^[^\p{Letter}\s]*$", r"\p{gc=Zs}"])
def test_unicode_properties(pattern: str) -> None:
    validator = jsonschema_rs.validator_for({"pattern": pattern})
    plain = re.compile(ecma_to_plain_pattern(pattern).pattern)
    texts = [chr(code) for code in range(0x3100) if unicodedata.category(chr(code)) != "Cn"] + [
        "aé",
        "Ωm",
        "٣ x",
        "中-",
    ]
    assert [text for text in texts if plain.fullmatch(text)] == [text for text in texts if validator.is_valid(text)]


def test_a_character_without_a_category_has_no_unicode_property_and_is_in_no_complement() -> None:
    unassigned = next(chr(code) for code in range(0x900, 0x3000) if unicodedata.category(chr(code)) == "Cn")
    for pattern in (r"^\p{L}$", r"^\P{L}$", r"^[^\p{L}]$", r"^[\P{L}]$"):
        assert not re.fullmatch(ecma_to_plain_pattern(pattern).pattern, unassigned)
    names = {"propertyNames": {"not": {"pattern": r"\p{L}"}}}
    for schema in ({"not": {"pattern": r"\p{L}"}}, {"pattern": r"^(?!\p{L})"}, names):
        with pytest.raises(GrammarError):
            grammar_of(schema)
    with pytest.raises(GrammarError, match="closed"):
        grammar_of({"patternProperties": {r"\p{L}": {"type": "null"}}})
    assert accepts(grammar_of({"patternProperties": {r"^\p{L}$": {}}, "additionalProperties": False}), '{"é":1}')


@pytest.mark.parametrize(
    "pattern",
    [
        r"^(?!.*\bab\b).*a",
        r"a(?!\b)b?",
        r"a(?!\B).?",
        r"(?<!\ba)b",
        r"(?<!\Ba)b",
        r"^(?!.*(?!\ba)b).*$",
        r"(?=\ba)a.\B",
    ],
)
def test_next_to_a_word_boundary_a_text_matches_however_words_are_understood(pattern: str) -> None:
    plain = re.compile(ecma_to_plain_pattern(pattern).pattern)
    for text in map("".join, itertools.chain(*(itertools.product("ab é", repeat=size) for size in range(5)))):
        readings = {re.search(pattern, text, flags) is not None for flags in (0, re.ASCII)}
        if plain.fullmatch(text):
            assert readings == {True}, text
        assert text.isascii() is False or readings == {plain.fullmatch(text) is not None}, text


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
    with pytest.raises(GrammarError, match="too many states"):
        ecma_to_plain_patterns("^(?!.*a.{14}b)[ab]*c$")


def test_a_large_automaton_is_refused_before_it_is_built_without_a_bound(monkeypatch) -> None:
    searched = "|".join(f"(?:[a-z]{{0,}}{letter}x(?:[a-z]){{12}})" for letter in "abcdefghijklmnopqrstuvwyz" * 2)
    monkeypatch.setattr(interegular, "parse_pattern", lambda _: pytest.fail("it is built without a bound"))
    with pytest.raises(GrammarError, match="too many states"):
        intersect("[a-z]{0,}", searched, negated=True)
