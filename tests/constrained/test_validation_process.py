"""Full validation of a text in a process with a time limit."""

from __future__ import annotations

import json

from plait.constrained import JsonSchema, Regex
from plait.constrained.validation_process import validation_error, validation_error_within

DOUBLING = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)} | {"d60": {"type": "string"}}
BACKTRACKING = {"anyOf": [{"pattern": f"^((?=a)a+)+b{i}$"} for i in range(10_000)]}


def test_results_are_those_of_this_process() -> None:
    one = JsonSchema({"contains": {"const": 1}}, lenient=True)
    for text in ("[2, 2]", "[1, 2]", "["):
        assert validation_error_within(one, text, timeout_s=60) == validation_error(one, text)
    assert validation_error_within(Regex("a"), "a", timeout_s=60) is None


def test_a_validation_that_takes_hours_is_ended() -> None:
    for schema in ({"not": {"not": {"$ref": "#/$defs/d0"}}, "$defs": DOUBLING}, BACKTRACKING):
        spec = JsonSchema(json.dumps(schema), lenient=True)
        error = validation_error_within(spec, json.dumps("a" * 40), timeout_s=1.5)
        assert error == "it could not be checked within 1.5 s"
