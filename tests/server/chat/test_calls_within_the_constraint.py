"""Calls that the constraint allows, of schemas of every shape: the parser reads them as arguments that are valid."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import jsonschema_rs
import pytest
from call_templates import CALL_TEMPLATES, formats_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matchers import allowed_tokens, compile_in_process
from schema_strategies import BYTE_VOCABULARY, EOS_ID, exceeds_double_range

from plait.constrained import GrammarError
from plait.constrained.tool_arguments import closed_arguments
from plait.runtime.chat.derivation.model_formats import written_calls
from plait.runtime.chat.derivation.template_probe import NAMES, TemplateProbe
from plait.runtime.chat.formats.call_format import CallFormat, ElementArguments
from plait.runtime.chat.parser import OutputParser
from plait.runtime.server.chat.conversation import Conversation, ToolDefinition, Turn
from plait.runtime.server.chat.tool_constraint import tool_constraint
from plait.runtime.server.errors import ApiError
from plait.runtime.tokenizer.chat_template import ChatTemplate

KINDS = (
    *("json in tags", "list with ids", "elements", "keys and values", "typed elements"),
    *("elements that python writes", "keywords", "counted calls", "notation", "notation in the given order"),
    *("keywords in single quotes", "elements with sections"),
)
TEMPLATES = [ChatTemplate(CALL_TEMPLATES[kind].source, "", "") for kind in KINDS]
FORMATS = [formats_of(kind).calls for kind in KINDS]
VALUES: list[Any] = [
    *({"type": kind} for kind in ("string", "integer", "number", "boolean", "object", ["string", "null"])),
    *({"enum": values} for values in (["a", "5", "x y"], ["a", 1, None, True], ["[1]", 2])),
    *({"type": kinds} for kinds in (["boolean", "null"], ["string", "boolean"])),
    {"type": ["integer", "null"], "multipleOf": 3},
    *({"$ref": reference} for reference in ("#/$defs/S", "#text", "https://example.org/x#text", "#/$defs/I")),
    *({}, True, {"const": "5"}, {"not": {"type": "string"}}, {"type": "string", "pattern": "^[0-9]{1,3}$"}),
    {"anyOf": [{"type": "string"}, {"type": "integer", "maximum": 9}]},
    {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "array"}]},
    {"type": "array", "uniqueItems": True, "items": {"type": "integer"}},
]
DEFINITIONS = {"S": {"$anchor": "text", "type": "string"}, "I": {"type": "integer"}}
OBJECTS = st.dictionaries(st.sampled_from(["a", "b", "x-y"]), st.sampled_from(VALUES), max_size=3).flatmap(
    lambda properties: st.sampled_from([[], [*properties][:1], [*properties]]).map(
        lambda required: {"type": "object", "properties": properties, "required": required}
    )
)
SCHEMAS = st.one_of(
    OBJECTS,
    OBJECTS.map(lambda one: {"$ref": "#/$defs/O", "$defs": {"O": one}}),
    OBJECTS.map(lambda one: {"allOf": [one]}),
    st.lists(OBJECTS, min_size=2, max_size=2).map(lambda cases: {"anyOf": cases}),
).map(lambda schema: {**schema, "$id": "https://example.org/x", "$defs": DEFINITIONS | schema.get("$defs", {})})


def written(call_format: CallFormat, schema: dict[str, Any], seed: int) -> str | None:
    """An answer that the masks allow; None if there is none, or none that ends soon."""
    conversation = Conversation((Turn("user", "go"),), (ToolDefinition("f", "", schema),), must_call=True)
    rng, tokens = random.Random(seed), list[int]()
    likely = {1 + byte for byte in f'"5 a1[]{{}},:{call_format.tail}{call_format.separator}'.encode()}
    try:
        matcher = compile_in_process(tool_constraint(call_format, conversation), BYTE_VOCABULARY).matcher()
        while len(tokens) < 150:
            allowed = [token for token in allowed_tokens(matcher, BYTE_VOCABULARY) if token != EOS_ID]
            if not allowed:
                break
            preferred = [token for token in allowed if token in likely]
            tokens.append(rng.choice(preferred if preferred and rng.random() < 0.9 else allowed))
            assert matcher.accept(tokens[-1])
        rest = matcher.completion(2000)
    except GrammarError:
        return None
    return None if rest is None else bytes(token - 1 for token in [*tokens, *rest] if token != EOS_ID).decode()


def read(call_format: CallFormat, schema: dict[str, Any], pieces: list[str], name: str = "f") -> list[str]:
    parser = OutputParser(None, False, call_format, {name: schema})
    parts = [*itertools.chain(*map(parser.push, pieces)), *parser.finish()]
    assert parser.num_calls and not parser.is_within_arguments and not any(part.kind == "text" for part in parts)
    numbers = range(parser.num_calls)
    return ["".join(p.text for p in parts if p.kind == "arguments" and p.number == number) for number in numbers]


@given(st.sampled_from(FORMATS), SCHEMAS, st.integers(0, 1 << 30))
@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_masks_allow_is_read_as_valid_arguments(
    call_format: CallFormat, schema: dict[str, Any], seed: int
) -> None:
    """However the text is split."""
    text = written(call_format, schema, seed)
    if text is None:
        return
    calls = read(call_format, schema, [text])
    assert calls == read(call_format, schema, list(text)), text
    for call in calls:
        is_valid = jsonschema_rs.validator_for(closed_arguments(schema)).is_valid(json.loads(call))
        assert is_valid or exceeds_double_range(call), (text, call)


ARGUMENTS = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        ("a", "b", "x-y"),
        st.recursive(
            st.sampled_from(
                ["", "5", "a", "x y", "true", "True", "None", "[1]", "it's", 'a "b"', "a<b", "a\nb"]
                + [1, 2.5, True, False, None]
            ),
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("kq"), inner, max_size=2),
            max_leaves=4,
        ),
    ),
)


@given(st.sampled_from(range(len(KINDS))), SCHEMAS, ARGUMENTS)
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_a_template_writes_is_allowed_only_if_it_is_valid_and_reads_back(
    kind: int, schema: dict[str, Any], arguments: dict[str, Any]
) -> None:
    """The converse holds but for a string that is JSON or a literal of another type that the argument may have."""
    call_format, written = FORMATS[kind], TemplateProbe(TEMPLATES[kind])
    assert call_format is not None
    order, name = [*schema.get("properties", ()), *arguments], NAMES[0]
    arguments = dict(sorted(arguments.items(), key=lambda item: order.index(item[0])))
    ((id_, _, given),) = calls = [("qzid00000", name, call_format.template_arguments(arguments))]
    text = written_calls(call_format, written.calls(calls) or "", calls)
    assert text is not None, (given, id_)
    conversation = Conversation((Turn("user", "go"),), (ToolDefinition(name, "", schema),), must_call=True)
    try:
        matcher = compile_in_process(tool_constraint(call_format, conversation), BYTE_VOCABULARY).matcher()
    except (GrammarError, ApiError):
        return
    is_allowed = all(matcher.accept(1 + byte) for byte in (call_format.lead + text).encode()) and matcher.is_accepting
    validator = jsonschema_rs.validator_for(closed_arguments(schema))
    is_valid = validator.is_valid(arguments)
    if is_allowed:
        (call,) = read(call_format, schema, list(text), name)
        assert validator.is_valid(json.loads(call)), text  # an element of [] is a string where one is wanted
        assert call_format.arguments.render(json.loads(call)) == call_format.arguments.render(arguments)
    elif is_valid and schema.get("type") == "object":
        is_elements = isinstance(call_format.arguments, ElementArguments)
        has_text = is_elements and any(isinstance(value, str) for value in arguments.values())
        is_writable = not KINDS[kind].startswith("keywords") or "x-y" not in arguments
        assert has_text or not is_writable, (schema, text)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"$ref": "#text"}}, "$defs": {"S": {"$anchor": "text", "type": "string"}}},
        {"$ref": "#/$defs/O", "$defs": {"O": {"properties": {"a": {"type": "string"}}}}},
        {"allOf": [{"properties": {"a": {"type": "string"}}}]},
        {"properties": {"a": {"not": {"type": ["number", "array", "object", "boolean", "null"]}}}},
    ],
)
def test_a_text_that_is_json_is_a_string_where_the_schema_wants_one(schema: dict[str, Any]) -> None:
    """However it says so."""
    call_format = FORMATS[KINDS.index("elements")]
    text = call_format.render_calls([("", "f", {"a": "5"})])
    assert read(call_format, schema, [text]) == ['{"a": "5"}']


def test_a_text_is_no_string_in_one_case_and_json_in_another() -> None:
    """A reader knows the names of arguments, not which case of the schema they belong to."""
    cases = [
        {"properties": {"a": {"type": kind}, "b": {"const": kind}}, "required": ["a", "b"]}
        for kind in ("string", "integer")
    ]
    call_format, schema = FORMATS[KINDS.index("elements")], {"type": "object", "anyOf": cases}
    conversation = Conversation((Turn("user", "go"),), (ToolDefinition("f", "", schema),), must_call=True)
    grammar = compile_in_process(tool_constraint(call_format, conversation), BYTE_VOCABULARY)
    for arguments, expected in (({"a": "5", "b": "string"}, False), ({"a": "x", "b": "string"}, True)):
        matcher = grammar.matcher()
        text = call_format.lead + call_format.render_calls([("", "f", arguments)])
        assert all(matcher.accept(1 + byte) for byte in text.encode()) == expected


@pytest.mark.parametrize("tool_count", [1, 2])
def test_bare_json_is_a_call_only_where_it_begins_the_answer(tool_count: int) -> None:
    """Elsewhere the text quotes or explains JSON, and no constraint turns it into a call."""
    call_format = formats_of("bare json").calls
    assert call_format is not None and call_format.is_whole_answer
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}}}
    tools = tuple(ToolDefinition(name, "", schema) for name in ("f", "f_x")[:tool_count])
    conversation = Conversation((Turn("user", "go"),), tools)
    grammar = compile_in_process(tool_constraint(call_format, conversation), BYTE_VOCABULARY)

    def accepts(text: str) -> bool:
        matcher = grammar.matcher()
        return all(matcher.accept(1 + byte) for byte in text.encode()) and matcher.is_accepting

    call = call_format.render_calls([("", "f", {"a": [1]})])
    texts = ["", "hm", '{"name": "John"}', f"Write {call}", f'So: {{"name": "x"}}, or `{call}` [1, 1]', '{"na']
    for text in texts:
        assert accepts(text)
        for pieces in ([text], list(text)):
            parser = OutputParser(None, False, call_format, {tool.name: schema for tool in tools})
            parts = [*itertools.chain(*map(parser.push, pieces)), *parser.finish()]
            assert "".join(part.text for part in parts) == text and not parser.num_calls
    assert accepts(call) and read(call_format, schema, list(call)) == ['{"a": [1]}']
    assert not any(map(accepts, (call[:-1], call.replace("[1]", "[1, 1]"), " " + call, call.replace("[1]", "3"))))


@pytest.mark.parametrize("kind", ["elements", "elements that python writes"])
def test_a_text_that_is_a_literal_of_json_is_a_text_where_python_writes_literals(kind: str) -> None:
    call_format = FORMATS[KINDS.index(kind)]
    schema = {"type": "object", "properties": {"a": {"type": ["string", "boolean", "null", "array"]}}}
    for value in ("true", "null", True, None, "x", [True, None]):
        text = call_format.render_calls([("", "f", {"a": value})])
        assert read(call_format, schema, list(text)) == [json.dumps({"a": value})]


@pytest.mark.parametrize(
    ("kind", "value", "other"),
    [
        ("keywords in single quotes", "x y", '"x y"'),
        ("keywords in single quotes", 'say "hi"', r'"say \"hi\""'),
        ("elements with sections", "x y", "<![CDATA[x y]]>"),
        ("elements with sections", "if a < b:\n  c", "if a < b:\n  c"),
        ("notation", "it's {x: 1}", '"it\'s {x: 1}"'),
    ],
)
@pytest.mark.parametrize("types", ["string", ["string", "integer", "array"]])
def test_a_string_is_offered_only_as_the_template_writes_it(kind: str, value: str, other: str, types: Any) -> None:
    """Another spelling would part the next turn's prompt from the tokens in the cache."""
    call_format, probe = FORMATS[KINDS.index(kind)], TemplateProbe(TEMPLATES[KINDS.index(kind)])
    assert call_format is not None
    arguments, schema = {"a": value}, {"type": "object", "properties": {"a": {"type": types}}}
    text = call_format.render_calls([("", NAMES[0], arguments)])
    assert text in (probe.calls([("", NAMES[0], call_format.template_arguments(arguments))]) or "")
    conversation = Conversation((Turn("user", "go"),), (ToolDefinition(NAMES[0], "", schema),), must_call=True)
    grammar = compile_in_process(tool_constraint(call_format, conversation), BYTE_VOCABULARY)
    plain = call_format.render_calls([("", NAMES[0], {"a": "zq"})])
    spelled = next(s for s in ("'zq'", '<|"|>zq<|"|>', "zq") if s in plain)
    for written, expected in ((text, True), (plain.replace(spelled, other), False)):
        matcher = grammar.matcher()
        assert (all(matcher.accept(1 + byte) for byte in written.encode()) and matcher.is_accepting) == expected, (
            written
        )
    assert read(call_format, schema, list(text), NAMES[0]) == [json.dumps(arguments)]


@pytest.mark.parametrize("kind", ["elements with sections", "elements", "elements that python writes"])
@pytest.mark.parametrize("text", ["true", "True", "[true, None]", "[True, null]"])
def test_literals_are_read_in_either_spelling_where_they_are_no_text(kind: str, text: str) -> None:
    """The constraint offers that which the template writes; models are said to write the other, too."""
    call_format = FORMATS[KINDS.index(kind)]
    assert call_format is not None
    schema = {"type": "object", "properties": {"a": {"type": ["boolean", "array"]}}}
    written = call_format.render_calls([("", "f", {"a": "zq"})]).replace("zq", text)
    assert json.loads(read(call_format, schema, list(written))[0]) == {"a": True if "[" not in text else [True, None]}
