"""Answers of messages over HTTP, streamed and not: a scripted model that writes only what the constraint allows."""

from __future__ import annotations

import json
import re

import pytest
from matchers import compile_in_process
from message_templates import CHANNELS, RECIPIENTS
from scripted_scheduler import CONTROL, byte_tokenizer
from scripted_server import ScriptedServer

from plait.constrained.reasoning_matcher import ReasoningGrammar
from plait.constrained.specs import Reasoning
from plait.runtime.messages import Append

MARKS = CONTROL | {
    text: 259 + index
    for index, text in enumerate(("<|start|>", "<|message|>", "<|end|>", "<|channel|>", "<|constrain|>"))
}
ANALYSIS = "<|channel|>analysis<|message|>Two and two.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = ' to=functions.add<|channel|>commentary json<|message|>{"a": 2}'
OTHER_CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2}'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = {"tools": [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("add", "add_2")]}
MUST, JSON = TOOLS | {"tool_choice": "required"}, {"response_format": {"type": "json_object"}}
THINK = {"reasoning_effort": "low"}
ADDED = ("add", '{"a": 2}')
ANSWERS = [  # (template, fields of the request, answer, reasoning, text, call)
    (CHANNELS, {}, FINAL + "Four <|start|>.", "", "Four <|start|>.", None),
    (CHANNELS, {}, ANALYSIS + FINAL + "Four.", "Two and two.", "Four.", None),
    (CHANNELS, THINK, ANALYSIS + FINAL + "Four.", "Two and two.", "Four.", None),
    (CHANNELS, JSON, '{"a": 4}', "", '{"a": 4}', None),
    (CHANNELS, JSON | THINK, ANALYSIS + FINAL + '{"a": 4}', "Two and two.", '{"a": 4}', None),
    (CHANNELS, TOOLS, FINAL + "Four to=functions.add.", "", "Four to=functions.add.", None),
    (CHANNELS, TOOLS, ANALYSIS + FINAL + "Four.", "Two and two.", "Four.", None),
    (CHANNELS, TOOLS, ANALYSIS + CALL, "Two and two.", "", ADDED),
    (CHANNELS, TOOLS, CALL, "", "", ADDED),
    (CHANNELS, TOOLS, ANALYSIS + OTHER_CALL, "Two and two.", "", ADDED),
    (CHANNELS, TOOLS, "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant" + CALL, "", "I add.", ADDED),
    (CHANNELS, MUST, CALL, "", "", ADDED),
    (CHANNELS, MUST | THINK, ANALYSIS + CALL, "Two and two.", "", ADDED),
    (CHANNELS, TOOLS | JSON, FINAL + '{"a": 4}', "", '{"a": 4}', None),
    (CHANNELS, TOOLS | JSON, CALL, "", "", ADDED),
    (CHANNELS, TOOLS | JSON | THINK, ANALYSIS + FINAL + '{"a": 4}', "Two and two.", '{"a": 4}', None),
    (CHANNELS, TOOLS | JSON | THINK, ANALYSIS + CALL, "Two and two.", "", ADDED),
    (RECIPIENTS, {}, "all\nFour >>> three.", "", "Four >>> three.", None),
    (RECIPIENTS, JSON, '{"a": 4}', "", '{"a": 4}', None),
    (RECIPIENTS, TOOLS, ">>>all\nFour >>> three.", "", "Four >>> three.", None),
    (RECIPIENTS, TOOLS, '>>>all\nI add.>>>add\n{"a": 2}', "", "I add.", ADDED),
    (RECIPIENTS, TOOLS, '>>>add\n{"a": 2}', "", "", ADDED),
    (RECIPIENTS, MUST, '>>>add\n{"a": 2}', "", "", ADDED),
    (RECIPIENTS, TOOLS | JSON, '>>>all\n{"a": ">>>add"}', "", '{"a": ">>>add"}', None),
    (RECIPIENTS, TOOLS | JSON, '>>>add\n{"a": 2}', "", "", ADDED),
]


def tokens_of(text):
    """The model writes control tokens where `text` has their texts, but for one behind "Four "."""
    pieces = re.split(r"((?<!Four )<\|\w+\|>)", text)
    return [token for piece in pieces for token in ([MARKS[piece]] if piece in MARKS else piece.encode())]


@pytest.fixture(scope="module", params=[CHANNELS, RECIPIENTS], ids=["channels", "recipients"])
def server(request):
    server = ScriptedServer(byte_tokenizer(request.param, MARKS))
    server.template = request.param
    yield server
    server.client.close()


def grammar_of(spec, vocabulary):
    if not isinstance(spec, Reasoning):
        return compile_in_process(spec, vocabulary)
    return ReasoningGrammar(spec, compile_in_process(spec.then, vocabulary), vocabulary)


def answered(server, body, answer):
    """The reasoning, text and calls of an answer that the request's constraint allows."""

    def write(prompt, request):
        tokens = tokens_of(answer)
        if request.constraint is not None:
            matcher = grammar_of(request.constraint, server.client.tokenizer.vocabulary).matcher()
            for index, token in enumerate(tokens):
                assert matcher.accept(token), (answer, index)
            assert matcher.is_accepting
        return tokens

    server.scheduler.answer, server.scheduler.requests[:] = write, []
    response = server.post("/v1/chat/completions", {"model": "default"} | body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        (choice,) = response.json()["choices"]
        deltas = [choice["message"]]
    else:
        chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        deltas, choice = [choice["delta"] for choice in choices], choices[-1]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
    call = tuple("".join(call.get(key) or "" for call in calls) for key in ("name", "arguments"))
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    reasoning, text = ("".join(delta.get(key) or "" for delta in deltas) for key in ("reasoning_content", "content"))
    return reasoning, text, call if calls else None


def prompt_of(server):
    return [token for append in server.scheduler.sent(Append) for token in append.token_ids]


@pytest.mark.parametrize("stream", [False, True])
def test_answers_of_messages(server, stream) -> None:
    for template, fields, answer, *expected in ANSWERS:
        if template == server.template:
            body = {"messages": [{"role": "user", "content": "2 + 2?"}], "stream": stream} | fields
            assert answered(server, body, answer) == tuple(expected), (fields, answer)


@pytest.mark.parametrize("thinks", [False, True])
def test_the_next_prompt_begins_with_the_generated_tokens(server, thinks) -> None:
    if thinks and server.template == RECIPIENTS:
        return
    answer = '>>>add\n{"a": 2}' if server.template == RECIPIENTS else ANALYSIS + CALL if thinks else CALL
    messages = [{"role": "user", "content": "2 + 2?"}]
    body = {"messages": messages} | MUST | (THINK if thinks else {})
    reasoning, _, (name, arguments) = answered(server, body, answer)
    written = [*prompt_of(server), *tokens_of(answer)]
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    messages += [{"role": "assistant", "content": "", "reasoning_content": reasoning, "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "c", "content": "4"}]
    answered(server, {"messages": messages} | MUST, answer if server.template == RECIPIENTS else CALL)
    assert prompt_of(server)[: len(written)] == written
