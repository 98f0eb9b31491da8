"""Tool calls of the embedded model: every generated call can be executed; `tool_choice="auto"` allows text instead."""

from __future__ import annotations

import pytest

import plait
from plait import assistant, gen, system, user


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def look_up(word: str, languages: list[str] | None = None) -> str:
    """Looks up a word in a dictionary."""
    return f"{word}: unknown"


@plait.function
def agent(s, question, start, **keywords):
    s += system("You are a helpful assistant.", tools=[add, look_up])
    s += user(question)
    s += assistant(start + gen("step", tools=[add, look_up], max_tokens=64, **keywords))
    result = s.call("step")
    s += assistant(gen("answer", max_tokens=8))
    return result


@pytest.mark.parametrize("seed", range(4))
def test_every_generated_call_can_be_executed(runtime, seed):
    state = agent.run("What is 17 + 25?", "", backend=runtime, temperature=1.2, seed=seed)
    result = state.ret_value
    assert result.error is None and result.name == state["step"].name
    assert result.value == result.call.tool.function(**state["step"].arguments)


@plait.function
def agent_with_examples(s):
    s += system("You are an assistant that always calls tools.", tools=[add])
    for a, b in ((1, 2), (3, 4), (10, 5)):
        s += user(f"What is {a} + {b}?")
        s += assistant(f'<tool_call>\n{{"name":"add","arguments":{{"a":{a},"b":{b}}}}}\n</tool_call>')
        s += user(f"Result of add: {a + b}") + assistant(f"It is {a + b}.")
    s += user("What is 17 + 25?") + assistant(gen("step", tools=[add], tool_choice="auto", max_tokens=80))
    result = s.call("step")
    s += assistant(gen("answer", max_tokens=8, stop="."))
    return result


def test_auto_gives_text_or_ends_after_a_call(runtime):
    free = agent.run("Say hello.", "", tool_choice="auto", temperature=0, backend=runtime)
    assert free["step"] is None and free.ret_value is None and free.text_of("step")
    called = agent_with_examples.run(temperature=0, backend=runtime)
    assert called.ret_value.value == 42 and called["answer"] == "It is 42"
    assert called.text_of("step").endswith("}\n</tool_call>")
