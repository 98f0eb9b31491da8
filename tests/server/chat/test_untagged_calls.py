"""Calls without marks: a whole answer of one valid call is one, and text that quotes or explains JSON never is."""

from __future__ import annotations

import itertools
import json

import pytest
from scripted_server import ScriptedServer

from plait.constrained import JsonObject
from plait.runtime.chat.derivation.format_table import GENERIC_FORMAT
from plait.runtime.chat.formats.reasoning_format import ReasoningFormat
from plait.runtime.chat.parser import OutputParser
from plait.runtime.server.chat.conversation import Conversation, ToolDefinition, Turn
from plait.runtime.server.chat.untagged_calls import WARNING, UntaggedCallParser, may_call_untagged

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = (ToolDefinition("weather", "the weather of a city", WEATHER), ToolDefinition("now", "the time"))
CONVERSATION = Conversation((Turn("user", "What is the weather in Paris?"),), TOOLS)
PARIS = {"name": "weather", "arguments": {"city": "Paris"}}
CALL = json.dumps(PARIS)
CALLS = {
    "bare": CALL,
    "with space around": f"\n {CALL}\n",
    "indented": json.dumps(PARIS, indent=2),
    "compact": json.dumps(PARIS, separators=(",", ":")),
    "in a block": f"```json\n{CALL}\n```",
    "in a block without a language": f"```\n{json.dumps(PARIS, indent=4)}\n```",
    "arguments first": json.dumps({"arguments": {"city": "Paris"}, "name": "weather"}),
}
VALUES = [
    CALL,
    json.dumps(PARIS, indent=2),
    '{"city": "Paris", "days": 3}',
    '[{"name": "weather", "arguments": {"city": "Paris"}}]',
    '{"name": "weather"}',
    '{"name": "weather", "arguments": {}}',
    '{"name": "weather", "arguments": {"city": 7}}',
    '{"name": "weather", "arguments": {"city": "Paris", "planet": "Mars"}}',
    '{"name": "weather", "arguments": "Paris"}',
    '{"name": "forecast", "arguments": {"city": "Paris"}}',
    '{"name": "weather", "arguments": {"city": "Paris"}, "id": 1}',
    '{"name": "weather", "parameters": {"city": "Paris"}}',
    '{"tool": "weather", "arguments": {"city": "Paris"}}',
]
FRAMES = [
    "Here is the JSON that you asked for:\n\n{}",
    "You would call the tool with {}.",
    "```json\n{}\n```\nThis object names the tool and its arguments.",
    "The schema is as follows.\n```json\n{}\n```",
    "{}\n\nThe first key is the tool's name.",
    "{}\n{}",
    "```json\n{}\n```\n```json\n{}\n```",
    "> {}",
    "1. {}",
    '"{}"',
    "// {}",
    "```python\ncall = {}\n```",
    "response = {}",
    "{},",
    "<pre>{}</pre>",
]
TEXTS = [frame.replace("{}", value) for frame, value in itertools.product(FRAMES, VALUES)] + VALUES[2:]


def parse(text, conversation=CONVERSATION, size=3, reasoning=None):
    warnings = []
    parser = OutputParser(reasoning, False, GENERIC_FORMAT, {tool.name: tool.parameters for tool in TOOLS})
    parser = UntaggedCallParser(parser, conversation, warnings)
    parts = [part for i in range(0, len(text), size) for part in parser.push(text[i : i + size])]
    parts += parser.finish()
    assert bool(warnings) == (parser.num_calls > 0 and '"tool_call"' not in text)
    return parts, warnings


@pytest.mark.parametrize("text", CALLS.values(), ids=CALLS)
def test_whole_answer_of_one_call_is_a_call(text) -> None:
    for size in (1, 4, 1000):
        parts, warnings = parse(text, size=size)
        assert [(part.kind, part.text) for part in parts] == [("call", "weather"), ("arguments", '{"city": "Paris"}')]
        assert warnings == [WARNING]


def test_no_answer_that_quotes_or_explains_json_is_a_call() -> None:
    assert len(TEXTS) >= 200
    for text in TEXTS:
        for size in (2, 1000):
            parts, warnings = parse(text, size=size)
            assert {part.kind for part in parts} == {"text"} and not warnings, text
            assert "".join(part.text for part in parts) == text.rstrip()


def test_text_of_an_earlier_message_is_no_call() -> None:
    text = f"Repeat this: {json.dumps(PARIS, indent=1)}"
    quoted = (Turn("user", text), Turn("assistant", "Why?"), Turn("user", "Do"))
    parts, warnings = parse(CALL, Conversation(quoted, TOOLS))
    assert [part.kind for part in parts] == ["text"] and not warnings


def test_call_with_marks_stays_one_and_reasoning_is_passed_on() -> None:
    marked = GENERIC_FORMAT.render_calls([("", "now", {})])
    parts, warnings = parse(marked)
    assert [(part.kind, part.text) for part in parts] == [("call", "now"), ("arguments", "{}")]
    assert not warnings
    parts, _ = parse(f"<think>so</think>\n\n{CALL}", size=1000, reasoning=ReasoningFormat("<think>", "</think>"))
    assert [part.kind for part in parts] == ["reasoning", "call", "arguments"]


def test_text_that_is_no_call_is_sent_as_it_arrives() -> None:
    parser = UntaggedCallParser(OutputParser(None, False, GENERIC_FORMAT, {"now": {}}), CONVERSATION, [])
    assert [part.text for part in parser.push("It is")] == ["It is"]
    assert [part.text for part in parser.push(" warm.")] == [" warm."]


def test_where_untagged_calls_are_allowed() -> None:
    def allowed(default, **more):
        return may_call_untagged(Conversation(CONVERSATION.turns, TOOLS, **more), default)

    assert allowed(True) and not allowed(False)
    assert allowed(False, untagged_calls=True) and not allowed(True, untagged_calls=False)
    assert not allowed(True, must_call=True)
    assert not allowed(True, callable_names=frozenset())
    assert not allowed(True, constraint=JsonObject())


@pytest.mark.parametrize("is_stream", [False, True])
def test_untagged_calls_over_ollama(is_stream) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
    body = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "tools": tools, "stream": is_stream}
    for is_allowed in (False, True):
        server = ScriptedServer(untagged_tool_calls=is_allowed)
        server.scheduler.answer = lambda prompt, request: CALL
        lines = [json.loads(line) for line in server.post("/api/chat", body).text.splitlines()]
        server.client.close()
        calls = [call["function"] for line in lines for call in line["message"].get("tool_calls", ())]
        assert calls == ([PARIS] if is_allowed else [])
        assert (WARNING in lines[-1].get("warnings", ())) == is_allowed
