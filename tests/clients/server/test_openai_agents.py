"""openai-agents: agents with tools, typed output and handoffs, over responses (its default) and chat completions."""

from __future__ import annotations

import asyncio

import openai
import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool

ASK = "Tell me the capital of France in one short sentence."
SETTINGS = ModelSettings(temperature=0, max_tokens=80)
CALLING = ModelSettings(temperature=0, max_tokens=80, tool_choice="required")


@pytest.fixture(params=[OpenAIResponsesModel, OpenAIChatCompletionsModel], ids=["responses", "chat"])
def model(base_url, request):
    return request.param("default", openai.AsyncOpenAI(base_url=base_url, api_key="none"))


def clock_once():
    """A tool that is offered until it is called: the small model would call it for ever."""
    zones: list[str] = []

    @function_tool(is_enabled=lambda context, agent: not zones)
    def clock(zone: str) -> str:
        """The time in a time zone."""
        zones.append(zone)
        return "It is noon."

    return clock


def test_streamed_text_equals_the_answer(model) -> None:
    async def both():
        agent = Agent("Geographer", instructions="You are helpful.", model=model, model_settings=SETTINGS)
        streamed = Runner.run_streamed(agent, ASK)
        pieces = [
            event.data.delta
            async for event in streamed.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        return (await Runner.run(agent, ASK)).final_output, streamed.final_output, pieces

    answer, streamed, pieces = asyncio.run(both())
    assert answer == streamed == "".join(pieces) and "Paris" in answer and len(pieces) > 1


def test_tool_turn(model) -> None:
    async def both():
        agents = [Agent("Clock", model=model, tools=[clock_once()], model_settings=CALLING) for _ in range(2)]
        streamed = Runner.run_streamed(agents[0], "What time is it?")
        assert [event async for event in streamed.stream_events()]
        return (await Runner.run(agents[1], "What time is it?")).new_items, streamed.new_items

    kinds = ["tool_call_item", "tool_call_output_item", "message_output_item"]
    for items in asyncio.run(both()):
        assert [item.type for item in items] == kinds and items[1].output == "It is noon."


def test_output_type(model, person) -> None:
    agent = Agent("Reader", model=model, output_type=person, model_settings=SETTINGS)
    result = asyncio.run(Runner.run(agent, "Anna is 12 years old."))
    assert result.final_output == person(name="Anna", age=12)


def test_handoff(model) -> None:
    helper = Agent("Helper", model=model, model_settings=SETTINGS)
    agent = Agent("Desk", model=model, handoffs=[helper], model_settings=CALLING)
    assert asyncio.run(Runner.run(agent, "Hand over to the helper.")).last_agent.name == "Helper"
