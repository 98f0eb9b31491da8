"""Objects of hundreds of optional properties: their Lark grammar has the language of llguidance's own."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from typing import Any
from unittest import mock

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matchers import allowed_tokens
from schema_strategies import BYTE_VOCABULARY, EOS_ID, accepts, grammar_of, reference_validator

from plait.constrained import GrammarError, JsonSchema
from plait.constrained.guidance.llguidance_grammar import LlguidanceGrammar, LlguidanceSource
from plait.constrained.json_schema import lark_writer
from plait.constrained.json_schema.lark_writer import write_lark
from plait.constrained.json_schema.rewrite.rewriter import rewrite_schema
from plait.constrained.json_schema.schema_compiler import with_options

NAMES = ["a", "ab", "b", "p1", "p12", "é", 'q"', "x/y", "\U0001f600", ""]
REFERENCES = [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/tree"}]
SCALARS = st.sampled_from(
    [{"type": "integer"}, {"type": "string", "maxLength": 2}, {"enum": [1, "a"]}, True, *REFERENCES]
)


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(NAMES), max_size=6, unique=True))
    schema: dict[str, Any] = {"properties": {name: draw(inner) for name in names}}
    schema["type"] = draw(st.sampled_from(["object", ["object", "null"]]))
    schema["required"] = draw(st.lists(st.sampled_from(names), max_size=2, unique=True)) if names else []
    additional = draw(st.sampled_from([None, True, False, {"type": "boolean"}]))
    if additional is not None:
        schema["additionalProperties"] = additional
    if additional is not False and draw(st.booleans()):
        schema["required"].append("beyond")
    return schema


SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        _objects(inner),
        inner.map(lambda one: {"anyOf": [{"type": "null"}, one]}),
        st.tuples(inner, inner).map(lambda two: {"anyOf": list(two)}),
        st.tuples(inner, inner, st.integers(0, 2)).map(
            lambda t: {"type": "array", "prefixItems": [t[0], t[0]], "items": t[1], "minItems": t[2]}
        ),
        st.tuples(inner, st.integers(0, 2)).map(
            lambda two: {"type": "array", "items": two[0], "minItems": two[1], "maxItems": two[1] + 1}
        ),
    ),
    max_leaves=6,
)


def test_the_grammar_of_a_schema_is_the_same_in_every_process() -> None:
    """The order of the definitions that a JSON schema in it needs was that of a set."""
    program = (
        "from plait.constrained.json_schema.lark_writer import write_lark\n"
        "definitions = {f'd{n}': {'items': {'$ref': f'#/$defs/d{n + 1}'}} for n in range(9)} | {'d9': {}}\n"
        "schema = {'type': 'number', 'minimum': 0.5}, {'prefixItems': [{'$ref': f'#/$defs/d{n}'} for n in (5, 3, 7)]}\n"
        "print(write_lark({'anyOf': [*schema], '$defs': definitions}, str, (',', ':')))"
    )
    written = {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in "123"
    }
    assert len(written) == 1 and b"%json" in written.pop()


def _both_grammars(schema: dict[str, Any]) -> tuple[LlguidanceGrammar, LlguidanceGrammar] | None:
    """Returns llguidance's own grammar and the written one; None if there is nothing to write."""
    spec = JsonSchema(schema, compact=True)
    rewritten = rewrite_schema(spec.text).schema
    with mock.patch.object(lark_writer, "WIDE_FROM", 1):
        lark = write_lark(rewritten, lambda part: with_options(part, spec), (",", ":"))
    if lark is None:
        return None
    own = llguidance.LLMatcher.grammar_from_json_schema(with_options(rewritten, spec))
    written = llguidance.LLMatcher.grammar_from_lark("\n".join(lark))
    try:
        own_grammar = LlguidanceGrammar(LlguidanceSource(own), BYTE_VOCABULARY)
    except GrammarError:
        return None  # no value is finite
    return own_grammar, LlguidanceGrammar(LlguidanceSource(written), BYTE_VOCABULARY)


