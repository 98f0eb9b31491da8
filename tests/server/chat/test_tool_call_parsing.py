"""Tool calls without a model: whatever a model may write under the constraint, the reader finds calls that fit.

A random walk takes the place of the model. It writes a call's beginning when it likes, and otherwise any token that the
mask leaves.
"""

from __future__ import annotations

import itertools
import json
import random

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.constrained import JsonSchema
from plait.constrained.compiler import build_grammar, compile_spec
from plait.runtime.model_files.locate import locate_model
from plait.runtime.server.chat.conversation import Conversation, ToolCall, ToolDefinition, Turn
from plait.runtime.server.chat.formats import (
    GENERIC_FORMAT,
    GENERIC_FORMAT_BESIDE_JSON,
    TOOL_FORMATS,
    ReasoningFormat,
    tool_constraint,
    tool_format,
)
from plait.runtime.server.chat.parser import OutputParser, ParsedPart
from plait.runtime.tokenizer.tokenizer import load_tokenizer

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}, "unit": {"$ref": "#/$defs/unit"}},
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F", "}</tool_call>]"]}},
}
COUNT = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOLS = (ToolDefinition("weather", "", WEATHER), ToolDefinition("count", "", COUNT))
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
THINK = ReasoningFormat("<think>", "</think>")
FORMATS = (GENERIC_FORMAT, *TOOL_FORMATS)


def added(parts):
    """[(kind, number, the whole text)] of what the parts add up to."""
    out = []
    for part in parts:
        if out and part.kind not in ("call",) and out[-1][:2] == (part.kind, part.number):
            out[-1] = (part.kind, part.number, out[-1][2] + part.text)
        else:
            out.append((part.kind, part.number, part.text))
    return out


def read(pieces, style, reasoning=None, thinks=False, names=("weather", "count"), is_json=False):
    parser = OutputParser(reasoning, thinks, (style, names) if style else None, is_json)
    parts = [part for piece in pieces for part in parser.push(piece)]
    return added([*parts, *parser.finish()])


def compiled(spec, vocabulary):
    """Here, not in a child process, whose deadline a busy machine may miss."""
    return build_grammar(compile_spec(spec, vocabulary), vocabulary)


@pytest.fixture(scope="module")
def vocabulary():
    return load_tokenizer(locate_model()).vocabulary


@pytest.mark.parametrize("style", FORMATS, ids=lambda style: style.template_marker or "plain")
@pytest.mark.parametrize(("must_call", "one_call"), [(False, False), (True, False), (True, True)])
def test_whatever_is_written_under_the_constraint_fits(vocabulary, style, must_call, one_call) -> None:
    asked = Conversation((Turn("user", "hi"),), TOOLS, must_call=must_call, one_call=one_call)
    grammar = compiled(tool_constraint(style, asked), vocabulary)
    num_calls = 0
    for seed in range(4):
        text = walk(grammar, vocabulary, [*style.call_openers(list(SCHEMAS))], random.Random(seed))
        found = read([text], style)
        calls = [(name, arguments) for (k, _, name), (_, _, arguments) in pairs(found)]
        num_calls += len(calls)
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        assert len(calls) == 1 if one_call else len(calls) >= must_call
        if must_call:
            assert not [part for part in found if part[0] == "text"]
    assert num_calls >= 3


ANSWERS = {
    "type": "object",
    "properties": {"tool_call": {"enum": ["<tool_call>", 1]}, "name": {"type": "string", "maxLength": 4}},
}


@pytest.mark.parametrize(
    "style", [GENERIC_FORMAT_BESIDE_JSON, *TOOL_FORMATS], ids=lambda style: style.template_marker or "plain"
)
@pytest.mark.parametrize("one_call", [False, True])
def test_a_call_or_an_answer_of_json(vocabulary, style, one_call) -> None:
    """Whatever is written is either, and is read as what it is, however it is cut."""
    answer = JsonSchema(ANSWERS | {"additionalProperties": False})
    asked = Conversation((Turn("user", "hi"),), TOOLS, one_call=one_call, constraint=answer)
    grammar = compiled(tool_constraint(style, asked), vocabulary)
    kinds = set()
    for seed in range(12):
        text = walk(grammar, vocabulary, [*style.call_openers(list(SCHEMAS)), "{"], random.Random(seed), limit=20)
        found = read([text], style, is_json=True)
        assert found == read(list(text), style, is_json=True)
        kinds.add(found[0][0])
        if found[0][0] == "text":
            assert found == [("text", 0, text)]
            jsonschema.validate(json.loads(text), ANSWERS)
        else:
            calls = [(name, arguments) for (_, _, name), (_, _, arguments) in pairs(found)]
            assert len(found) == 2 * len(calls) and (len(calls) == 1 or not one_call)
            for name, arguments in calls:
                jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert kinds == {"text", "call"}


