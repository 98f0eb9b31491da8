"""Patterns of schemas with `(?i)`: the plain pattern matches the texts in which jsonschema-rs finds them."""

from __future__ import annotations

import itertools
import re

import jsonschema_rs
import pytest
from schema_strategies import grammar_of

from plait.constrained import GrammarError
from plait.constrained.json_schema.rewrite.patterns.conversion import ecma_to_plain_pattern

TEXTS = ["".join(text) for size in range(4) for text in itertools.product("abAB1Z-", repeat=size)]


@pytest.mark.parametrize(
    "pattern",
    [
        "(?i)^ab$",
        "(?i)a|1",
        "^(?i:a)b$",
        "(?i)^[a-b1]+$",
        "^(?i:a(b)A)-|B$",
        "^(?i:(a)b)Z$",
        "(?i)^[-a]$",
        "(?i)[a-]Z",
        r"(?i)^(?=a)\wb\b",
    ],
)
def test_letters_match_in_both_cases(pattern: str) -> None:
    validator = jsonschema_rs.validator_for({"pattern": pattern})
    plain = re.compile(ecma_to_plain_pattern(pattern).pattern)
    found = [text for text in TEXTS if plain.fullmatch(text)]
    assert found and found == [text for text in TEXTS if validator.is_valid(text)]


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"pattern": "(?i)[^a]"}, "negated class"),
        ({"pattern": "(?i)é"}, "beyond ASCII"),
        ({"pattern": "(?i)[0-z]"}, "range of letters and others"),
        ({"pattern": "(?i)[a-Z]"}, "range of letters and others"),
        ({"pattern": r"(?i)\x41"}, "escaped letter"),
        ({"pattern": "(?i)^(?!ab)"}, "negative lookaround"),
        ({"pattern": "a(?i)b"}, r"\(\?i\) at the start"),
        ({"pattern": "(?s)."}, r"\(\?i\) at the start"),
        ({"not": {"pattern": "(?i)a"}}, "complement"),
    ],
)
def test_where_dialects_differ_it_is_refused(schema: dict[str, object], reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        grammar_of(schema)
