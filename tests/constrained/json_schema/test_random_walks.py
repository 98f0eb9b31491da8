"""Random texts under the masks of many schemas: forced tokens are allowed, and completed values are valid.

The schemas are those of the table, realistic ones, Pydantic's, and random ones.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from matchers import allowed_tokens
from pydantic_models import PYDANTIC
from real_schemas import REAL
from schema_cases import ROWS
from schema_strategies import (
    BYTE_VOCABULARY,
    EOS_ID,
    SCHEMAS,
    VALUES,
    accepts,
    compact,
    exceeds_double_range,
    grammar_of,
    reference_validator,
)

from plait.constrained import GrammarError, Matcher

NAMED_SCHEMAS = {**REAL, **PYDANTIC}
REFUSED_POINTERS = {
    "openapi/pet_nullable": "/properties/owner/nullable",
    "zod/emoji": "/pattern",
    "zod/not_empty": "",
    "others/remote": "/$ref",
    "others/typo": "/properties/name/minlength",
}
REFUSED_IF_LENIENT = {"zod/not_empty", "others/remote"}  # no value is valid; the reference is remote


def check_walk(matcher: Matcher, validator: Any, rng: random.Random, steps: int) -> None:
    """Accepts random allowed tokens, then forced tokens, then a completion, whose text must be valid."""
    text = bytearray()
    for _ in range(rng.randrange(steps)):
        next_tokens = [token for token in allowed_tokens(matcher, BYTE_VOCABULARY) if token != EOS_ID]
        if not next_tokens:
            break
        token = rng.choice(next_tokens)
        assert matcher.accept(token)
        text.append(token - 1)
    for token in matcher.forced_tokens():
        assert token in allowed_tokens(matcher, BYTE_VOCABULARY)
        assert matcher.accept(token)
        text.append(token - 1)
    completion = matcher.completion(200)
    if completion is None:
        return
    assert len(completion) <= 200
    for token in completion:
        assert token in allowed_tokens(matcher, BYTE_VOCABULARY)
        assert matcher.accept(token)
        text.append(token - 1)
    assert matcher.is_accepting
    assert EOS_ID in allowed_tokens(matcher, BYTE_VOCABULARY)
    completed = text.decode()
    assert exceeds_double_range(completed) or validator.is_valid(json.loads(completed)), completed


@pytest.mark.parametrize("at", range(len(ROWS)))
def test_completions_of_the_table_are_valid(at: int) -> None:
    schema, rng = ROWS[at][0], random.Random(at)
    grammar, validator = grammar_of(schema), reference_validator(schema)
    assert grammar.matcher().completion(400) is not None, "every schema has a completion at the start"
    for steps in (1, 4, 12):
        check_walk(grammar.matcher(), validator, rng, steps)


@pytest.mark.parametrize("name", sorted(NAMED_SCHEMAS.keys() - REFUSED_POINTERS.keys()))
def test_completions_of_realistic_schemas_are_valid(name: str) -> None:
    grammar, validator, rng = (
        grammar_of(NAMED_SCHEMAS[name]),
        reference_validator(NAMED_SCHEMAS[name]),
        random.Random(name),
    )
    assert grammar.unchecked == ()
    for steps in (1, 8, 40):
        check_walk(grammar.matcher(), validator, rng, steps)


@pytest.mark.parametrize("name", sorted(REFUSED_POINTERS))
def test_unsupported_keywords_raise_with_their_pointer_and_lenient_reports_them(name: str) -> None:
    with pytest.raises(GrammarError) as caught:
        grammar_of(NAMED_SCHEMAS[name])
    assert caught.value.where == REFUSED_POINTERS[name]
    if name not in REFUSED_IF_LENIENT:
        grammar = grammar_of(NAMED_SCHEMAS[name], lenient=True)
        assert REFUSED_POINTERS[name] in grammar.unchecked


def ordered(schema: Any, value: Any) -> Any:
    """`value` with its properties in the order of `schema`: first the listed ones."""
    return _ordered([schema], value)


def _ordered(schemas: list[Any], value: Any) -> Any:
    """`value` in the order of all `schemas` that apply to it."""
    applied = [schema for schema in schemas if isinstance(schema, dict)]
    if isinstance(value, list):
        return [_ordered([schema["items"] for schema in applied if "items" in schema], item) for item in value]
    if not isinstance(value, dict):
        return value
    listed = [name for schema in applied for name in schema.get("properties", {})]
    required = [name for schema in applied for name in schema.get("required", [])]
    names = [*dict.fromkeys(name for name in [*listed, *required, *value] if name in value)]
    return {
        name: _ordered([subschema for schema in applied for subschema in _property_schemas(schema, name)], value[name])
        for name in names
    }


def _property_schemas(schema: dict[str, Any], name: str) -> list[Any]:
    """The subschemas that apply to the property `name`."""
    patterns = schema.get("patternProperties", {})
    subschemas = [subschema for pattern, subschema in patterns.items() if re.search(pattern, name)]
    if name in schema.get("properties", {}):
        subschemas.insert(0, schema["properties"][name])
    return subschemas or [schema.get("additionalProperties", True)]


PLAIN = frozenset(
    ("type", "properties", "required", "items", "enum", "const", "additionalProperties", "patternProperties")
)
PLAIN |= {"minLength", "maxLength", "pattern", "minimum", "exclusiveMaximum", "minItems", "maxItems"}


def is_plain(schema: Any) -> bool:
    """Whether the schema has only keywords that do not change the order of properties."""
    if isinstance(schema, bool):
        return True
    inner = [*schema.get("properties", {}).values(), *schema.get("patternProperties", {}).values()]
    inner += [schema[name] for name in ("items", "additionalProperties") if name in schema]
    return schema.keys() <= PLAIN and all(is_plain(subschema) for subschema in inner)


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS.filter(is_plain), values=VALUES.flatmap(lambda v: VALUES.map(lambda w: [v, w, {"a": v, "b": w}])))
def test_valid_values_in_schema_order_are_accepted(schema: Any, values: list[Any]) -> None:
    validator = reference_validator(schema)
    try:
        grammar = grammar_of(schema)
    except GrammarError:
        return
    for value in values:
        assert accepts(grammar, compact(ordered(schema, value))) is bool(validator.is_valid(value)), value


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS)
def test_completions_of_random_schemas_are_valid(schema: Any) -> None:
    try:
        grammar = grammar_of(schema)
    except GrammarError:
        return
    rng = random.Random(json.dumps(schema))
    for steps in (1, 6):
        check_walk(grammar.matcher(), reference_validator(schema), rng, steps)
