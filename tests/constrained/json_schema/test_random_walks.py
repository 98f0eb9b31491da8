"""Walks under the masks of many schemas: what ends is valid, what completes is, what is forced is allowed.

The schemas are the table's, those shaped as people write them, Pydantic's, and drawn ones.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from pydantic_models import PYDANTIC
from real_schemas import REAL
from schema_cases import ROWS
from schema_strategies import (
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

WRITTEN = {**REAL, **PYDANTIC}
REFUSED_REAL = {
    "tools/calendar": "/properties/attendees/uniqueItems",
    "openapi/pet_nullable": "/properties/owner/nullable",
    "openapi/upload": "/properties/file/format",
    "openapi/password": "/properties/password/format",
    "openapi/float_formats": "/properties/ratio/format",
    "openapi/pet": "/properties/tags/items/properties/id/format",
    "kubernetes/compose": "/definitions/s/properties/ports/uniqueItems",
    "packages/tsconfig": "/properties/compilerOptions/properties/lib/uniqueItems",
    "zod/record_checked": "/propertyNames",
    "zod/set_of_texts": "/uniqueItems",
    "zod/lookahead": "/pattern",
    "zod/password": "/pattern",
    "zod/emoji": "/pattern",
    "zod/not_empty": "",
    "others/contains_open": "/contains",
    "others/overlapping": "/oneOf",
    "others/dynamic": "/$dynamicAnchor",
    "others/remote": "/$ref",
    "others/typo": "/properties/name/minlength",
    "pydantic/Containers": "/properties/names/uniqueItems",
    "pydantic/Bytes": "/properties/blob/format",
}
NEVER = {"zod/not_empty", "others/remote"}  # nothing is valid, or not all of it is there


def allowed(matcher: Matcher) -> list[int]:
    row = np.zeros(9, np.int32)
    matcher.fill_mask(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def check_walk(matcher: Matcher, validator: Any, rng: random.Random, steps: int) -> None:
    """Some way along the masks; then what is forced, one by one; then what completes it, which is valid."""
    text = bytearray()
    for _ in range(rng.randrange(steps)):
        going_on = [token for token in allowed(matcher) if token != EOS_ID]
        if not going_on:
            break
        token = rng.choice(going_on)
        assert matcher.accept(token)
        text.append(token - 1)
    for token in matcher.forced_tokens():
        assert token in allowed(matcher)
        assert matcher.accept(token)
        text.append(token - 1)
    way = matcher.completion(200)
    if way is None:
        return
    assert len(way) <= 200
    for token in way:
        assert token in allowed(matcher)
        assert matcher.accept(token)
        text.append(token - 1)
    assert matcher.is_accepting
    assert EOS_ID in allowed(matcher)
    made = text.decode()
    assert exceeds_double_range(made) or validator.is_valid(json.loads(made)), made


@pytest.mark.parametrize("at", range(len(ROWS)))
def test_completions_and_forced_tokens_of_the_table(at: int) -> None:
    schema, rng = ROWS[at][0], random.Random(at)
    grammar, validator = grammar_of(schema), reference_validator(schema)
    assert grammar.matcher().completion(400) is not None, "from the start a way is found for every schema"
    for steps in (1, 4, 12):
        check_walk(grammar.matcher(), validator, rng, steps)


@pytest.mark.parametrize("name", sorted(WRITTEN.keys() - REFUSED_REAL.keys()))
def test_schemas_as_people_write_them(name: str) -> None:
    grammar, validator, rng = grammar_of(WRITTEN[name]), reference_validator(WRITTEN[name]), random.Random(name)
    assert grammar.unchecked == ()
    for steps in (1, 8, 40):
        check_walk(grammar.matcher(), validator, rng, steps)


@pytest.mark.parametrize("name", sorted(REFUSED_REAL))
def test_what_is_refused_of_them_is_named_and_lenient_takes_it(name: str) -> None:
    with pytest.raises(GrammarError) as caught:
        grammar_of(WRITTEN[name])
    assert caught.value.where == REFUSED_REAL[name]
    if name not in NEVER:
        grammar = grammar_of(WRITTEN[name], lenient=True)
        assert REFUSED_REAL[name] in grammar.unchecked


def ordered(schema: Any, value: Any) -> Any:
    """`value` with the names that `schema` lists first and in its order, as far as that is seen from here."""
    return _ordered([schema], value)


def _ordered(schemas: list[Any], value: Any) -> Any:
    """All of `schemas` hold for `value`."""
    said = [schema for schema in schemas if isinstance(schema, dict)]
    if isinstance(value, list):
        return [_ordered([schema["items"] for schema in said if "items" in schema], item) for item in value]
    if not isinstance(value, dict):
        return value
    listed = [name for schema in said for name in schema.get("properties", {})]
    required = [name for schema in said for name in schema.get("required", [])]
    names = [*dict.fromkeys(name for name in [*listed, *required, *value] if name in value)]
    return {name: _ordered([one for schema in said for one in _of(schema, name)], value[name]) for name in names}


def _of(schema: dict[str, Any], name: str) -> list[Any]:
    """What the schema says of the member of that name."""
    patterns = schema.get("patternProperties", {})
    said = [one for pattern, one in patterns.items() if re.search(pattern, name)]
    if name in schema.get("properties", {}):
        said.insert(0, schema["properties"][name])
    return said or [schema.get("additionalProperties", True)]


PLAIN = frozenset(
    ("type", "properties", "required", "items", "enum", "const", "additionalProperties", "patternProperties")
)
PLAIN |= {"minLength", "maxLength", "pattern", "minimum", "exclusiveMaximum", "minItems", "maxItems"}


def is_plain(schema: Any) -> bool:
    """Only keywords beside which the order of names is the schema's own, and nothing else is to be known."""
    if isinstance(schema, bool):
        return True
    inner = [*schema.get("properties", {}).values(), *schema.get("patternProperties", {}).values()]
    inner += [schema[name] for name in ("items", "additionalProperties") if name in schema]
    return schema.keys() <= PLAIN and all(is_plain(one) for one in inner)


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS.filter(is_plain), values=VALUES.flatmap(lambda v: VALUES.map(lambda w: [v, w, {"a": v, "b": w}])))
def test_what_is_valid_and_in_the_normal_form_is_accepted(schema: Any, values: list[Any]) -> None:
    validator = reference_validator(schema)
    try:
        grammar = grammar_of(schema)
    except GrammarError:
        return
    for value in values:
        assert accepts(grammar, compact(ordered(schema, value))) is bool(validator.is_valid(value)), value


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS)
def test_drawn_schemas_complete_to_what_is_valid(schema: Any) -> None:
    try:
        grammar = grammar_of(schema)
    except GrammarError:
        return
    rng = random.Random(json.dumps(schema))
    for steps in (1, 6):
        check_walk(grammar.matcher(), reference_validator(schema), rng, steps)
