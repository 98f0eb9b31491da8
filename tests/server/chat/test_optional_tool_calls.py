"""Tools that may but need not be called, on a model that does: shown how once, SmolLM2 calls by itself.

Every answer is also asked for as a stream, which must say the same.
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


def said(text):
    return {"role": "assistant", "content": text}


def result(call_id, text):
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def called(zone, call_id):
    function = {"name": "clock", "arguments": json.dumps({"zone": zone})}
    return {"role": "assistant", "tool_calls": [{"id": call_id, "type": "function", "function": function}]}


SHOWN = [
    user("What time is it in zone CET?"),
    called("CET", "a"),
    result("a", "13:00"),
    said("It is 13:00 in CET."),
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


def test_the_model_calls_and_goes_on_with_the_result(ask) -> None:
    choice, events = ask(SHOWN)
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    assert calls_of(choice.message) == [("clock", {"zone": "UTC"})]
    deltas = [event.arguments_delta for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len(deltas) > 2 and json.loads("".join(deltas)) == {"zone": "UTC"}
    goes_on, _ = ask([*SHOWN, choice.message, result(choice.message.tool_calls[0].id, "14:45")])
    assert goes_on.finish_reason == "stop" and "14:45" in goes_on.message.content


def test_the_model_says_it_in_words(ask) -> None:
    choice, _ = ask([user("What is the capital of France?")], max_tokens=12)
    assert choice.message.content and not choice.message.tool_calls


def test_a_call_or_an_answer_that_fits(ask) -> None:
    """`response_format` beside tools: either, and nothing else."""
    choice, _ = ask(SHOWN, response_format=FORMAT)
    assert calls_of(choice.message) == [("clock", {"zone": "UTC"})] and not choice.message.content
    choice, _ = ask([user("Anna is 12."), said('{"name":"Anna","age":12}'), user("Ben is 40.")], response_format=FORMAT)
    assert json.loads(choice.message.content) == {"name": "Ben", "age": 40} and not choice.message.tool_calls


def test_a_pattern_beside_tools_is_refused(ask) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as refused:
        ask(SHOWN, extra_body={"regex": "a*"})
    assert refused.value.param == "regex" and refused.value.code == "unsupported_combination"
