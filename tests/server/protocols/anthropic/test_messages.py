"""`/v1/messages` with Anthropic's client: answers, streams and errors. The tests that use the client import it: it has
three thousand modules, which each worker would import to collect the tests."""

from __future__ import annotations

import json

import httpx
import msgspec
import pytest

from plait.runtime.call_reports import Usage
from plait.runtime.chat.parser import ParsedPart
from plait.runtime.client.call import CallResult
from plait.runtime.server.protocols.anthropic.response import (
    BlockStart,
    BlockStop,
    ContentBlocks,
    read_partial_object,
    stop_reason_of,
)

ASK = [{"role": "user", "content": "Name three colours."}]
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Paris", "Rome"]},
            "days": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
TIME = {"name": "get_time", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}


@pytest.fixture(scope="session")
def client(address):
    import anthropic

    return anthropic.Anthropic(base_url=address, api_key="none", max_retries=0, timeout=60)


def create_and_stream(client, **fields):
    """The message, after a check that a stream of the same request equals it."""
    from anthropic.types import Message

    fields = {"model": "default", "max_tokens": 4, "extra_body": {"temperature": 0}} | fields
    message = client.messages.create(**fields)
    assert isinstance(message, Message) and message.type == "message" and message.role == "assistant"
    with client.messages.stream(**fields) as stream:
        events = [event.type for event in stream if event.type in RAW]
        streamed = stream.get_final_message()
    assert events[:2] == ["message_start", "ping"] if "ping" in events else events[0] == "message_start"
    assert events[-2:] == ["message_delta", "message_stop"]
    assert comparable(streamed) == comparable(message)
    return message


RAW = {"message_start", "ping", "content_block_start", "content_block_stop", "message_delta", "message_stop"}


