"""Custom tools of `/v1/chat/completions`: calls, streams, and the calls that are sent back."""

from __future__ import annotations

import json
import re

import pytest
from scripted_server import ScriptedServer

from plait.runtime.messages import Append

ASK = [{"role": "user", "content": "Please keep a note."}]
PATTERN = r'(say "[a-z]{1,9}"\n){1,3}'
FORMAT = {"type": "grammar", "grammar": {"syntax": "regex", "definition": PATTERN}}
NOTE = {"type": "custom", "custom": {"name": "note", "description": "Keeps a note.", "format": FORMAT}}
FIND = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
CALLS = (
    '<tool_call>{"name": "find", "arguments": {}}</tool_call>'
    '<tool_call>{"name": "note", "arguments": {"input": "a\\n\\"b\\""}}</tool_call>'
)
BODY = {"model": "default", "messages": ASK, "tools": [FIND, NOTE]}


def answered(text: str = CALLS) -> ScriptedServer:
    server = ScriptedServer()
    server.scheduler.answer = lambda prompt, request: text
    return server


def test_calls_and_their_stream() -> None:
    (choice,) = answered().post("/v1/chat/completions", BODY).json()["choices"]
    find, note = choice["message"]["tool_calls"]
    assert find["type"] == "function" and find["function"] == {"name": "find", "arguments": "{}"}
    assert note["type"] == "custom" and note["custom"] == {"name": "note", "input": 'a\n"b"'} and "function" not in note
    assert choice["finish_reason"] == "tool_calls"
    text = answered().post("/v1/chat/completions", BODY | {"stream": True}).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    deltas = [call for chunk in chunks for one in chunk["choices"] for call in one["delta"].get("tool_calls", ())]
    custom = [call["custom"] for call in deltas if call["index"] == 1]
    assert custom[0] == {"input": "", "name": "note"} and "".join(part["input"] for part in custom) == 'a\n"b"'
    assert all("function" not in call for call in deltas if call["index"] == 1)


def test_a_custom_call_that_is_sent_back_is_rendered_as_it_was_written() -> None:
    server = answered("Fine.")
    call = {"id": "1", "type": "custom", "custom": {"name": "note", "input": 'a\n"b"'}}
    turns = [*ASK, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "ok"}]
    assert server.post("/v1/chat/completions", BODY | {"messages": turns}).status_code == 200
    (request,) = [request for request in server.scheduler.requests if isinstance(request, Append)]
    prompt = server.client.tokenizer.decode(list(request.token_ids))
    assert '<tool_call>{"name": "note", "arguments": {"input": "a\\n\\"b\\""}}</tool_call>' in prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [NOTE, NOTE]}, "tools[1].custom.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "x", "format": {"type": "gbnf"}}}]}, None),
        ({"tool_choice": {"type": "custom", "custom": {"name": "y"}}}, "tool_choice.custom.name"),
        (
            {"messages": [*ASK, {"role": "assistant", "tool_calls": [{"id": "1", "type": "custom"}]}]},
            "messages[1].tool_calls[0].custom",
        ),
    ],
)
def test_errors_name_the_field(fields, param) -> None:
    response = answered().post("/v1/chat/completions", BODY | fields)
    assert response.status_code == 400 and (param is None or response.json()["error"]["param"] == param), response.text


def test_a_model_writes_an_input_of_the_grammar(smollm) -> None:
    choice = {"type": "custom", "custom": {"name": "note"}}
    answer = smollm.chat.completions.create(**BODY, tool_choice=choice, max_tokens=80, temperature=1, seed=3)
    (call,) = answer.choices[0].message.tool_calls
    assert call.type == "custom" and re.fullmatch(PATTERN, call.custom.input), call
