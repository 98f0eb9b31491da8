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


def test_stream_equals_the_text(model) -> None:
    agent = Agent(model, model_settings=settings())
    result = agent.run_sync(ASK)
    assert isinstance(result.output, str) and "Paris" in result.output and result.usage.output_tokens > 0

    async def streamed():
        async with agent.run_stream(ASK) as result:
            return [text async for text in result.stream_text(delta=True, debounce_by=None)]

    pieces = asyncio.run(streamed())
    assert "".join(pieces) == result.output and len(pieces) > 1


@pytest.mark.parametrize("kind", [ToolOutput, NativeOutput])
def test_structured_output(model, person, kind) -> None:
    agent = Agent(model, output_type=kind(person), model_settings=settings(), retries=0)
    result = agent.run_sync("Anna is 12 years old.")
    # The output fits the schema; the small model chooses the values of tool arguments freely.
    assert isinstance(result.output, person)
    if kind is NativeOutput:
        assert result.output == person(name="Anna", age=12)

    async def streamed():
        async with agent.run_stream("Anna is 12 years old.") as result:
            return await result.get_output()

    assert asyncio.run(streamed()) == result.output


def test_tool_call_and_then_structured_output(model, person) -> None:
    """The model must call the tool or the output function; both schemas constrain it."""
    agent = Agent(model, output_type=ToolOutput(person), model_settings=settings(parallel_tool_calls=False), retries=3)
    calls_made: list[str] = []

    async def offer_once(ctx, definition):
        return None if calls_made else definition  # otherwise the small model would call the tool for ever

    @agent.tool_plain(prepare=offer_once)
    def age_of(name: str) -> int:
        """The age of a person."""
        calls_made.append(name)
        return 12

    result = agent.run_sync("How old is Anna? Call age_of first.")
    assert isinstance(result.output, person)
    calls = [part for part in message_parts(result.all_messages()) if isinstance(part, ToolCallPart)]
    returns = [part for part in message_parts(result.all_messages()) if isinstance(part, ToolReturnPart)]
    assert {call.tool_call_id for call in calls} >= {part.tool_call_id for part in returns}
    assert len(calls_made) == sum(call.tool_name == "age_of" for call in calls)


def test_structured_output_beside_tools(model, person) -> None:
    """One request with a schema for the answer and an optional tool."""
    agent = Agent(model, output_type=NativeOutput(person), model_settings=settings(), retries=0)

    calls_made: list[str] = []

    async def offer_once(ctx, definition):
        return None if calls_made else definition

    @agent.tool_plain(prepare=offer_once)
    def clock(zone: str) -> str:
        """The time in a time zone."""
        calls_made.append(zone)
        return "noon"

    result = agent.run_sync("Anna is 12 years old.")
    assert isinstance(result.output, person)


def test_message_history_continues_a_conversation(model) -> None:
    agent = Agent(model, model_settings=settings(max_tokens=30))
    first = agent.run_sync(ASK)
    second = agent.run_sync("And of Italy?", message_history=first.all_messages())
    responses = [message for message in second.all_messages() if isinstance(message, ModelResponse)]
    assert len(responses) == 2 and any(isinstance(part, TextPart) for part in responses[1].parts)


def message_parts(messages: list[ModelMessage]):
    return [part for message in messages for part in message.parts]
