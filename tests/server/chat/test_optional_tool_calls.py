"""Optional tool calls with SmolLM2, which calls a tool after one example of a call.

Every request is also streamed, with the same result.
"""

from __future__ import annotations

import json

import pytest

CLOCK = {
    "type": "object",
    "properties": {"zone": {"type": "string", "enum": ["CET", "UTC"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "clock", "description": "The time in a zone", "parameters": CLOCK}}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def result(call_id, text):
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def clock_call(zone, call_id):
    function = {"name": "clock", "arguments": json.dumps({"zone": zone})}
    return {"role": "assistant", "tool_calls": [{"id": call_id, "type": "function", "function": function}]}


EXAMPLE = [
    user("What time is it in zone CET?"),
    clock_call("CET", "a"),
    result("a", "13:00"),
    assistant("It is 13:00 in CET."),
    user("What time is it in zone UTC?"),
]


@pytest.fixture
def ask(smollm):
    def ask(messages, **more):
        fields = {"model": "default", "messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 60} | more
        choice = smollm.chat.completions.create(**fields).choices[0]
        with smollm.chat.completions.stream(**fields) as stream:
            events = list(stream)
            streamed = stream.get_final_completion().choices[0]
        assert streamed.finish_reason == choice.finish_reason
        assert (streamed.message.content or "") == (choice.message.content or "")
        assert calls_of(streamed.message) == calls_of(choice.message)
        return choice, events

    return ask


def calls_of(message):
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


def test_model_calls_a_tool_and_uses_its_result(ask) -> None:
    choice, events = ask(EXAMPLE)
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    assert calls_of(choice.message) == [("clock", {"zone": "UTC"})]
    deltas = [event.arguments_delta for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len(deltas) >= 2 and json.loads("".join(deltas)) == {"zone": "UTC"}
    answer, _ = ask([*EXAMPLE, choice.message, result(choice.message.tool_calls[0].id, "14:45")])
    assert answer.finish_reason == "stop" and "14:45" in answer.message.content


def test_model_may_answer_without_a_call(ask) -> None:
    choice, _ = ask([user("What is the capital of France?")], max_tokens=12)
    assert choice.message.content and not choice.message.tool_calls


def test_with_response_format_the_answer_is_a_call_or_json(ask) -> None:
    choice, _ = ask(EXAMPLE, response_format=FORMAT)
    assert calls_of(choice.message) == [("clock", {"zone": "UTC"})] and not choice.message.content
    choice, _ = ask(
        [user("Anna is 12."), assistant('{"name":"Anna","age":12}'), user("Ben is 40.")], response_format=FORMAT
    )
    assert json.loads(choice.message.content) == {"name": "Ben", "age": 40} and not choice.message.tool_calls


def test_regex_with_optional_tools_is_refused(ask) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as refused:
        ask(EXAMPLE, extra_body={"regex": "a*"})
    assert refused.value.param == "regex" and refused.value.code == "unsupported_combination"
