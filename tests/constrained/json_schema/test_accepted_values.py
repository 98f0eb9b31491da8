"""JSON Schema masks accept exactly the valid values, by the judgement of jsonschema-rs.

Texts are matched byte by byte, so that no tokenization hides an allowed byte.
"""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from example_share import sample_of, share_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis_jsonschema import from_schema
from schema_cases import REFUSED, ROWS, Row, variants
from schema_fuzzer import check_chunk, random_text
from schema_strategies import (
    SCHEMAS,
    VALUES,
    accepts,
    compact,
    exceeds_double_range,
    grammar_of,
    reference_validator,
)

from plait.constrained import GrammarError

TABLE = [(f"{at}-{name}", row) for at, base in enumerate(ROWS) for name, row in variants(base)]
SAMPLE = [row for row in TABLE if row[0].endswith("-itself")]
SAMPLE += sample_of([row for row in TABLE if not row[0].endswith("-itself")])


def test_the_table_has_300_cases() -> None:
    assert len(TABLE) >= 300


@pytest.mark.parametrize("row", [row for _, row in SAMPLE], ids=[name for name, _ in SAMPLE])
def test_valid_values_are_accepted_and_invalid_ones_rejected(row: Row) -> None:
    schema, valid, invalid = row
    validator, grammar = reference_validator(schema), grammar_of(schema)
    for value in invalid:
        assert not validator.is_valid(value), "the table contradicts the reference validator"
        assert not accepts(grammar, compact(value)), value
    for value in valid:
        assert validator.is_valid(value), "the table contradicts the reference validator"
        assert accepts(grammar, compact(value)), value
    rng = random.Random(5)
    for _ in range(6):
        text = random_text(grammar, rng)
        if text is not None and not exceeds_double_range(text):
            assert validator.is_valid(json.loads(text)), text


@pytest.mark.parametrize(("schema", "where", "reason"), REFUSED, ids=lambda value: str(value)[:60])
def test_an_unsupported_keyword_raises_with_its_pointer(schema: Any, where: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason) as caught:
        grammar_of(schema)
    assert caught.value.where == where
    assert len(str(caught.value)) < 400


def is_valid_by_jsonschema(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS, values=st.lists(VALUES, min_size=6, max_size=12), seed=st.integers(0, 10**6))
def test_random_schemas_accept_only_valid_values(schema: Any, values: list[Any], seed: int) -> None:
    """Two validators agree with the masks. Valid objects of several properties may be rejected for their order."""
    try:
        grammar = grammar_of(schema)
    except GrammarError as error:
        if "no value is valid" in error.reason:
            assert not any(reference_validator(schema).is_valid(value) for value in values)
        return
    validator = reference_validator(schema)
    for value in values:
        valid = validator.is_valid(value)
        assert valid == is_valid_by_jsonschema(schema, value)
        if accepts(grammar, compact(value)):
            assert valid, value
        elif not _has_several_properties(value):
            assert not valid, value
    rng = random.Random(seed)
    for _ in range(4):
        text = random_text(grammar, rng)
        assert text is None or exceeds_double_range(text) or validator.is_valid(json.loads(text)), text


@pytest.mark.parametrize("number", range(share_of(3)))
def test_schemas_of_all_keywords_accept_only_valid_values(number: int) -> None:
    """Some chunks of the fuzzer. Where valid values cannot be written, a warning says so."""
    found: dict[str, list[Any]] = {}
    check_chunk(number, lambda kind, schema, text: found.setdefault(kind, []).append((schema, text)))
    assert {kind: found.get(kind, []) for kind in ("wrong", "lost", "dead end", "crash")} == {
        "wrong": [], "lost": [], "dead end": [], "crash": [],
    }  # fmt: skip
    assert len(found["valid value"]) > 300 and len(found["finished text"]) > 150


def _has_several_properties(value: Any) -> bool:
    if isinstance(value, dict):
        return len(value) > 1 or any(_has_several_properties(inner) for inner in value.values())
    return isinstance(value, list) and any(_has_several_properties(inner) for inner in value)


# hypothesis-jsonschema 0.23.1 cannot draw objects: it uses an attribute that this version of hypothesis lacks.
_SCALAR = ("string", "integer", "number", "boolean", "null")
_COMBINING_KEYWORDS = {"not", "if", "allOf", "anyOf", "oneOf", "$schema"}
DRAWABLE_SCHEMAS = [row[0] for row in ROWS if isinstance(row[0], dict) and row[0].get("type") in _SCALAR]
DRAWABLE_SCHEMAS = [schema for schema in DRAWABLE_SCHEMAS if not schema.keys() & _COMBINING_KEYWORDS]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_accepted_values_drawn_from_a_schema_are_valid(data: st.DataObject) -> None:
    schema = data.draw(st.sampled_from(DRAWABLE_SCHEMAS))
    value = data.draw(from_schema(schema))
    if accepts(grammar_of(schema), compact(value)):
        assert reference_validator(schema).is_valid(value)


def test_50000_listed_values_compile():
    values = [f"value-{number * 7919 % 1_000_003}" for number in range(50_000)]
    grammar = grammar_of({"enum": values})
    assert accepts(grammar, compact(values[0])) and accepts(grammar, compact(values[-1]))
    assert not accepts(grammar, compact("value-1")) and not accepts(grammar, compact(values[0] + "x"))