def pairs(found):
    return [(a, b) for a, b in itertools.pairwise(found) if a[0] == "call" and b[0] == "arguments"]


def walk(grammar, vocabulary, begins, chance, limit=80):
    """A text that the constraint allows, ended by itself or, after `limit` tokens, as soon as it may end."""
    matcher, data = grammar.matcher(), b""
    row = np.zeros((len(vocabulary) + 31) // 32, dtype=np.int32)
    for step in range(limit * 20):
        if matcher.is_accepting and (step > limit or chance.random() < 0.02):
            return data.decode("utf-8", "replace")
        if chance.random() < 0.2:
            opening = vocabulary.encode(chance.choice(begins))
            taken = 0
            for token in opening:
                if not matcher.accept(token):
                    break
                taken, data = taken + 1, data + vocabulary.token_bytes[token]
            if taken:
                continue
        matcher.fill_mask(row)
        bits = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        letters = [int(t) for t in bits if t not in vocabulary.eos_ids and vocabulary.token_bytes[t].isascii()]
        if not letters:
            return data.decode("utf-8", "replace")
        token = chance.choice(letters)
        assert matcher.accept(token)
        data += vocabulary.token_bytes[token]
    raise AssertionError("the text did not end")


@pytest.mark.parametrize("style", FORMATS, ids=lambda style: style.template_marker or "plain")
@given(cuts=st.lists(st.integers(0, 200), max_size=12), thinks=st.booleans())
def test_how_a_text_is_cut_makes_no_difference(style, cuts, thinks) -> None:
    calls = [ToolCall("", "weather", '{"city":"a}\\"","unit":"}</tool_call>]"}'), ToolCall("", "count", '{"n":7}')]
    thought = "hm < </thin\n" + ("</think>\n\n" if thinks else "")
    text = (thought if thinks else "") + "I see {\n" + "\n".join(map(style.write, calls)) + " done "
    edges = [0, *sorted(cut % len(text) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert read(pieces, style, THINK, thinks) == read([text], style, THINK, thinks)
    assert read([text], style, THINK, thinks) == [
        *([("reasoning", 0, "hm < </thin\n")] if thinks else []),
        ("text", 0, "I see {"),
        ("call", 0, "weather"),
        ("arguments", 0, calls[0].arguments),
        ("call", 1, "count"),
        ("arguments", 1, calls[1].arguments),
        ("text", 0, " done"),
    ]


@given(st.text(alphabet='<think>/ \n{a"', max_size=40), st.lists(st.integers(0, 40), max_size=5))
def test_text_without_tools_or_reasoning_comes_through_whole(text, cuts) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    found = read([text[a:b] for a, b in itertools.pairwise(edges)], None)
    assert "".join(part[2] for part in found) == text and all(part[0] == "text" for part in found)


def test_reasoning_that_is_opened_by_the_model_or_never_closed() -> None:
    assert read(["<thi", "nk>ab", "c</th", "ink>\n\nyes"], None, THINK) == [("reasoning", 0, "abc"), ("text", 0, "yes")]
    assert read(["abc"], None, THINK, thinks=True) == [("reasoning", 0, "abc")]
    assert read(["a <think> b"], None, THINK) == [("text", 0, "a <think> b")]
    assert read(["<thin"], None, THINK) == [("text", 0, "<thin")]


@pytest.mark.parametrize(
    ("template", "begin"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", GENERIC_FORMAT.begin),
        ("{% if tools %}<tool_call>{% endif %}", "<tool_call>"),
        ("{% if tools %}[AVAILABLE_TOOLS][TOOL_CALLS]{% endif %}", "[TOOL_CALLS]["),
        ("{% if tools %}<|python_tag|>{% endif %}", '{"name": "{name}", "parameters": '),
        ("<tool_call> without a list of them", GENERIC_FORMAT.begin),
    ],
)
def test_the_template_names_the_format(template, begin) -> None:
    assert tool_format(template).begin == begin


def test_parts_are_read_as_they_come() -> None:
    parser = OutputParser(None, False, (GENERIC_FORMAT, ["count"]))
    assert parser.push("Let me see. {") == [ParsedPart("text", "Let me see.")]
    assert parser.push('"tool_call": {"name": "co') == []
    assert parser.push('unt","arguments":{') == [ParsedPart("call", "count"), ParsedPart("arguments", "{")]
    assert parser.push('"n":1') == [ParsedPart("arguments", '"n":1')]
    assert parser.push("}}}") == [ParsedPart("arguments", "}")]
    assert parser.finish() == []
