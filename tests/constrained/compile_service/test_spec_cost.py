"""Which specs count as small: those that people write, and none of those that are known to be expensive to compile."""

from __future__ import annotations

import pytest
from expensive_specs import EXPENSIVE_SPECS
from real_schemas import REAL

from plait.constrained import Choices, GrammarError, JsonObject, JsonSchema, Lark, Regex, Spec, Structural
from plait.constrained.compile_service.spec_cost import is_small, spec_cost

SMALL: list[Spec] = [
    Regex("[A-Za-z ]{5,30}"),
    Regex(r"[a-z]{3,12}@[a-z]{3,10}\.(com|org|net)"),
    Choices(("yes", "no")),
    JsonObject(),
    JsonSchema({"type": "object", "properties": {"age": {"type": "integer"}, "id": {"pattern": "^[0-9a-f]{32}$"}}}),
    Lark('start: "a" NUMBER\nNUMBER: /[0-9]+/'),
    Structural([("<call>", {"type": "object"}, "</call>")]),
]


@pytest.mark.parametrize("spec", SMALL, ids=lambda spec: type(spec).__name__)
def test_what_people_write_is_small(spec: Spec) -> None:
    assert is_small(spec)


def test_nearly_all_real_schemas_are_small() -> None:
    schemas = [JsonSchema(schema) for schema in REAL if isinstance(schema, dict)]
    assert sum(map(is_small, schemas)) >= 0.95 * len(schemas)


@pytest.mark.parametrize("name", ["members", "members_checked", "properties", "patterns", "regex_three", "literal"])
def test_what_takes_long_is_not(name: str) -> None:
    assert not is_small(EXPENSIVE_SPECS[name]())


def test_every_spec_has_a_cost_at_once() -> None:
    for make in EXPENSIVE_SPECS.values():
        try:
            spec = make()
        except GrammarError:
            continue
        assert spec_cost(spec) >= 0
