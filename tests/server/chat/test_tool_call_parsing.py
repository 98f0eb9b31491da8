"""Tool calls without a model: the parser finds valid calls in every text that the constraint allows.

A random walk replaces the model. It sometimes writes the beginning of a call, and otherwise any token that the mask
allows.
"""

from __future__ import annotations

import itertools
import json
import random
from functools import cache

import jsonschema
import numpy as np
import pytest
from call_templates import CALL_TEMPLATES, formats_of
from example_share import sample_of
from hypothesis import given
from hypothesis import strategies as st

from plait.constrained import JsonSchema
from plait.constrained.compiler import build_grammar, compile_spec
from plait.runtime.chat.derivation.format_table import GENERIC_FORMAT, GENERIC_FORMAT_BESIDE_JSON
from plait.runtime.chat.formats.reasoning_format import ReasoningFormat
from plait.runtime.chat.parser import OutputParser, ParsedPart
from plait.runtime.model_files.locate import locate_model
from plait.runtime.server.chat.conversation import Conversation, ToolDefinition, Turn
from plait.runtime.server.chat.tool_constraint import tool_constraint
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
TOOLS = (ToolDefinition("count_on", "", WEATHER), ToolDefinition("count", "", COUNT))
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
THINK = ReasoningFormat("<think>", "</think>")
NATIVE_FORMATS = {kind: formats_of(kind).calls for kind in CALL_TEMPLATES}
FORMATS = {"generic": GENERIC_FORMAT, **NATIVE_FORMATS}
BESIDE_JSON = {"generic": GENERIC_FORMAT_BESIDE_JSON, **NATIVE_FORMATS}


def merge(parts):
    """Joins consecutive parts of the same kind and call. Returns [(kind, number, text)]."""
    merged = []
    for part in parts:
        if merged and part.kind != "call" and merged[-1][:2] == (part.kind, part.number):
            merged[-1] = (part.kind, part.number, merged[-1][2] + part.text)
        else:
            merged.append((part.kind, part.number, part.text))
    return merged


def parse(pieces, call_format, reasoning=None, starts_in_reasoning=False, is_json=False):
    parser = OutputParser(reasoning, starts_in_reasoning, call_format, SCHEMAS if call_format else None, is_json)
    parts = [part for piece in pieces for part in parser.push(piece)]
    return merge([*parts, *parser.finish()])


def compile_grammar(spec, vocabulary):
    """Compiles in this process: the deadline of the child process may be missed on a busy machine."""
    return build_grammar(compile_spec(spec, vocabulary), vocabulary)


@pytest.fixture(scope="module")
def vocabulary():
    return load_tokenizer(locate_model()).vocabulary


@pytest.mark.parametrize(
    ("kind", "must_call", "one_call"),
    sample_of(
        [(kind, *how) for kind in FORMATS for how in ((False, False), (True, False), (True, True))], len(FORMATS) + 1
    ),
)
def test_constrained_text_has_valid_calls(vocabulary, kind, must_call, one_call) -> None:
    call_format = FORMATS[kind]
    conversation = Conversation((Turn("user", "hi"),), TOOLS, must_call=must_call, one_call=one_call)
    grammar = compile_grammar(tool_constraint(call_format, conversation), vocabulary)
    num_calls = 0
    for seed in range(4):
        begins = 1 if call_format.is_whole_answer else 0.2
        text = walk(grammar, vocabulary, openers_of(call_format), random.Random(seed), opens_at_start=begins)
        parts = parse([text], call_format)
        calls = calls_in(parts)
        num_calls += len(calls)
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        assert len(calls) == 1 if one_call else len(calls) >= must_call
        if must_call:
            assert not [part for part in parts if part[0] == "text"]
    assert num_calls >= (1 if call_format.is_whole_answer and not must_call else 3)


ANSWERS = {
    "type": "object",
    "properties": {"tool_call": {"enum": ["<tool_call>", 1]}, "name": {"type": "string", "maxLength": 4}},
}


@pytest.mark.parametrize(
    ("kind", "one_call"),
    sample_of([(kind, one_call) for kind in BESIDE_JSON for one_call in (False, True)], len(BESIDE_JSON) + 1),
)
def test_constrained_text_is_either_calls_or_a_json_answer(vocabulary, kind, one_call) -> None:
    """And the parser tells which, however the text is split."""
    call_format = BESIDE_JSON[kind]
    answer = JsonSchema(ANSWERS | {"additionalProperties": False})
    conversation = Conversation((Turn("user", "hi"),), TOOLS, one_call=one_call, constraint=answer)
    grammar = compile_grammar(tool_constraint(call_format, conversation), vocabulary)
    kinds = set()
    for seed in range(12):
        text = walk(grammar, vocabulary, [*openers_of(call_format), "{"], random.Random(seed), limit=20)
        parts = parse([text], call_format, is_json=True)
        assert parts == parse(list(text), call_format, is_json=True)
        kinds.add(parts[0][0])
        if parts[0][0] == "text":
            assert parts == [("text", 0, text)]
            jsonschema.validate(json.loads(text), ANSWERS)
        else:
            calls = calls_in(parts)
            assert len(parts) == 2 * len(calls) and (len(calls) == 1 or not one_call)
            for name, arguments in calls:
                jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert kinds == {"text", "call"}


