"""litellm: one server over each of its providers that can reach it, complete and streamed."""

from __future__ import annotations

import asyncio
import json

import litellm
import pytest
from litellm.types.utils import ModelResponse, TextCompletionResponse

ASK = [{"role": "user", "content": "Tell me the capital of France in one short sentence."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "The time in a zone",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string", "enum": ["CET", "UTC"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}


OPENAI_PROVIDERS = ["openai", "hosted_vllm", "custom_openai", "litellm_proxy", "lm_studio", "llamafile"]
OPENAI_PROVIDERS += ["docker_model_runner", "lemonade", "xinference", "openai/responses"]
OLLAMA_PROVIDERS = ["ollama", "ollama_chat"]


@pytest.fixture(params=[*OPENAI_PROVIDERS, "anthropic", *OLLAMA_PROVIDERS])
def ask(address, request):
    """`litellm.completion` over one of the providers."""
    base = f"{address}/v1" if request.param in OPENAI_PROVIDERS else address

    def ask(**fields):
        fields = dict(messages=ASK, temperature=0, max_tokens=60, num_retries=0) | fields
        return litellm.completion(model=f"{request.param}/default", api_base=base, api_key="none", **fields)

    ask.protocol = request.param
    return ask


def test_stream_equals_the_message(ask) -> None:
    response = ask()
    assert isinstance(response, ModelResponse) and response.choices[0].finish_reason == "stop"
    text = response.choices[0].message.content
    assert "Paris" in text and response.usage.completion_tokens > 0
    chunks = list(ask(stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert chunks[-1].choices[0].finish_reason == "stop"
    rebuilt = litellm.stream_chunk_builder(chunks, messages=ASK)
    assert rebuilt.choices[0].message.content == text


def test_required_tool_call_and_result(ask) -> None:
    if ask.protocol in OLLAMA_PROVIDERS:
        pytest.skip("2026-11-21: Ollama's protocol has no tool_choice")
    fields = dict(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "clock"}})
    response = ask(**fields)
    (call,) = response.choices[0].message.tool_calls
    assert response.choices[0].finish_reason == "tool_calls" and call.function.name == "clock"
    assert json.loads(call.function.arguments)["zone"] in ("CET", "UTC")
    rebuilt = litellm.stream_chunk_builder(list(ask(**fields, stream=True)))
    (streamed,) = rebuilt.choices[0].message.tool_calls
    assert json.loads(streamed.function.arguments) == json.loads(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "12:30"}
    next_response = ask(
        messages=[*ASK, response.choices[0].message, result], tools=[TOOL], tool_choice="none", max_tokens=12
    )
    assert next_response.choices[0].message.content


def test_response_format_schema(ask, person) -> None:
    messages = [{"role": "user", "content": "Anna is 12 years old."}]
    response = ask(messages=messages, response_format=person)
    parsed = person.model_validate_json(response.choices[0].message.content)
    chunks = list(ask(messages=messages, response_format=person, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    if ask.protocol == "anthropic":  # litellm sends a tool without additionalProperties: other members, such as
        person.model_validate_json(text)  # "description", may follow until the runtime completes the value
        assert text.startswith('{"name": "')
    else:
        assert parsed.age == 12 and person.model_validate_json(text) == parsed


def test_async_stream_equals_the_message(base_url) -> None:
    async def both():
        fields = dict(model="openai/default", messages=ASK, api_base=base_url, api_key="none", temperature=0)
        response = await litellm.acompletion(**fields)
        stream = await litellm.acompletion(**fields, stream=True)
        return response.choices[0].message.content, [part.choices[0].delta.content or "" async for part in stream]

    response, pieces = asyncio.run(both())
    assert "".join(pieces) == response and "Paris" in response


def test_text_completion_and_responses(base_url) -> None:
    connection = dict(api_base=base_url, api_key="none")
    completion = litellm.text_completion(
        model="text-completion-openai/default",
        prompt="The capital of France is",
        max_tokens=4,
        temperature=0,
        **connection,
    )
    assert isinstance(completion, TextCompletionResponse) and "Paris" in completion.choices[0].text
    answer = litellm.responses(model="openai/default", input=ASK[0]["content"], temperature=0, **connection)
    assert "Paris" in answer.output[0].content[0].text and answer.usage.output_tokens > 0


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "ollama"])
def test_embeddings(embedder, provider) -> None:
    base = embedder if provider == "ollama" else f"{embedder}/v1"
    answer = litellm.embedding(model=f"{provider}/default", input=["a cat", "a dog"], api_base=base, api_key="none")
    assert [len(entry["embedding"]) for entry in answer.data] == [576, 576]


def test_errors_have_litellm_types(base_url) -> None:
    connection = dict(api_base=base_url, api_key="none", num_retries=0)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(model="openai/gpt-9", messages=ASK, **connection)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(model="openai/default", messages=[{"role": "user", "content": "a b " * 9000}], **connection)
    with pytest.raises(litellm.BadRequestError, match="cannot compute embeddings"):
        litellm.embedding(model="openai/default", input=["text"], **connection)
