"""openai: its helpers for parsing, streams and tools, over chat completions, responses, completions and embeddings."""

from __future__ import annotations

import json

import openai
import pytest

ASK = [{"role": "user", "content": "Tell me the capital of France in one short sentence."}]
ANNA = [{"role": "user", "content": "Anna is 12 years old."}]


@pytest.fixture(scope="module")
def client(base_url):
    return openai.OpenAI(base_url=base_url, api_key="none")


def test_streamed_chat_equals_the_answer(client) -> None:
    fields = dict(model="default", messages=ASK, temperature=0)
    answer = client.chat.completions.create(**fields)
    with client.chat.completions.stream(**fields) as stream:
        text = stream.get_final_completion().choices[0].message.content
    assert text == answer.choices[0].message.content and "Paris" in text


def test_streamed_response_equals_the_answer(client) -> None:
    fields = dict(model="default", input=ASK, temperature=0)
    answer = client.responses.create(**fields)
    with client.responses.stream(**fields) as stream:
        text = stream.get_final_response().output_text
    assert text == answer.output_text and "Paris" in text


def test_parsed_answers(client, person) -> None:
    fields = dict(model="default", temperature=0)
    completion = client.chat.completions.parse(**fields, messages=ANNA, response_format=person)
    response = client.responses.parse(**fields, input=ANNA, text_format=person)
    assert completion.choices[0].message.parsed == response.output_parsed == person(name="Anna", age=12)


def test_tool_turn_of_chat(client, person) -> None:
    fields = dict(model="default", temperature=0, max_tokens=60, tools=[openai.pydantic_function_tool(person)])
    message = client.chat.completions.parse(**fields, messages=ANNA, tool_choice="required").choices[0].message
    (call,) = message.tool_calls
    assert isinstance(call.function.parsed_arguments, person)
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    turns = [*ANNA, message, result]
    assert client.chat.completions.create(**fields, messages=turns, tool_choice="none").choices[0].message.content


def test_tool_turn_of_responses(client, person) -> None:
    tool = openai.pydantic_function_tool(person)["function"] | {"type": "function"}
    fields = dict(model="default", temperature=0, max_output_tokens=60, tools=[tool])
    first = client.responses.create(**fields, input=ANNA, tool_choice="required")
    (call,) = first.output
    assert person.model_validate(json.loads(call.arguments))
    turns = [*ANNA, *first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "done"}]
    assert client.responses.create(**fields, input=turns, tool_choice="none").output_text


def test_completion_and_embeddings(client, embedder) -> None:
    completion = client.completions.create(
        model="default", prompt="The capital of France is", max_tokens=4, temperature=0
    )
    assert "Paris" in completion.choices[0].text
    with openai.OpenAI(base_url=f"{embedder}/v1", api_key="none") as other:
        vectors = other.embeddings.create(model="default", input=["a cat", "a dog"])
    assert [len(entry.embedding) for entry in vectors.data] == [576, 576]