def openers_of(call_format):
    """The openers of an answer's first call, and of other calls."""
    texts = [call_format.begin, call_format.separator]
    return [
        call_format.opener,
        *(text + call_format.call_head(name, "abcdef123") for text in texts for name in SCHEMAS),
    ]


def calls_in(parts):
    """Returns the (name, arguments) of all calls."""
    return [(a[2], b[2]) for a, b in itertools.pairwise(parts) if a[0] == "call" and b[0] == "arguments"]


@cache
def plain_tokens(vocabulary):
    """Which tokens are ASCII and do not end the text, bool [tokens]."""
    is_plain = np.array([token.isascii() for token in vocabulary.token_bytes])
    is_plain[list(vocabulary.eos_ids)] = False
    return is_plain


def walk(grammar, vocabulary, openers, rng, limit=80, opens_at_start=0.2):
    """Returns a random text that the constraint allows. After `limit` tokens it ends as soon as it may."""
    matcher, data, is_plain = grammar.matcher(), b"", plain_tokens(vocabulary)
    row = np.zeros((len(vocabulary) + 31) // 32, dtype=np.int32)
    for step in range(limit * 20):
        if matcher.is_accepting and (step > limit or rng.random() < 0.02):
            return data.decode("utf-8", "replace")
        if rng.random() < (0.2 if step else opens_at_start):
            num_accepted = 0
            for token in vocabulary.encode(rng.choice(openers)):
                if not matcher.accept(token):
                    break
                num_accepted, data = num_accepted + 1, data + vocabulary.token_bytes[token]
            if num_accepted:
                continue
        matcher.fill_mask(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[: len(is_plain)] & is_plain)
        if not len(allowed):
            return data.decode("utf-8", "replace")
        token = int(rng.choice(allowed))
        assert matcher.accept(token)
        data += vocabulary.token_bytes[token]
    raise AssertionError("the text did not end")


@given(st.text(alphabet='<think>/ \n{a"', max_size=40), st.lists(st.integers(0, 40), max_size=5))
def test_text_without_tools_or_reasoning_is_unchanged(text, cuts) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = parse([text[a:b] for a, b in itertools.pairwise(edges)], None)
    assert "".join(part[2] for part in parts) == text and all(part[0] == "text" for part in parts)


@pytest.mark.parametrize("cuts", [1, 2, 5, 100])
def test_what_the_template_writes_before_the_end_of_reasoning_is_no_reasoning(cuts) -> None:
    """A budget of 0 closes it at once: nothing but that text is written."""
    for reasoning, shown in (("a\nb\n", "a\nb"), ("\n", ""), ("a\n\n", "a\n"), ("a", "a")):
        text = f"{reasoning}</think>\n\nyes"
        parts = parse([text[at : at + cuts] for at in range(0, len(text), cuts)], None, THINK, starts_in_reasoning=True)
        assert "".join(part for kind, _, part in parts if kind == "reasoning") == shown
        assert "".join(part for kind, _, part in parts if kind == "text") == "yes"


def test_reasoning_that_is_opened_by_the_model_or_never_closed() -> None:
    assert parse(["<thi", "nk>ab", "c</th", "ink>\n\nyes"], None, THINK) == [
        ("reasoning", 0, "abc"),
        ("text", 0, "yes"),
    ]
    assert parse(["abc"], None, THINK, starts_in_reasoning=True) == [("reasoning", 0, "abc")]
    assert parse(["a <think> b"], None, THINK) == [("text", 0, "a <think> b")]
    assert parse(["<thin"], None, THINK) == [("text", 0, "<thin")]


def test_parts_are_returned_as_soon_as_they_are_certain() -> None:
    parser = OutputParser(None, False, GENERIC_FORMAT, {"count": COUNT})
    assert parser.push("Let me see. {") == [ParsedPart("text", "Let me see.")]
    assert parser.push('"tool_call": {"name": "co') == []
    assert parser.push('unt", "arguments": {') == [ParsedPart("call", "count"), ParsedPart("arguments", "{")]
    assert parser.push('"n":1') == [ParsedPart("arguments", '"n":1')]
    assert parser.push("}}}") == [ParsedPart("arguments", "}")]
    assert parser.finish() == []
