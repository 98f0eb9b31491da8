"""The events of OpenAI's responses and of Anthropic's messages: their order, and the fields of each in order."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripted_scheduler import Gate
from scripted_server import ScriptedServer

from plait.runtime.errors import Overloaded

PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
ANSWER = '<think>hm</think>\n\nSome text.<tool_call>{"name": "f", "arguments": {}}</tool_call>'
BODY = (
    "id object created_at status background completed_at error incomplete_details instructions max_output_tokens "
    "metadata model output parallel_tool_calls previous_response_id reasoning service_tier store temperature text "
    "tool_choice tools top_logprobs top_p truncation usage user"
)
TEXT_PART, REASONING_PART = "type text annotations logprobs", "type text"
ITEMS = {
    "message": "id type role status content",
    "reasoning": "id type summary status content",
    "function_call": "type name arguments status id call_id",
}
PARTS = {"output_text": TEXT_PART, "reasoning_text": REASONING_PART}
RESPONSE = "type response sequence_number"
ITEM = "type output_index item sequence_number"
PART = "type item_id output_index content_index part sequence_number"
RESPONSES = {
    "response.created": RESPONSE,
    "response.in_progress": RESPONSE,
    "response.output_item.added": ITEM,
    "response.content_part.added": PART,
    "response.reasoning_text.delta": "type item_id output_index content_index delta sequence_number",
    "response.reasoning_text.done": "type item_id output_index content_index text sequence_number",
    "response.output_text.delta": "type item_id output_index content_index delta logprobs sequence_number",
    "response.output_text.done": "type item_id output_index content_index text logprobs sequence_number",
    "response.function_call_arguments.delta": "type item_id output_index delta sequence_number",
    "response.function_call_arguments.done": "type item_id output_index arguments name sequence_number",
    "response.content_part.done": PART,
    "response.output_item.done": ITEM,
    "response.completed": RESPONSE,
    "response.incomplete": RESPONSE,
    "response.failed": RESPONSE,
}
MESSAGES = {
    "message_start": "type message",
    "ping": "type",
    "content_block_start": "type index content_block",
    "content_block_delta": "type index delta",
    "content_block_stop": "type index",
    "message_delta": "type delta usage",
    "message_stop": "type",
    "error": "type error request_id",
}
BLOCKS = {"thinking": "type thinking signature", "text": "type text", "tool_use": "type id name input"}
DELTAS = {
    "thinking_delta": "type thinking",
    "text_delta": "type text",
    "input_json_delta": "type partial_json",
}
RESPONSES_REQUEST = {
    "model": "default",
    "input": "hi",
    "tools": [{"type": "function", "name": "f", "parameters": PARAMETERS}],
    "stream": True,
}
MESSAGES_REQUEST = {
    "model": "default",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 200,
    "thinking": {"type": "adaptive"},
    "tools": [{"name": "f", "input_schema": PARAMETERS}],
    "stream": True,
}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}


def fail_midway(server: ScriptedServer) -> None:
    """Answers with an error after the first words were sent."""
    gate = Gate(Overloaded("too much"), early="Some words")
    server.scheduler.answer = lambda prompt, request: gate
    app = server.app

    async def observed(scope: Any, receive: Any, send: Any) -> None:
        async def observed_send(message: Any) -> None:
            await send(message)
            if b'ds"' in message.get("body", b""):  # the end of the words
                gate.open()

        await app(scope, receive, observed_send)

    server.app = observed


def stream(path: str, request: dict[str, Any], fails: bool = False) -> list[dict[str, Any]]:
    """The events of a streamed answer, after a check that an event's name is its type."""
    server = ScriptedServer()
    server.scheduler.answer = lambda prompt, request: ANSWER
    if fails:
        fail_midway(server)
    response = server.post(path, request)
    assert response.status_code == 200, response.text
    events = []
    for text in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = text.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def keys(value: dict[str, Any]) -> str:
    return " ".join(value)


def check_item(item: dict[str, Any]) -> None:
    assert keys(item) == ITEMS[item["type"]]
    for part in item.get("content", ()):
        assert keys(part) == PARTS[part["type"]]


def check_response_events(events: list[dict[str, Any]]) -> None:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        assert keys(event) == RESPONSES[event["type"]]
        if "response" in event:
            assert keys(event["response"]) == BODY
            for item in event["response"]["output"]:
                check_item(item)
        if "item" in event:
            check_item(event["item"])
        if "part" in event:
            assert keys(event["part"]) == PARTS[event["part"]["type"]]


def test_responses() -> None:
    events = stream("/v1/responses", RESPONSES_REQUEST)
    check_response_events(events)
    assert {event["type"] for event in events} == RESPONSES.keys() - {"response.incomplete", "response.failed"}
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["reasoning", "message", "function_call"]


def test_a_part_begins_without_text_or_logprobs() -> None:
    events = stream("/v1/responses", RESPONSES_REQUEST | LOGPROBS)
    check_response_events(events)
    added = {event["part"]["type"]: event["part"] for event in events if event["type"] == "response.content_part.added"}
    assert added["output_text"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    assert added["reasoning_text"] == {"type": "reasoning_text", "text": ""}
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    assert [list(entry) for entry in done["logprobs"]] == [["token", "bytes", "logprob", "top_logprobs"]] * len(
        done["logprobs"]
    )
    assert done["logprobs"] and done["logprobs"] == events[-1]["response"]["output"][1]["content"][0]["logprobs"]


def test_a_response_that_is_cut() -> None:
    events = stream("/v1/responses", RESPONSES_REQUEST | {"max_output_tokens": 25})
    check_response_events(events)
    assert events[-1]["type"] == "response.incomplete"
    assert events[-2]["item"]["status"] == "incomplete"


def test_a_response_that_fails() -> None:
    events = stream("/v1/responses", RESPONSES_REQUEST, fails=True)
    check_response_events(events)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "too much"}
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "Some words"


@pytest.mark.parametrize("fails", [False, True])
def test_messages(fails: bool) -> None:
    events = stream("/v1/messages", MESSAGES_REQUEST, fails)
    for event in events:
        assert keys(event) == MESSAGES[event["type"]]
        if "content_block" in event:
            assert keys(event["content_block"]) == BLOCKS[event["content_block"]["type"]]
        if event["type"] == "content_block_delta":
            assert keys(event["delta"]) == DELTAS[event["delta"]["type"]]
    assert keys(events[0]["message"]) == "id model usage content stop_reason stop_sequence type role"
    if fails:
        assert keys(events[-1]["error"]) == "type message" and events[-1]["error"]["message"] == "too much"
        return
    assert {event["type"] for event in events} == MESSAGES.keys() - {"error"}
    assert [event["content_block"]["type"] for event in events if "content_block" in event] == list(BLOCKS)
    end = events[-2]
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert keys(end["usage"]) == "input_tokens cache_creation_input_tokens cache_read_input_tokens output_tokens"
