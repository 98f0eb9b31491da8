"""Strategies for schemas and values, and whether a schema's grammar accepts a text, byte by byte.

The vocabulary has single bytes, so that no tokenization hides an allowed byte.
jsonschema-rs is the reference validator.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
from hypothesis import strategies as st

from plait.constrained import Grammar, JsonSchema, Vocabulary
from plait.constrained.compiler import build_grammar, compile_spec
from plait.constrained.specs import GrammarError

EOS_ID = 0
BYTE_VOCABULARY = Vocabulary(
    (b"", *(bytes([byte]) for byte in range(256))), (EOS_ID,), lambda text: [1 + b for b in text.encode()]
)


def grammar_of(schema: Any, **options: bool) -> Grammar:
    return build_grammar(
        compile_spec(JsonSchema(schema, **{"compact": not options.get("whitespace"), **options}), BYTE_VOCABULARY),
        BYTE_VOCABULARY,
    )


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether the grammar accepts the text. Where llguidance exceeds its limits it does not: the call fails."""
    matcher = grammar.matcher()
    try:
        return all(matcher.accept(1 + byte) for byte in text.encode()) and matcher.is_accepting
    except GrammarError as error:
        if "Current row has" not in error.reason:
            raise
        return False


def reference_validator(schema: Any) -> Any:
    return jsonschema_rs.validator_for(schema, validate_formats=True)


def exceeds_double_range(text: str | None) -> bool:
    """Whether a number of the JSON text overflows a double, such as 1e999: no validator accepts the infinity."""
    return text is not None and "inf" in repr(json.loads(text)).lower()


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-20, 20), st.sampled_from(["", "a", "b", "ab", "abc", "ba", "2024-01-01"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=3),
    max_leaves=6,
)
LEAVES = st.one_of(
    st.booleans(),
    st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"]).map(lambda t: {"type": t}),
    st.lists(SCALARS, min_size=1, max_size=3).map(lambda listed: {"enum": listed}),
    SCALARS.map(lambda value: {"const": value}),
    st.integers(0, 3).map(lambda n: {"minLength": n}),
    st.integers(0, 3).map(lambda n: {"maxLength": n}),
    st.integers(-5, 5).map(lambda n: {"minimum": n}),
    st.integers(-5, 5).map(lambda n: {"exclusiveMaximum": n}),
    st.sampled_from(["^a", "b$", "^[ab]{2}$", "a"]).map(lambda pattern: {"pattern": pattern}),
    st.lists(st.sampled_from("abc"), min_size=1, max_size=2, unique=True).map(lambda names: {"required": names}),
    st.integers(0, 2).map(lambda n: {"minItems": n}),
    st.integers(0, 2).map(lambda n: {"maxItems": n}),
    st.integers(0, 3).map(lambda n: {"minProperties": n}),
    st.integers(0, 2).map(lambda n: {"maxProperties": n}),
    st.just({"uniqueItems": True, "items": {"enum": [1, "a"]}}),
    st.just({"dependentRequired": {"a": ["b"], "b": ["c"]}}),
)


def _composed(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, min_size=1, max_size=3)
    named = st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=2)
    return st.one_of(
        some.map(lambda listed: {"oneOf": listed}),
        some.map(lambda listed: {"anyOf": listed}),
        some.map(lambda listed: {"allOf": listed}),
        inner.map(lambda one: {"not": one}),
        st.tuples(inner, inner, inner).map(lambda three: dict(zip(("if", "then", "else"), three, strict=True))),
        st.tuples(named, inner).map(lambda two: {"properties": two[0], "additionalProperties": two[1]}),
        st.tuples(named, st.sampled_from(["a", "b"])).map(
            lambda t: {"type": "object", "properties": t[0], "required": [t[1]]}
        ),
        inner.map(lambda one: {"items": one}),
        inner.map(lambda one: {"contains": one, "maxItems": 2}),
        inner.map(lambda one: {"patternProperties": {"^a": one}}),
        named.map(lambda some: {"dependentSchemas": some}),
        st.sampled_from([{"pattern": "^a"}, {"enum": ["a", "b"]}, {"maxLength": 1}]).map(
            lambda n: {"propertyNames": n}
        ),
        st.tuples(inner, inner)
        .filter(lambda two: all(isinstance(i, dict) for i in two))
        .map(lambda two: {**two[0], **two[1]}),
    )


