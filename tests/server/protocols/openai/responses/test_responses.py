"""`/v1/responses` with OpenAI's client: answers, and streams whose events add up to them."""

from __future__ import annotations

import json

import jsonschema
import openai
import pytest
from openai.types.responses import ParsedResponse, Response
from pydantic import BaseModel

MODEL = "default"
ASK = "Tell me the capital of France in one short sentence."
CLOCK = {
    "type": "object",
    "properties": {"zone": {"enum": ["CET", "UTC"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "clock", "parameters": CLOCK, "strict": True}


def comparable(response):
    """The fields of a response that do not depend on ids and times."""
    items = [item.model_dump(exclude={"id", "call_id"}) for item in response.output]
    usage = response.usage.model_dump(exclude={"input_tokens_details"})
    return items, usage, response.status, response.incomplete_details


def create_and_stream(client, **request):
    """(response, events of its stream), after a check that they agree."""
    request = {"model": MODEL, "input": ASK, "temperature": 0, **request}
    response = client.responses.create(**request)
    assert isinstance(response, Response)
    events = list(client.responses.create(**request, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert comparable(events[-1].response) == comparable(response)
    assert events[-1].type == f"response.{response.status}"
    return response, events


@pytest.mark.parametrize("model", [{"model": MODEL}, {}])
def test_counted_tokens_are_those_of_the_response(smollm, model) -> None:
    """The model need not be named where nothing is generated."""
    request = {"input": ASK, "instructions": "Be short."}
    counted = smollm.responses.input_tokens.count(**model, **request)
    response = smollm.responses.create(model=MODEL, **request, max_output_tokens=1)
    assert counted.object == "response.input_tokens" and counted.input_tokens == response.usage.input_tokens


def test_text_and_events(smollm) -> None:
    response, events = create_and_stream(smollm)
    assert response.output_text == "The capital of France is Paris." and response.store is False
    event_types = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == response.output_text and len(deltas) > 1
    assert event_types[2:4] == ["response.output_item.added", "response.content_part.added"]
    assert event_types[4:-4] == ["response.output_text.delta"] * len(deltas)
    assert event_types[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {item_id_of(events)}


def item_id_of(events):
    return events[-1].response.output[0].id


def test_max_output_tokens_gives_an_incomplete_response(client) -> None:
    response, _ = create_and_stream(
        client, max_output_tokens=3, include=["message.output_text.logprobs"], top_logprobs=2
    )
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    logprobs = response.output[0].content[0].logprobs
    assert "".join(entry.token for entry in logprobs) == response.output_text
    assert response.usage.output_tokens == 3 and response.output[0].status == "incomplete"


def test_tool_call_and_result(client) -> None:
    response, events = create_and_stream(client, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    (call,) = response.output
    jsonschema.validate(json.loads(call.arguments), CLOCK)
    event_types = [event.type for event in events]
    assert event_types[2] == "response.output_item.added"
    assert event_types[-3:] == [
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12:30"}
    history = [{"role": "user", "content": ASK}, *response.output, result]
    answer, _ = create_and_stream(client, input=history, tools=[TOOL], tool_choice="none", max_output_tokens=12)
    assert answer.output_text


def test_instructions_items_and_earlier_answers(client) -> None:
    first, _ = create_and_stream(client, instructions="Be brief.", max_output_tokens=16)
    history = [
        {"role": "user", "content": [{"type": "input_text", "text": ASK}]},
        *first.output,
        {"type": "message", "role": "user", "content": "And of Italy?"},
    ]
    second, _ = create_and_stream(client, input=history, instructions="Be brief.", max_output_tokens=16)
    assert second.usage.input_tokens > first.usage.input_tokens and second.instructions == "Be brief."


def test_parse_gives_a_pydantic_model(smollm) -> None:
    class Person(BaseModel):
        name: str
        age: int

    answer = smollm.responses.parse(model=MODEL, input="Anna is 12.", text_format=Person, temperature=0)
    assert isinstance(answer, ParsedResponse)
    assert answer.output_parsed == Person(name="Anna", age=12)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "local_shell_call", "call_id": "x"}]}, "input[0].type"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "1"}]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"extra_body": {"frequency_penalty": 1}}, "frequency_penalty"),
    ],
)
def test_errors_name_the_parameter(client, wrong, param) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": MODEL, "input": "a", **wrong})
    assert caught.value.param == param