@settings(max_examples=60, deadline=None)
@given(_objects(SCHEMAS), st.integers(0, 1 << 30))
def test_the_written_grammar_has_the_masks_of_llguidances_own(schema: dict[str, Any], seed: int) -> None:
    grammars = _both_grammars({**schema, "$defs": {"leaf": {"type": "boolean"}, "tree": schema}})
    if grammars is None:
        return
    rng = random.Random(seed)
    for _ in range(4):
        own, written = (grammar.matcher() for grammar in grammars)
        for _ in range(80):
            allowed = allowed_tokens(own, BYTE_VOCABULARY)
            assert allowed == allowed_tokens(written, BYTE_VOCABULARY)
            candidates = [token for token in allowed if token != EOS_ID]
            if not candidates:
                break
            structural = [token for token in candidates if chr(token - 1) in '"{}[],:']
            token = rng.choice(structural if structural and rng.random() < 0.5 else candidates)
            assert own.accept(token) and written.accept(token)


@pytest.mark.parametrize("options", [{}, {"whitespace": True}], ids=str)
def test_alternatives_that_begin_alike_are_all_followed(options: dict[str, bool]) -> None:
    """One is written in Lark for its bound, the other one stays a JSON schema."""
    low = {"type": "object", "properties": {"b": {"type": "number", "maximum": 0.5}}, "required": ["b"]}
    schema = {
        "anyOf": [
            {"type": "array", "items": low},
            {"type": "array", "minItems": 3},
            {"type": "array", "items": {"maximum": 0}},
        ]
    }
    grammar, validator = grammar_of(schema, **options), reference_validator(schema)
    for text in (
        '[{"b":1},1,[]]',
        '[{"b":0.5},{"b":0.4}]',
        '[{"b":1}]',
        "[-1,2]",
        "[0,-1.5]",
        "[]",
        '[{"c":1},{"b":0},"x"]',
    ):
        assert accepts(grammar, text) is validator.is_valid(json.loads(text)), text
        spaced = text.replace(",", " , ").replace("[", "[ ").replace(":", " :\n")
        assert accepts(grammar, spaced) is (bool(options) and validator.is_valid(json.loads(text))) or spaced == text


def _many(num: int, **more: Any) -> dict[str, Any]:
    kinds = [{"type": "integer"}, {"type": "string"}, {"type": "array", "items": {"$ref": "#/$defs/leaf"}}]
    named = {f"property_{at}": kinds[at % 3] for at in range(num)}
    return {"type": "object", "properties": named, "$defs": {"leaf": {"type": "boolean"}}, **more}


@pytest.mark.parametrize("more", [{}, {"additionalProperties": False}, {"required": ["property_7", "other"]}])
def test_thousands_of_optional_properties(more: dict[str, Any]) -> None:
    schema = _many(2000, **more)
    grammar, validator = grammar_of(schema), reference_validator(schema)
    valid = {"property_7": "a", "property_20": [True, False], "property_1999": "b", "other": 1}
    if "additionalProperties" in more:
        del valid["other"]
    assert validator.is_valid(valid) and accepts(grammar, json.dumps(valid, separators=(",", ":")))
    for wrong in ({**valid, "property_20": 1}, {**valid, "property_1999": 5}, {"property_8": "a"}):
        assert not accepts(grammar, json.dumps(wrong, separators=(",", ":"))), wrong
    assert accepts(grammar, "{}") is ("required" not in more)


def test_a_wide_object_behind_references_arrays_and_alternatives() -> None:
    wide = _many(600)
    definitions = wide.pop("$defs")
    wide["properties"]["me"] = {"$ref": "#"}
    row = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/wide"}]}
    schema = {
        "type": "object",
        "properties": {"rows": {"type": "array", "items": row}},
        "required": ["rows"],
        "additionalProperties": False,
        "$defs": {**definitions, "wide": wide},
    }
    grammar = grammar_of(schema)
    assert accepts(grammar, '{"rows":[null,{"property_599":[true],"me":{"rows":[]}},{}]}')
    assert not accepts(grammar, '{"rows":[null,{"property_599":[true],"me":{"rows":1}}]}')


def test_alternatives_that_begin_with_hundreds_of_names_each() -> None:
    """Each object is narrow enough for llguidance, but all of them begin at one place."""
    branches = [_many(120, required=["kind"]) for _ in range(8)]
    for at, branch in enumerate(branches):
        branch["properties"] |= {"kind": {"const": f"k{at}"}}
        del branch["$defs"]
    grammar = grammar_of({"anyOf": branches, "$defs": {"leaf": {"type": "boolean"}}})
    assert accepts(grammar, '{"property_0":1,"kind":"k7"}')
