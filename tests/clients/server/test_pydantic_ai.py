"""pydantic-ai: agents with text, tools and structured output by tools and schemas, by chat and by responses."""

from __future__ import annotations

import asyncio

import pytest
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

ASK = "Tell me the capital of France in one short sentence."


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel], ids=["chat", "responses"])
def model(base_url, request):
    return request.param("default", provider=OpenAIProvider(base_url=base_url, api_key="none"))


def settings(**more):
    return {"temperature": 0.0, "max_tokens": 100} | more


def test_text_and_its_stream(model) -> None:
    agent = Agent(model, model_settings=settings())
    found = agent.run_sync(ASK)
    assert isinstance(found.output, str) and "Paris" in found.output and found.usage.output_tokens > 0

    async def streamed():
        async with agent.run_stream(ASK) as result:
            return [text async for text in result.stream_text(delta=True, debounce_by=None)]

    pieces = asyncio.run(streamed())
    assert "".join(pieces) == found.output and len(pieces) > 1


@pytest.mark.parametrize("kind", [ToolOutput, NativeOutput])
def test_structured_output(model, person, kind) -> None:
    agent = Agent(model, output_type=kind(person), model_settings=settings(), retries=0)
    found = agent.run_sync("Anna is 12 years old.")
    assert isinstance(found.output, person)  # it fits; so small a model reads a tool's arguments as it likes
    if kind is NativeOutput:
        assert found.output == person(name="Anna", age=12)

    async def streamed():
        async with agent.run_stream("Anna is 12 years old.") as result:
            return await result.get_output()

    assert asyncio.run(streamed()) == found.output


def test_a_tool_and_then_an_answer(model, person) -> None:
    """The model must call something until its answer is there; the two schemas hold either way."""
    agent = Agent(model, output_type=ToolOutput(person), model_settings=settings(parallel_tool_calls=False), retries=3)
    asked: list[str] = []

    async def only_once(ctx, definition):
        return None if asked else definition  # so small a model would ask for ever

    @agent.tool_plain(prepare=only_once)
    def age_of(name: str) -> int:
        """How old somebody is."""
        asked.append(name)
        return 12

    found = agent.run_sync("How old is Anna? Call age_of first.")
    assert isinstance(found.output, person)
    calls = [part for part in parts(found.all_messages()) if isinstance(part, ToolCallPart)]
    returns = [part for part in parts(found.all_messages()) if isinstance(part, ToolReturnPart)]
    assert {call.tool_call_id for call in calls} >= {each.tool_call_id for each in returns}
    assert len(asked) == sum(call.tool_name == "age_of" for call in calls)


def test_structured_output_beside_tools(model, person) -> None:
    """A schema for the answer and tools that need not be called, in one request."""
    agent = Agent(model, output_type=NativeOutput(person), model_settings=settings(), retries=0)

    asked: list[str] = []

    async def only_once(ctx, definition):
        return None if asked else definition

    @agent.tool_plain(prepare=only_once)
    def clock(zone: str) -> str:
        """The time in a time zone."""
        asked.append(zone)
        return "noon"

    found = agent.run_sync("Anna is 12 years old.")
    assert isinstance(found.output, person)


def test_a_conversation_goes_on(model) -> None:
    agent = Agent(model, model_settings=settings(max_tokens=30))
    first = agent.run_sync(ASK)
    second = agent.run_sync("And of Italy?", message_history=first.all_messages())
    responses = [each for each in second.all_messages() if isinstance(each, ModelResponse)]
    assert len(responses) == 2 and any(isinstance(part, TextPart) for part in responses[1].parts)


def parts(messages: list[ModelMessage]):
    return [part for message in messages for part in message.parts]
