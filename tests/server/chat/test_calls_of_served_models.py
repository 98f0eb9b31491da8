"""Tool calls over HTTP in every form: the embedded model with a chat template of our own for each."""

from __future__ import annotations

import asyncio
import functools
import json
import threading

import httpx
import jsonschema
import pytest
from call_templates import CALL_TEMPLATES, CONTROL_NOTATION, CONTROL_TEMPLATE
from example_share import sample_of

from plait.runtime.chat import argument_readers
from plait.runtime.sampling_params import SamplingParams
from plait.runtime.server.chat import engine as chat_engine
from plait.runtime.server.chat.conversation import Conversation, ToolCall, ToolDefinition, Turn
from plait.runtime.server.chat.engine import ChatOutput, prepare_chat

LIGHT = {
    "type": "object",
    "properties": {
        "room": {"type": "string", "enum": ["hall", 'the "red" room']},
        "level": {"type": "integer", "minimum": 0, "maximum": 99},
        "on": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["room", "level", "on", "tags"],
}
TOOLS = [
    {"type": "function", "function": {"name": "set_light", "description": "Sets a light", "parameters": LIGHT}},
    {"type": "function", "function": {"name": "lights_off", "description": "Turns all off"}},
]
# Few texts of such a call have more than one tokenization, so the model writes the tokenizer's own.
LEVEL = {
    "type": "object",
    "properties": {"level": {"type": "integer", "minimum": 0, "maximum": 9}, "room": {"const": 7}},
    "required": ["level", "room"],
}
TEXT = LEVEL | {"properties": LEVEL["properties"] | {"room": {"const": "hall"}}}  # between control tokens
SCHEMAS = {"set_light": LIGHT, "lights_off": {"type": "object", "maxProperties": 0}}
ASK = [{"role": "user", "content": "Set the light in the hall to level 7."}]
TEMPLATES = CALL_TEMPLATES | {"control tokens": CONTROL_TEMPLATE, "notation in control tokens": CONTROL_NOTATION}


@pytest.fixture
def post(engine, serve):
    """`post(kind, path, body)`, with the template of that kind."""
    tokenizer = engine.client.tokenizer
    own = tokenizer.chat_template.source
    address, _ = serve()

    def post(kind, path, body):
        tokenizer.replace_chat_template(TEMPLATES[kind].source)
        response = httpx.post(address + path, json={"model": "default", "temperature": 0} | body, timeout=60)
        assert response.status_code == 200, response.text
        return response

    yield post
    tokenizer.replace_chat_template(own)


def streamed_calls(text):
    """The (name, arguments) of a stream's calls."""
    calls, content = {}, ""
    for line in text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                content += choice["delta"].get("content") or ""
                for call in choice["delta"].get("tool_calls", ()):
                    name, arguments = calls.get(call["index"], ("", ""))
                    function = call["function"]
                    calls[call["index"]] = (name + function.get("name", ""), arguments + function["arguments"])
    return list(calls.values()), content


@pytest.mark.parametrize("kind", sample_of(list(TEMPLATES), least=6))
def test_required_call_is_valid_and_the_next_turn_reuses_it(post, kind) -> None:
    body = {"messages": ASK, "tools": TOOLS, "tool_choice": "required", "max_tokens": 120, "parallel_tool_calls": False}
    answer = post(kind, "/v1/chat/completions", body).json()
    (choice,) = answer["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and not message["content"]
    (call,) = message["tool_calls"]
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    calls, content = streamed_calls(post(kind, "/v1/chat/completions", body | {"stream": True}).text)
    assert calls == [(name, arguments)] and not content
    result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
    following = post(kind, "/v1/chat/completions", body | {"messages": [*ASK, message, result], "tool_choice": "none"})
    cached = following.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0.9 * answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("kind", TEMPLATES)
def test_the_next_prompt_begins_with_the_generated_tokens(engine, kind) -> None:
    client, own = engine.client, engine.client.tokenizer.chat_template.source
    client.tokenizer.replace_chat_template(TEMPLATES[kind].source)
    try:
        tools = (ToolDefinition("set_level", "", TEXT if kind == "notation in control tokens" else LEVEL),)
        turns = (Turn("user", "Set the light in the hall to level 7."),)
        prepared = asyncio.run(prepare_chat(client, Conversation(turns, tools, must_call=True, one_call=True)))
        session = client.open_session()
        session.append_tokens(prepared.prompt_ids)
        call = session.generate(SamplingParams(max_tokens=120, temperature=0), prepared.constraint)
        result = call.result(60)
        session.close()
        begin, *rest = ChatOutput(prepared, client, call).parse_result(result)
        made = ToolCall(f"call_0{begin.call_id}", begin.text, "".join(part.text for part in rest))
        turns = (*turns, Turn("assistant", "", (made,)), Turn("tool", "done", call_id=made.id))
        following = asyncio.run(prepare_chat(client, Conversation(turns, tools)))
    finally:
        client.tokenizer.replace_chat_template(own)
    written = [*prepared.prompt_ids, *result.token_ids]
    assert list(following.prompt_ids[: len(written)]) == written
    if kind == "notation in control tokens":
        quote = client.tokenizer.encode([("<jupyter_text>", True)])
        assert list(result.token_ids).count(*quote) == 2


@pytest.mark.parametrize("kind", ["elements", "list with ids", "control tokens"])
def test_calls_of_other_protocols(post, kind) -> None:
    tools = [{"name": t["function"]["name"], "input_schema": SCHEMAS[t["function"]["name"]]} for t in TOOLS]
    body = {"messages": ASK, "tools": tools, "tool_choice": {"type": "any"}, "max_tokens": 120}
    (block, *_) = post(kind, "/v1/messages", body).json()["content"]
    assert block["type"] == "tool_use"
    jsonschema.validate(block["input"], SCHEMAS[block["name"]])
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body = {"input": "Light!", "tools": tools, "tool_choice": "required", "max_output_tokens": 120}
    (item, *_) = post(kind, "/v1/responses", body).json()["output"]
    assert item["type"] == "function_call"
    jsonschema.validate(json.loads(item["arguments"]), SCHEMAS[item["name"]])


@pytest.mark.parametrize("kind", ["json in tags", "elements", "section", "control tokens", "bare json"])
def test_optional_calls_beside_free_text(post, kind) -> None:
    body = {"messages": [{"role": "user", "content": "Say hello."}], "tools": TOOLS, "max_tokens": 24}
    (choice,) = post(kind, "/v1/chat/completions", body).json()["choices"]
    calls, content = streamed_calls(post(kind, "/v1/chat/completions", body | {"stream": True}).text)
    assert content == (choice["message"]["content"] or "")
    assert [name for name, _ in calls] == [c["function"]["name"] for c in choice["message"].get("tool_calls", ())]


@pytest.mark.parametrize("stream", [False, True])
def test_the_types_of_large_schemas_are_found_beside_the_event_loop(post, monkeypatch, stream) -> None:
    """It may take as long as compiling them."""
    found_in: set[str] = set()

    def find(schema):
        found_in.add(threading.current_thread().name)
        return parameter_kinds(schema)

    parameter_kinds = argument_readers.parameter_kinds
    monkeypatch.setattr(argument_readers, "parameter_kinds", find_once := functools.lru_cache(find))
    monkeypatch.setattr(argument_readers, "LARGE_SCHEMA_CHARS", 100)  # a larger one is no prompt of a small context
    monkeypatch.setattr(chat_engine, "CONVERT_IN_THREAD_VALUES", 10)
    description = f"Sets it ({stream})."
    tools = [{"type": "function", "function": {"name": "f", "parameters": LEVEL | {"description": description}}}]
    body = {"messages": ASK, "tools": tools, "tool_choice": "required", "max_tokens": 60, "stream": stream}
    assert "tool_calls" in post("elements", "/v1/chat/completions", body).text
    assert find_once.cache_info().hits and all(name.startswith(("asyncio_", "uvloop_")) for name in found_in), found_in


def test_broken_arguments_in_an_earlier_call_are_named(engine, serve) -> None:
    tokenizer, own = engine.client.tokenizer, engine.client.tokenizer.chat_template.source
    tokenizer.replace_chat_template(CALL_TEMPLATES["elements"].source)
    try:
        address, _ = serve()
        call = {"id": "c", "type": "function", "function": {"name": "lights_off", "arguments": '{"a": '}}
        messages = [*ASK, {"role": "assistant", "tool_calls": [call]}]
        messages.append({"role": "tool", "tool_call_id": "c", "content": "x"})
        body = {"model": "default", "messages": messages, "max_tokens": 1}
        response = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60)
    finally:
        tokenizer.replace_chat_template(own)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[1].tool_calls[0].function.arguments"
