"""Schemas of tools as clients send them: each is a root of its own, and calls are what jsonschema-rs finds valid."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import openai
import pytest
from call_templates import formats_of
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.constrained import Grammar, GrammarError, Vocabulary
from plait.constrained.compiler import build_grammar, compile_spec
from plait.constrained.tool_arguments import closed_arguments
from plait.runtime.chat.derivation.format_table import GENERIC_FORMAT
from plait.runtime.chat.formats.call_format import CallFormat
from plait.runtime.server.chat.conversation import Conversation, ToolDefinition, Turn
from plait.runtime.server.chat.tool_constraint import tool_constraint
from plait.runtime.server.errors import ApiError

VOCABULARY = Vocabulary(
    (b"", *(bytes([byte]) for byte in range(256))), (0,), lambda text: [1 + byte for byte in text.encode()]
)
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
SCHEMAS: dict[str, dict[str, Any]] = {
    "anchor": {
        **{"type": "object", "properties": {"p": {"$ref": "#b"}}, "required": ["p"]},
        "$defs": {"B": {"$anchor": "b", "type": "boolean"}},
    },
    "id": {
        **{"$id": "https://example.org/f.json", "type": "object", "properties": {"p": {"$ref": "#/definitions/B"}}},
        **{"required": ["p"], "definitions": {"B": {"type": "boolean"}}},
    },
    "id_by_name": {
        **{"$id": "https://example.org/f.json", "type": "object", "properties": {"p": {"$ref": "f.json#/$defs/B"}}},
        "$defs": {"B": {"type": "integer"}},
    },
    "draft7": {
        **{"$id": "https://example.org/f", "$schema": "http://json-schema.org/draft-07/schema#", "type": "object"},
        "properties": {"p": {"type": "array", "items": [{"type": "boolean"}, DIGIT], "additionalItems": False}},
    },
    "keyword_names": {
        **{"$defs": {"B": DIGIT}, "type": "object", "required": ["enum", "examples"]},
        "properties": {
            **{name: {"$ref": "#/$defs/B"} for name in ("enum", "const", "default")},
            "examples": {"type": "array", "maxItems": 1, "items": {"$ref": "#/$defs/B"}},
        },
    },
    "recursive": {"type": "object", "properties": {"left": {"$ref": "#"}, "data": {"const": {"$ref": "#"}}}},
    "dynamic": {
        **{"$id": "https://example.org/tree", "$dynamicAnchor": "node", "type": "object"},
        "properties": {"left": {"$dynamicRef": "#node"}, "p": {"type": "null"}},
    },
    "unique": {
        "type": "object",
        "properties": {"t": {"type": "array", "uniqueItems": True, "items": {"type": "string", "maxLength": 3}}},
    },
    "open": {"type": "object"},
    "opened": {"type": "object", "properties": {"p": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
    "nested": {"type": "object", "properties": {"p": {"type": "object", "properties": {"q": {"type": "null"}}}}},
}
TOOLS = tuple(ToolDefinition(name, "", schema, f"tools[{at}]") for at, (name, schema) in enumerate(SCHEMAS.items()))
NATIVE = [formats_of(kind).calls for kind in ("json in tags", "list", "bare json")]
FORMATS = [*(native for native in NATIVE if native is not None), GENERIC_FORMAT]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 12) | st.sampled_from(["", "a", "abcd", "#", {"$ref": "#"}]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["p", "left", "data"]), inner, max_size=2)
    ),
    max_leaves=4,
)
NAMES = ["p", "t", "left", "data", "enum", "const", "default", "examples", "q"]


def grammar_of(call_format: CallFormat, *tools: ToolDefinition) -> Grammar:
    conversation = Conversation((Turn("user", "go"),), tools, must_call=True, one_call=True)
    return build_grammar(compile_spec(tool_constraint(call_format, conversation), VOCABULARY), VOCABULARY)


def accepts(grammar: Grammar, text: str) -> bool:
    matcher = grammar.matcher()
    return all(matcher.accept(1 + byte) for byte in text.encode()) and matcher.is_accepting


def call_text(call_format: CallFormat, name: str, arguments: dict[str, Any]) -> str:
    return call_format.lead + call_format.render_calls([("", name, arguments)])


ALL_TOOLS = {index: grammar_of(call_format, *TOOLS) for index, call_format in enumerate(FORMATS)}


@given(
    st.sampled_from(TOOLS),
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3),
    st.sampled_from(range(len(FORMATS))),
)
@settings(max_examples=400, deadline=None)
def test_a_call_is_accepted_if_its_arguments_are_valid(
    tool: ToolDefinition, arguments: dict[str, Any], index: int
) -> None:
    properties = tool.parameters.get("properties", {})
    order = [*properties, *(name for name in arguments if name not in properties)]
    arguments = {name: arguments[name] for name in order if name in arguments}
    closed = closed_arguments(tool.parameters)
    expected = jsonschema_rs.validator_for(closed).is_valid(arguments)
    if not _in_order(arguments):
        return
    assert accepts(ALL_TOOLS[index], call_text(FORMATS[index], tool.name, arguments)) == expected, (closed, arguments)


def _in_order(value: Any) -> bool:
    """Whether listed names of nested objects stand in the order in which the schemas above list them."""
    if isinstance(value, dict):
        names = [name for name in value if name in ("left", "data", "p")]
        order = sorted(names, key=["left", "data", "p"].index)
        return names == order and all(map(_in_order, value.values()))
    return all(map(_in_order, value)) if isinstance(value, list) else True


@pytest.mark.parametrize("tool", TOOLS, ids=list(SCHEMAS))
def test_each_schema_alone_allows_what_is_valid(tool: ToolDefinition) -> None:
    """The shortest call is valid, and an invented argument passes only where the schema is open."""
    grammar, validator = grammar_of(FORMATS[0], tool), jsonschema_rs.validator_for(closed_arguments(tool.parameters))
    completion = grammar.matcher().completion(200)
    assert completion is not None
    text = bytes(token - 1 for token in completion if token).decode()
    before, behind = call_text(FORMATS[0], tool.name, {}).split("{}")
    arguments = json.loads(text.removeprefix(before).removesuffix(behind))
    assert validator.is_valid(arguments)
    for invented in (5, "x"):
        given = {**arguments, "invented": invented}
        assert accepts(grammar, call_text(FORMATS[0], tool.name, given)) == validator.is_valid(given)


def test_only_what_a_schema_does_not_open_is_closed() -> None:
    closed = {name for name, schema in SCHEMAS.items() if closed_arguments(schema) != schema}
    assert closed == SCHEMAS.keys() - {"open", "opened"}
    assert closed_arguments(SCHEMAS["nested"])["properties"] == SCHEMAS["nested"]["properties"]
    assert "additionalProperties" not in closed_arguments({"properties": {"a": {}}, "required": ["b"]})
    assert closed_arguments({"properties": {}}) == {"properties": {}, "additionalProperties": False}
    for keyword in ("patternProperties", "unevaluatedProperties", "allOf", "$ref", "minProperties"):
        assert "additionalProperties" not in closed_arguments({"properties": {"a": {}}, keyword: {}})


def test_a_refused_schema_names_its_tool() -> None:
    bad = ToolDefinition("bad", "", {"type": "object", "properties": {"p": {"$ref": "#/nowhere"}}})
    with pytest.raises(GrammarError, match="tool 'bad': the reference points to nothing") as caught:
        grammar_of(FORMATS[0], TOOLS[0], bad)
    assert caught.value.where == "/triggers/1/content/properties/p/$ref"


@pytest.mark.parametrize("call_format", FORMATS)
def test_tools_that_no_constraint_can_tell_apart_or_hold_are_refused(call_format: CallFormat) -> None:
    twice = (ToolDefinition("f", ""), ToolDefinition("f", ""))
    many = tuple(ToolDefinition(f"f{number}", "") for number in range(129))
    for tools, reason in ((twice, "the same begin"), (many, "1 to 128 triggers")):
        with pytest.raises(ApiError, match=reason) as caught:
            grammar_of(call_format, *tools)
        assert caught.value.status == 400


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_server_calls_a_tool_of_each_schema(smollm, name: str) -> None:
    tools = [
        {"type": "function", "function": {"name": f"{name}_{number}", "parameters": SCHEMAS[name]}} for number in (1, 2)
    ]
    request = {"model": "default", "messages": [{"role": "user", "content": "go"}], "max_tokens": 40, "temperature": 0}
    answer = smollm.chat.completions.create(**request, tools=tools, tool_choice="required", parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert jsonschema_rs.validator_for(closed_arguments(SCHEMAS[name])).is_valid(arguments)


def test_a_server_refuses_one_bad_schema_and_names_it(smollm) -> None:
    bad = {"type": "object", "properties": {"p": {"$ref": "#/nowhere"}}}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in (("good", SCHEMAS["anchor"]), ("bad", bad))
    ]
    with pytest.raises(openai.BadRequestError, match="tool 'bad': the reference points to nothing"):
        smollm.chat.completions.create(model="default", messages=[{"role": "user", "content": "go"}], tools=tools)
