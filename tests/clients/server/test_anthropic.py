"""anthropic: messages, streams, parsed answers, and the runner that calls tools until the model has answered."""

from __future__ import annotations

import anthropic
import pytest

ASK = [{"role": "user", "content": "Tell me the capital of France in one short sentence."}]
GREEDY = {"temperature": 0}  # this SDK has no argument for it
CLOCK_CALL = {"type": "tool", "name": "clock"}


@pytest.fixture(scope="module")
def client(address):
    return anthropic.Anthropic(base_url=address, api_key="none")


@pytest.fixture
def clock():
    @anthropic.beta_tool
    def clock(zone: str) -> str:
        """The time in a time zone."""
        zones.append(zone)
        return "It is noon."

    zones = clock.zones = []
    return clock


def test_streamed_message_equals_the_answer(client) -> None:
    fields = dict(model="default", max_tokens=60, messages=ASK, extra_body=GREEDY)
    answer = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
    assert text == answer.content[0].text and "Paris" in text
    counted = client.messages.count_tokens(model="default", messages=ASK).input_tokens
    assert counted == answer.usage.input_tokens + answer.usage.cache_read_input_tokens


def test_parsed_message(client, person) -> None:
    messages = [{"role": "user", "content": "Anna is 12 years old."}]
    message = client.messages.parse(
        model="default", max_tokens=60, messages=messages, output_format=person, extra_body=GREEDY
    )
    assert message.parsed_output == person(name="Anna", age=12)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_tool_runner(client, clock, is_streamed) -> None:
    """The runner asks for a thread first, and goes on without one."""
    runner = client.beta.messages.tool_runner(
        model="default",
        max_tokens=60,
        messages=ASK,
        tools=[clock],
        tool_choice=CLOCK_CALL,
        max_iterations=2,
        extra_body=GREEDY,
        stream=is_streamed,
    )
    messages = [turn.get_final_message() if is_streamed else turn for turn in runner]
    assert [message.content[-1].type for message in messages] == ["tool_use"] * 2 and len(clock.zones) >= 1


def test_tool_runner_until_done(client, clock) -> None:
    runner = client.beta.messages.tool_runner(
        model="default", max_tokens=60, messages=ASK, tools=[clock], max_iterations=3, extra_body=GREEDY
    )
    assert runner.until_done().content