SCHEMAS = st.recursive(LEAVES, _composed, max_leaves=7)


# Schemas of all keywords, for the fuzzer.
_NUMBERS = st.one_of(
    st.integers(-12, 12).map(lambda n: n / 4), st.sampled_from([0, 1, 0.1, 0.95, -0.05, 0.33, 2.5, 1e3, 2**53 + 2])
)
_NAMES = st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
_TEXTS = ["2024-02-29", "12:30:00Z", "a@b.co", "192.168.0.1", "::1", "aB1", "A", " ", "é", "\n"]
_MORE_LEAVES = st.one_of(
    st.dictionaries(_NAMES, _NUMBERS, min_size=1, max_size=2),
    st.dictionaries(_NAMES, _NUMBERS, min_size=1, max_size=2).map(lambda bounds: {"type": "number", **bounds}),
    st.dictionaries(_NAMES, _NUMBERS, min_size=1, max_size=2).map(lambda bounds: {"type": "integer", **bounds}),
    st.tuples(_NAMES, _NUMBERS, st.sampled_from([0.25, 0.1, 0.5, 2, 3])).map(
        lambda three: {"type": "number", three[0]: three[1], "multipleOf": three[2]}
    ),
    st.sampled_from([0.5, 0.01, 1, 2, 3]).map(lambda step: {"multipleOf": step}),
    st.sampled_from(["date", "time", "email", "ipv4", "ipv6"]).map(lambda name: {"type": "string", "format": name}),
    st.lists(st.sampled_from(["null", "integer", "string", "array"]), min_size=1, max_size=3, unique=True).map(
        lambda types: {"type": types}
    ),
    st.just({"$ref": "#/$defs/d"}),
    st.just({"uniqueItems": True}),
    st.sampled_from([{"enum": [0.5, 1, None]}, {"const": {"a": 1}}, {"enum": [[], [1], "a"]}]),
)


def _more_composed(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    counts = st.dictionaries(st.sampled_from(["minContains", "maxContains", "minItems", "maxItems"]), st.integers(0, 2))
    return st.one_of(
        _composed(inner),
        st.tuples(st.lists(inner, min_size=1, max_size=2), inner).map(
            lambda two: {"type": "array", "prefixItems": two[0], "items": two[1]}
        ),
        st.tuples(inner, counts).map(lambda two: {"contains": two[0], **two[1]}),
        st.tuples(inner, inner).map(
            lambda two: {
                "properties": {"a": two[0]},
                "anyOf": [True, {"properties": {"b": two[1]}}],
                "unevaluatedProperties": False,
            }
        ),
        st.tuples(inner, inner).map(
            lambda two: {
                "prefixItems": [two[0]],
                "anyOf": [True, {"prefixItems": [True, two[1]]}],
                "unevaluatedItems": False,
            }
        ),
        st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
            lambda t: {
                "type": "object",
                "additionalProperties": t[0],
                "minProperties": t[1],
                "maxProperties": t[1] + t[2],
            }
        ),
        st.tuples(inner, inner).map(lambda two: {"patternProperties": {"^a": two[0], "b$": two[1]}}),
        inner.map(lambda one: {"propertyNames": one}),
    )


_ANY_SCHEMAS = st.recursive(LEAVES | _MORE_LEAVES, _more_composed, max_leaves=6)
ALL_SCHEMAS = st.tuples(_ANY_SCHEMAS, _ANY_SCHEMAS).map(
    lambda two: {**two[0], "$defs": {"d": two[1]}} if isinstance(two[0], dict) else two[0]
)
ALL_VALUES = st.recursive(
    st.one_of(SCALARS, _NUMBERS, st.sampled_from(_TEXTS)),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "c", "ab"]), inner, max_size=3)
    ),
    max_leaves=5,
)
