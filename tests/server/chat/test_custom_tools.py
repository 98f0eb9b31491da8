"""Tools with freeform input, in every form of calls: the input satisfies its grammar, and is read as it was written."""

from __future__ import annotations

import json
import random
import re

import pytest
from byte_grammars import accepts
from call_templates import CALL_TEMPLATES, formats_of

from plait.constrained import Lark, Regex
from plait.runtime.chat.derivation.format_table import GENERIC_FORMAT
from plait.runtime.chat.parser import OutputParser
from plait.runtime.server.chat.conversation import Conversation, Turn
from plait.runtime.server.chat.tool_constraint import tool_constraint
from plait.runtime.server.protocols.openai.custom_tools import Grammar, InputReader, custom_tool

FORMATS = {"generic": GENERIC_FORMAT} | {kind: formats_of(kind).calls for kind in CALL_TEMPLATES}
LINES = 'start: line+\nline: /[a-z"\\\\\\t]+/ "\\n"\n'
TEXTS = ["ab\n", 'say "hi\n'.replace(" ", ""), "a\\n\n\tb\n", "", "ab", "a b\n", "ä\n"]
PATTERN = r'[a-z"\\\t\n]*\n'
GRAMMARS = {"lark": Grammar(LINES, "lark"), "regex": Grammar(PATTERN, "regex")}


def call_text(call_format, text):
    call_id = "abcdef123" if call_format.id_source == "client" else "0"
    lead = call_format.lead + call_format.render_calls([(call_id, "f", {"input": text})])
    return lead.replace("{id}", call_id)


@pytest.mark.parametrize("syntax", GRAMMARS)
@pytest.mark.parametrize("kind", FORMATS)
def test_the_input_satisfies_its_grammar_and_is_read_back(kind, syntax) -> None:
    call_format, tool = FORMATS[kind], custom_tool("f", None, GRAMMARS[syntax], "tools[0].format")
    conversation = Conversation((Turn("user", "hi"),), (tool,), must_call=True, one_call=True)
    spec = tool_constraint(call_format, conversation)
    valid = [re.fullmatch(r'([a-z"\\\t]+\n)+', text) is not None for text in TEXTS]
    if syntax == "regex":
        valid = [re.fullmatch(PATTERN, text) is not None for text in TEXTS]
    calls = [call_text(call_format, text) for text in TEXTS]
    assert accepts(spec, *calls) == valid and len(set(valid)) == 2
    for text, call, is_valid in zip(TEXTS, calls, valid, strict=True):
        if is_valid:
            assert read(call_format, tool, call) == text


def read(call_format, tool, text):
    """The input of the call, read from pieces of random length."""
    parser, reader, rng = (
        OutputParser(None, False, call_format, {"f": tool.parameters}),
        InputReader(),
        random.Random(5),
    )
    parts, start = [], 0
    while start < len(text):
        end = start + rng.randint(1, 5)
        parts, start = [*parts, *parser.push(text[start:end])], end
    parts += parser.finish()
    assert [part.text for part in parts if part.kind == "call"] == ["f"]
    return "".join([reader.add(part.text) for part in parts if part.kind == "arguments"])


def test_half_of_a_character_waits() -> None:
    reader, text = InputReader(), '{"input": "\\ud83d\\ude00\\u00e9\\ud83d"}'
    assert "".join([reader.add(letter) for letter in text]) == "😀é"
    assert InputReader().add('{"input": "\\ude00') == "\ufffd"


def test_the_grammar_stands_in_the_tool_that_the_model_sees() -> None:
    tool = custom_tool("f", "Runs code.", Grammar("start: /.+/", "lark"), "tools[0].format")
    assert "start: /.+/" in json.dumps(tool.parameters) and tool.description == "Runs code."
    assert isinstance(tool.input, Lark) and tool.param == "tools[0].format.definition"
    assert isinstance(custom_tool("f", None, Grammar("a+", "regex"), "x").input, Regex)
    assert custom_tool("f", None, None, "x").input is None
