"""langchain-anthropic and langchain-ollama: messages, streams, tools, structured output and embeddings."""

from __future__ import annotations

import ollama
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from langchain_openai import OpenAIEmbeddings

ASK = "Tell me the capital of France in one short sentence."
TIME = "What time is it in zone CET?"


@tool
def clock(zone: str) -> str:
    """The time in a time zone."""
    return "It is noon."


@pytest.fixture(params=["anthropic", "ollama"])
def model(address, request):
    if request.param == "anthropic":
        return ChatAnthropic(base_url=address, api_key="none", model="default", temperature=0, max_tokens=80)
    return ChatOllama(base_url=address, model="default", temperature=0, num_predict=80)


def test_stream_equals_the_message(model) -> None:
    answer = model.invoke(ASK)
    assert "Paris" in answer.text and answer.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.text for chunk in model.stream(ASK)) == answer.text


def test_tool_turn(model) -> None:
    """Ollama's protocol cannot require a call, which the small model does not make by itself."""
    if isinstance(model, ChatAnthropic):
        bound = model.bind_tools([clock], tool_choice="any")
        call_message = bound.invoke(TIME)
        message = None
        for chunk in bound.stream(TIME):
            message = chunk if message is None else message + chunk
        assert [call["args"] for call in message.tool_calls] == [call["args"] for call in call_message.tool_calls]
    else:
        call = {"name": "clock", "args": {"zone": "CET"}, "id": "call_1", "type": "tool_call"}
        call_message = AIMessage("", tool_calls=[call])
    results = [clock.invoke(call) for call in call_message.tool_calls]
    assert results
    answer = model.bind_tools([clock]).invoke([HumanMessage(TIME), call_message, *results])
    assert answer.content or answer.tool_calls


def test_structured_output(model, person) -> None:
    parsed = model.with_structured_output(person, method="json_schema").invoke("Anna is 12 years old.")
    assert isinstance(parsed, person) and parsed.age == 12


def test_options_that_change_no_answer(address) -> None:
    options = dict(repeat_last_n=64, repeat_penalty=1.1, num_thread=2, num_gpu=0, num_ctx=4096, keep_alive="5m")
    assert ChatOllama(base_url=address, model="default", num_predict=8, **options).invoke(ASK).text


def test_ollama_completion(address) -> None:
    (listed,) = ollama.Client(address).list().models
    model = OllamaLLM(base_url=address, model=listed.model, temperature=0, num_predict=20, validate_model_on_init=True)
    assert model.invoke(ASK) == "".join(model.stream(ASK)) != ""


def test_embeddings(embedder) -> None:
    by_ollama = OllamaEmbeddings(base_url=embedder, model="default")
    by_openai = OpenAIEmbeddings(
        base_url=f"{embedder}/v1", api_key="none", model="default", check_embedding_ctx_length=False
    )
    for embeddings in (by_ollama, by_openai):
        assert len(embeddings.embed_query("a cat")) == 576 and len(embeddings.embed_documents(["a cat", "b"])) == 2
