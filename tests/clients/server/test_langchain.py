"""langchain-openai: messages, streams, tools and structured output, by chat completions, responses and completions."""

from __future__ import annotations

import asyncio

import openai
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

ASK = "Tell me the capital of France in one short sentence."


@tool
def clock(zone: str) -> str:
    """The time in a time zone."""
    return f"It is noon in {zone}."


def chat(base_url, **more):
    fields = dict(model="default", temperature=0, max_retries=0, max_tokens=80) | more
    return ChatOpenAI(base_url=base_url, api_key="none", **fields)


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def model(base_url, request):
    return chat(base_url, use_responses_api=request.param)


def test_stream_equals_the_message(model) -> None:
    answer = model.invoke([SystemMessage("You are helpful."), HumanMessage(ASK)])
    assert isinstance(answer, AIMessage) and "Paris" in answer.text
    assert answer.usage_metadata["total_tokens"] == sum(
        answer.usage_metadata[name] for name in ("input_tokens", "output_tokens")
    )
    chunks = list(model.stream([SystemMessage("You are helpful."), HumanMessage(ASK)]))
    assert all(isinstance(chunk, AIMessageChunk) for chunk in chunks) and len(chunks) > 3
    assert "".join(chunk.text for chunk in chunks) == answer.text


def test_async_stream_equals_the_message(model) -> None:
    async def both():
        message = await model.ainvoke(ASK)
        return message.text, "".join([chunk.text async for chunk in model.astream(ASK)])

    message, streamed = asyncio.run(both())
    assert message == streamed and "Paris" in message


@pytest.mark.parametrize("choice", ["any", "clock"])
def test_tool_call_and_result(model, choice) -> None:
    bound = model.bind_tools([clock], tool_choice=choice, parallel_tool_calls=False)
    answer = bound.invoke("What time is it in zone CET?")
    (call,) = answer.tool_calls
    assert call["name"] == "clock" and isinstance(call["args"]["zone"], str) and not answer.invalid_tool_calls
    message = None
    for chunk in bound.stream("What time is it in zone CET?"):
        message = chunk if message is None else message + chunk
    assert [(streamed["name"], streamed["args"]) for streamed in message.tool_calls] == [("clock", call["args"])]
    result = clock.invoke(call)
    assert isinstance(result, ToolMessage)
    turns = [HumanMessage("What time is it in zone CET?"), answer, result]
    next_message = model.bind_tools([clock], tool_choice="auto").invoke(turns)
    # A call that max_tokens cut off is in invalid_tool_calls.
    assert next_message.text or next_message.tool_calls or next_message.invalid_tool_calls


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output(model, person, method) -> None:
    if method == "function_calling":
        parsed = model.with_structured_output(person, method=method).invoke("Anna is 12 years old.")
    elif method == "json_schema":
        parsed = model.with_structured_output(person, method=method, strict=True).invoke("Anna is 12 years old.")
    else:
        prompt = 'Answer in JSON only, with no other keys: {"name": "Anna", "age": 12}'
        parsed = model.with_structured_output(method=method).invoke(prompt)
        assert isinstance(parsed, dict)
        return
    assert parsed == person(name="Anna", age=12)


def test_streamed_structured_output(base_url, person) -> None:
    parts = list(chat(base_url).with_structured_output(person, method="json_schema").stream("Anna is 12 years old."))
    assert parts[-1] == person(name="Anna", age=12)


def test_structured_output_beside_tools(base_url, person) -> None:
    """The model chooses: the answer fits the schema or is a tool call."""
    bound = chat(base_url).bind_tools([clock], response_format=person, strict=True)
    answer = bound.invoke("Anna is 12 years old.")
    assert answer.tool_calls or isinstance(answer.additional_kwargs["parsed"], person)


def test_logprobs_and_n(base_url) -> None:
    answer = chat(base_url, logprobs=True, top_logprobs=2, max_tokens=5).invoke(ASK)
    content = answer.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == answer.text and len(content[0]["top_logprobs"]) == 2
    result = chat(base_url, n=2, temperature=1.0, seed=3, max_tokens=5).generate([[HumanMessage(ASK)]])
    assert len(result.generations[0]) == 2


def test_completion_and_its_stream(base_url) -> None:
    model = OpenAI(base_url=base_url, api_key="none", model="default", temperature=0, max_tokens=4, max_retries=0)
    text = model.invoke("The capital of France is")
    assert text == "".join(model.stream("The capital of France is")) and "Paris" in text


def test_embeddings_are_refused(base_url) -> None:
    embeddings = OpenAIEmbeddings(
        base_url=base_url, api_key="none", model="default", max_retries=0, check_embedding_ctx_length=False
    )
    with pytest.raises(openai.BadRequestError, match="cannot compute embeddings"):
        embeddings.embed_query("text")