def comparable(message):
    """The fields of a message without ids; cached and computed input tokens are one sum."""
    fields = message.model_dump(exclude_none=True)
    usage = fields.pop("usage")
    fields.pop("id")
    for block in fields["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    fields["in"] = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    return fields | {"out": usage["output_tokens"]}


def test_stream_equals_the_message(client):
    from anthropic.types import TextBlock

    message = create_and_stream(client, messages=ASK, system="Be brief.", metadata={"user_id": "u"})
    (block,) = message.content
    assert isinstance(block, TextBlock) and block.text
    assert message.stop_reason == "max_tokens" and message.stop_sequence is None
    assert message.usage.output_tokens == 4


def test_system_as_blocks_and_cache_control_are_the_same_prompt(client):
    mark = {"type": "ephemeral"}
    blocks = [{"type": "text", "text": "Be brief.", "cache_control": mark}]
    content = [{"type": "text", "text": "Name three colours.", "cache_control": mark | {"ttl": "1h"}}]
    plain = create_and_stream(client, messages=ASK, system="Be brief.")
    parts = create_and_stream(
        client, messages=[{"role": "user", "content": content}], system=blocks, cache_control=mark
    )
    assert parts.content[0].text == plain.content[0].text
    assert parts.usage.cache_read_input_tokens > 0


def test_stop_reasons(client):
    text = create_and_stream(client, messages=ASK, max_tokens=8).content[0].text
    stop = text[10:14]
    stopped = create_and_stream(client, messages=ASK, max_tokens=8, stop_sequences=["never ever", stop])
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == stop
    assert stopped.content[0].text == text[: text.index(stop)]
    yes = {"format": {"type": "json_schema", "schema": {"const": "yes"}}}
    assert create_and_stream(client, messages=ASK, output_config=yes, max_tokens=8).stop_reason == "end_turn"
    warm = create_and_stream(client, messages=ASK, max_tokens=0)
    assert warm.content == [] and warm.stop_reason == "max_tokens" and warm.usage.output_tokens == 0


def test_prefilled_assistant_message_is_continued(client):
    from anthropic.types import MessageTokensCount

    begun = [*ASK, {"role": "assistant", "content": "The colours are red,"}]
    continuation = create_and_stream(client, messages=begun, max_tokens=4)
    text = create_and_stream(client, messages=ASK, max_tokens=4).content[0].text
    assert continuation.content[0].text != text
    counted = client.messages.count_tokens(model="default", messages=begun)
    count_without_prefill = client.messages.count_tokens(model="default", messages=ASK)
    assert isinstance(counted, MessageTokensCount) and counted.input_tokens > count_without_prefill.input_tokens


def test_consecutive_turns_of_one_role_are_merged(client):
    split = [{"role": "user", "content": "Name"}, {"role": "user", "content": "three colours."}]
    one = [{"role": "user", "content": "Name\n\nthree colours."}]
    count = client.messages.count_tokens
    assert count(model="default", messages=split) == count(model="default", messages=one)


def test_count_tokens_equals_the_usage_of_a_message(client):
    fields = dict(model="default", messages=ASK, system="Be brief.", tools=[WEATHER])
    counted = client.messages.count_tokens(**fields).input_tokens
    client.messages.create(**fields, max_tokens=1)
    usage = client.messages.create(**fields, max_tokens=1).usage
    assert usage.cache_read_input_tokens > 0
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


@pytest.mark.parametrize("choice", [{"type": "tool", "name": "get_weather"}, {"type": "any"}])
def test_tool_choice_any_and_tool(client, choice):
    from anthropic.types import ToolUseBlock

    choice = choice if choice["type"] == "tool" else choice | {"disable_parallel_tool_use": True}
    message = create_and_stream(client, messages=ASK, tools=[WEATHER, TIME], tool_choice=choice, max_tokens=80)
    (block,) = message.content
    assert isinstance(block, ToolUseBlock) and message.stop_reason == "tool_use"
    if choice["type"] == "tool":
        assert block.name == "get_weather"
        assert block.input["city"] in ("Paris", "Rome") and isinstance(block.input["days"], int)


def test_tool_results(client):
    used = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Rome", "days": 1}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]}
    turns = [*ASK, {"role": "assistant", "content": [{"type": "text", "text": "I look."}, used]}]
    blocks = [result | {"is_error": True}, {"type": "text", "text": "And now?"}]
    message = create_and_stream(client, messages=[*turns, {"role": "user", "content": blocks}], tools=[WEATHER])
    assert message.usage.output_tokens == 4
    count = client.messages.count_tokens
    failed = count(model="default", messages=[*turns, {"role": "user", "content": [result | {"is_error": True}]}])
    worked = count(model="default", messages=[*turns, {"role": "user", "content": [result]}])
    assert failed.input_tokens > worked.input_tokens


def test_tool_choice_none_and_auto(client):
    from anthropic.types import TextBlock

    never = create_and_stream(client, messages=ASK, tools=[WEATHER], tool_choice={"type": "none"})
    assert all(isinstance(block, TextBlock) for block in never.content)
    client.messages.create(model="default", max_tokens=2, messages=ASK, tools=[WEATHER], tool_choice={"type": "auto"})


def test_output_format_json_schema(client):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"]}
    schema["additionalProperties"] = False
    config = {"format": {"type": "json_schema", "schema": schema}}
    message = create_and_stream(client, messages=ASK, output_config=config, max_tokens=12)
    assert json.loads(message.content[0].text)["n"] in (1, 22)


async def _count_events(address):
    import anthropic

    client = anthropic.AsyncAnthropic(base_url=address, api_key="none", max_retries=0)
    async with client, client.messages.stream(model="default", messages=ASK, max_tokens=5) as stream:
        return [text async for text in stream.text_stream]


def test_asynchronous_client(address):
    import asyncio

    assert "".join(asyncio.run(_count_events(address)))


def test_order_of_events(address):
    body = {"model": "default", "max_tokens": 4, "messages": ASK, "stream": True}
    answer = httpx.post(f"{address}/v1/messages", json=body, timeout=60)
    assert answer.headers["content-type"].startswith("text/event-stream")
    pairs = [event.split("\n") for event in answer.text.strip().split("\n\n")]
    names = [name.removeprefix("event: ") for name, _ in pairs]
    data = [json.loads(line.removeprefix("data: ")) for _, line in pairs]
    assert names == [event["type"] for event in data]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert data[0]["message"]["stop_reason"] is None and data[0]["message"]["content"] == []
    assert data[-2]["usage"]["output_tokens"] == 4


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}
WRONG = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"system": [IMAGE]}, "system[0].type"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "always"}}, "thinking.type"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": ["x"] * 100}, "stop_sequences"),
    ({"container": "c"}, "container"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "no"}}}}, "output_config.format.schema"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tools": [WEATHER, WEATHER]}, "get_weather"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [WEATHER | {"defer_loading": True}]}, "defer_loading"),
    ({"tools": [WEATHER | {"input_schema": {"type": "no"}}]}, "tools[0].input_schema"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "messages[0]"),
    ({"mcp_servers": [{"type": "url", "url": "http://127.0.0.1:9/", "name": "x"}]}, "mcp_servers"),
    ({"cache_control": {"type": "forever"}}, "cache_control.type"),
]


