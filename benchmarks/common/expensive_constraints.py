"""Constraints that are expensive to compile: those of the tests, and some that take longer still."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support" / "constrained"))
from expensive_specs import EXPENSIVE_SPECS as SPECS_OF_TESTS

from plait.constrained import JsonSchema, Spec

EXPENSIVE_SPECS: dict[str, Callable[[], Spec]] = SPECS_OF_TESTS | {
    "multiple_of": lambda: JsonSchema(
        {"allOf": [{"type": "integer", "multipleOf": n, "minimum": 1, "maximum": 10**15} for n in (9973, 9967, 9949)]}
    ),
    "products": lambda: JsonSchema(
        {"type": "string", "allOf": [{"pattern": f"(a.{{{n}}}b|c.{{{n + 3}}}d)"} for n in range(8, 20)]}
    ),
    "many_properties": lambda: JsonSchema(
        {"properties": {f"p{i}": {"type": "string", "pattern": f"^[a-z]{{{i % 40}}}x+$"} for i in range(4000)}}
    ),
    "long_pattern": lambda: JsonSchema({"type": "string", "pattern": "|".join(f"w{i}x" for i in range(90_000))}),
    "reference_chain": lambda: JsonSchema(
        {
            "$ref": "#/$defs/d0",
            "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2000)} | {"d2000": {"type": "integer"}},
        }
    ),
}


def slow(number: int) -> JsonSchema:
    """A schema that is refused at the deadline, of which no two numbers share an answer."""
    return JsonSchema(
        {"oneOf": [{"type": "string", "pattern": f"^.*a.{{{n + number}}}$"} for n in (24, 25, 26)], "$comment": "s"}
    )
