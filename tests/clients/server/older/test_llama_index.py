"""llama-index: openai-like and Ollama models, chat, streams, tools, structured output and embeddings."""

from __future__ import annotations

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.ollama import OllamaEmbedding
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike

ASK = "Tell me the capital of France in one short sentence."


def clock(zone: str) -> str:
    """The time in a time zone."""
    return "It is noon."


def openai_like(address, **more):
    return OpenAILike(model="default", api_base=f"{address}/v1", api_key="none", temperature=0, max_tokens=60, **more)


@pytest.fixture(params=["openai_like", "ollama"])
def llm(address, request):
    if request.param == "openai_like":
        return openai_like(address, is_chat_model=True, is_function_calling_model=True)
    return Ollama(model="default", base_url=address, temperature=0, request_timeout=120)  # context: that of /api/show


def test_stream_equals_the_answer(llm) -> None:
    messages = [ChatMessage(role="user", content=ASK)]
    answer = llm.chat(messages).message.content
    assert "Paris" in answer and "".join(chunk.delta or "" for chunk in llm.stream_chat(messages)) == answer
    assert llm.complete(ASK).text == answer


def test_tool_turn(llm) -> None:
    tool = FunctionTool.from_defaults(clock)
    fields = {"tool_required": True} if isinstance(llm, OpenAILike) else {}
    response = llm.chat_with_tools([tool], user_msg="What time is it?", **fields)
    calls = llm.get_tool_calls_from_response(response, error_on_no_tool_call=False)
    if isinstance(llm, Ollama):  # its protocol cannot require a call, which the small model does not make by itself
        return
    assert [call.tool_name for call in calls] == ["clock"]
    result = ChatMessage(role="tool", content="It is noon.", additional_kwargs={"tool_call_id": calls[0].tool_id})
    turns = [ChatMessage(role="user", content="What time is it?"), response.message, result]
    assert llm.chat(turns).message.content


def test_structured_output(llm, person) -> None:
    assert llm.as_structured_llm(person).complete("Anna is 12 years old.").raw.age == 12


def test_completion(address) -> None:
    llm = openai_like(address)
    text = llm.complete("The capital of France is").text
    assert "Paris" in text and "".join(chunk.delta for chunk in llm.stream_complete("The capital of France is")) == text


def test_embeddings(embedder) -> None:
    by_openai = OpenAILikeEmbedding(model_name="default", api_base=f"{embedder}/v1", api_key="none")
    by_ollama = OllamaEmbedding(model_name="default", base_url=embedder)
    for embedding in (by_openai, by_ollama):
        assert len(embedding.get_text_embedding("a cat")) == 576
        assert len(embedding.get_text_embedding_batch(["a cat", "a dog"])) == 2
