"""Specs that are expensive to compile, as functions, because some raise when they are made."""

from __future__ import annotations

from collections.abc import Callable

from plait.constrained import Choices, Ebnf, JsonSchema, Lark, Regex, Spec


def nested(depth: int, begin: str, end: str, middle: str) -> str:
    return begin * depth + middle + end * depth


DOUBLING = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)} | {"d40": {"type": "integer"}}
WIDE = {f"d{i}": {"properties": {n: {"$ref": f"#/$defs/d{i + 1}"} for n in "ab"}} for i in range(60)} | {"d60": {}}
EXPENSIVE_SPECS: dict[str, Callable[[], Spec]] = {
    "deep": lambda: JsonSchema(nested(5000, '{"items":', "}", "{}")),
    "deep_enough": lambda: JsonSchema(nested(90, '{"items":', "}", "{}")),
    "deep_any": lambda: JsonSchema(nested(45, '{"anyOf":[{"type":"null"},', "]}", '{"type":"integer"}')),
    "members": lambda: JsonSchema({"enum": [f"member {i}" for i in range(50_000)]}),
    "members_checked": lambda: JsonSchema({"enum": [f"member {i}" for i in range(50_000)], "minLength": 3}),
    "max_items": lambda: JsonSchema({"type": "array", "maxItems": 10**9}),
    "min_items": lambda: JsonSchema({"type": "array", "minItems": 10**9}),
    "max_length": lambda: JsonSchema({"type": "string", "minLength": 10**6, "maxLength": 10**9}),
    "doubling": lambda: JsonSchema({"$ref": "#/$defs/d0", "$defs": DOUBLING}),
    "wide": lambda: JsonSchema({"$ref": "#/$defs/d0", "$defs": WIDE}),
    "circular": lambda: JsonSchema({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}),
    "remote": lambda: JsonSchema({"$ref": "http://127.0.0.1:9/x"}),
    "pattern": lambda: JsonSchema({"type": "string", "pattern": "(a{1,1000}){1,1000}"}),
    "patterns": lambda: JsonSchema({"oneOf": [{"type": "string", "pattern": f"^.*a.{{{n}}}$"} for n in (24, 25, 26)]}),
    "contradiction": lambda: JsonSchema({"allOf": [{"minimum": 5}, {"maximum": 4}, {"type": "integer"}]}),
    "number": lambda: JsonSchema('{"minimum":' + "9" * 5000 + "}"),
    "properties": lambda: JsonSchema({"properties": {f"p{i}": {"type": "integer"} for i in range(5000)}}),
    "dependent": lambda: JsonSchema({"dependentRequired": {f"a{i}": [f"a{i + 1}"] for i in range(12)}}),
    "one_of": lambda: JsonSchema({"oneOf": [{"required": [f"a{i}"]} for i in range(60)]}),
    "regex_one": lambda: Regex("(a{1,1000}){1,1000}"),
    "regex_two": lambda: Regex("((a{0,100}){0,100}){0,100}"),
    "regex_three": lambda: Regex(".*a.{25}"),
    "regex_wide": lambda: Regex(".{1,100}"),
    "wrong": lambda: Regex("(a"),
    "wrong_inside": lambda: JsonSchema({"properties": {"a": {"pattern": "[b-a]"}}}),
    "choice": lambda: Choices(("a" * 1_000_000,)),
    "constant": lambda: JsonSchema({"const": "a" * 1_000_000}),
    "literal": lambda: Ebnf('root ::= "' + "a" * 250_000 + '"'),
    "ebnf": lambda: Ebnf("\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)) + '\nr60 ::= "a"\nroot ::= r0'),
    "lark": lambda: Lark('start: "a" start start | "a" | "b"{1,100000}'),
}
