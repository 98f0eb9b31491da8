"""JSON schemas, grammars and forced tokens with the embedded model."""

from __future__ import annotations

import json

import jsonschema_rs
import pytest

import plait
from plait import assistant, gen, user

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "house": {"enum": ["Gryffindor", "Hufflepuff", "Ravenclaw", "Slytherin"]},
        "alive": {"type": "boolean"},
    },
    "required": ["name", "age", "house", "alive"],
    "additionalProperties": False,
}


@plait.function
def character(s, i, **constraint):
    s += user(f"Describe character number {i} of Harry Potter.")
    s += assistant(gen("value", max_tokens=100, **constraint))


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_json_matches_its_schema_and_has_forced_tokens(runtime, temperature):
    states = [character.run(i, json_schema=SCHEMA, temperature=temperature, backend=runtime) for i in range(6)]
    for state in states:
        jsonschema_rs.validate(SCHEMA, json.loads(state["value"]))
        meta = state.get_meta_info("value")
        assert meta["finish_reason"]["type"] == "stop"
        assert meta["forced_tokens"] >= 8


def test_output_matches_grammars(runtime):
    steps = 'root ::= ("left" | "right") (" " ("left" | "right")){0,5}'
    moves = character.run(1, ebnf=steps, backend=runtime, temperature=1)
    assert set(moves["value"].split(" ")) <= {"left", "right"}
    assert moves.get_meta_info("value")["finish_reason"]["type"] == "stop"
    dates = character.run(1, lark='start: /[0-9]{4}/ "-" /[0-9]{2}/', backend=runtime)
    assert len(dates["value"]) == 7


def test_an_unsupported_schema_raises_with_its_path(runtime):
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": r"(b)\1"}}, "required": ["a"]}
    with pytest.raises(plait.ProgramError, match="/properties/a"):
        character.run(1, json_schema=schema, backend=runtime)


def test_a_schema_refers_to_documents_that_the_program_gives(runtime):
    schemas = {"https://a.b/house": {"enum": ["Ravenclaw"]}, "https://a.b/unused": {"$schema": "unknown"}}
    schema = {**SCHEMA, "properties": {"house": {"$ref": "https://a.b/house"}}, "required": ["house"]}
    state = character.run(1, json_schema=schema, schemas=schemas, backend=runtime)
    assert json.loads(state["value"]) == {"house": "Ravenclaw"}
    with pytest.raises(plait.InputError, match="json_schema"):
        gen("value", regex="a", schemas=schemas)
    with pytest.raises(plait.InputError, match="JSON text"):
        gen("value", json_schema=schema, schemas={"https://a.b/house": 3})