@pytest.mark.parametrize(("change", "named"), WRONG, ids=[str(change)[:50] for change, _ in WRONG])
def test_errors_name_the_field(http, change, named):
    body = {"model": "default", "max_tokens": 4, "messages": ASK} | change
    for extra in ({}, {"stream": True}):
        answer = http.post("/v1/messages", json={**body, **extra})
        assert answer.status_code == 400, answer.text
        error = answer.json()
        assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
        assert named in error["error"]["message"] and error["request_id"].startswith("req-")


def test_client_raises_anthropic_error_types(client, address):
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="claude-x"):
        client.messages.create(model="claude-x", max_tokens=1, messages=ASK)
    with pytest.raises(anthropic.BadRequestError, match="tokens"):
        client.messages.create(model="default", max_tokens=1, messages=[{"role": "user", "content": "a b " * 9000}])
    large = httpx.post(
        f"{address}/v1/messages", content=b" " * (9 << 20), headers={"content-type": "application/json"}, timeout=60
    )
    assert large.status_code == 413 and large.json()["error"]["type"] == "request_too_large"
    missing = httpx.post(f"{address}/v1/messages/nothing", json={}, timeout=60)
    assert missing.status_code == 404 and missing.json()["type"] == "error"


# -- without a server -------------------------------------------------------------------------------

PARTS = [
    ParsedPart("reasoning", "I th"),
    ParsedPart("reasoning", "ink"),
    ParsedPart("text", "A"),
    ParsedPart("text", "B"),
    ParsedPart("call", "f", 0),
    ParsedPart("arguments", '{"a":', 0),
    ParsedPart("arguments", "1}", 0),
    ParsedPart("call", "g", 1),
    ParsedPart("arguments", '{"b":["x', 1),
]


def test_blocks_are_the_sum_of_their_events():
    blocks = ContentBlocks()
    events = [event for part in PARTS for event in blocks.add([part])] + blocks.finish()
    content = json.loads(msgspec.json.encode(blocks.content()))
    thinking = {"type": "thinking", "thinking": "I think", "signature": ""}
    first, text, *calls = content
    assert first == thinking
    assert text == {"type": "text", "text": "AB"}
    assert [(call["name"], call["input"]) for call in calls] == [("f", {"a": 1}), ("g", {"b": []})]
    starts = [event.index for event in events if isinstance(event, BlockStart)]
    stops = [event.index for event in events if isinstance(event, BlockStop)]
    assert starts == stops == list(range(4))


def test_stop_reason_of_a_full_context():
    result = CallResult("x", "length", Usage(completion_tokens=5))
    assert stop_reason_of(result, 5, False).stop_reason == "max_tokens"
    assert stop_reason_of(result, 9, False).stop_reason == "model_context_window_exceeded"


@pytest.mark.parametrize("value", [{}, {"a": [1, {"b": 'x"\\u00e9{'}], "c": {"d": None}, "e": -1.5e3, "f": True}])
def test_partial_json_keeps_complete_members(value):
    text = json.dumps(value)
    assert read_partial_object(text) == value
    sizes = [len(json.dumps(read_partial_object(text[:at]))) for at in range(len(text) + 1)]
    assert sizes == sorted(sizes)
    assert read_partial_object('{"a":1,"b":{"c":2,"d":"x') == {"a": 1, "b": {"c": 2}}


@pytest.mark.parametrize("number", ["1e999", "-5E400", "12345678901234567890123", "0.1000000000000000000001", "1E2"])
def test_numbers_of_arguments_are_sent_as_they_were_written(number):
    """Also those that no float64 holds: as `null` they would break the schema."""
    blocks = ContentBlocks()
    arguments = f'{{"a": [{number}]}}'
    blocks.add([ParsedPart("call", "f", 0), ParsedPart("arguments", arguments, 0)])
    (block,) = blocks.content()
    assert arguments.encode() in msgspec.json.encode(block)
