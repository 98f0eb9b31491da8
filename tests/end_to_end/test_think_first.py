"""`gen(..., think=True)`: free reasoning, then a value of the constraint, on the embedded model."""

from __future__ import annotations

import json
from typing import Literal

import pytest
from pydantic import BaseModel

import plait
from plait.constrained import Choices, Reasoning
from plait.runtime.sampling_params import sampling_params

QUESTION = "Q: What is 6 times 7?\nA: "
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}


class Answer(BaseModel):
    n: int


def run(runtime, **keywords):
    @plait.function
    def program(s):
        s += QUESTION + plait.gen("x", **keywords)

    return program.run(backend=runtime, temperature=0)


def parts(state, begin="<think>"):
    """(reasoning, value) of the text, by its marks."""
    text = state.text().removeprefix(QUESTION)
    assert text.startswith(begin)
    reasoning, mark, value = text.removeprefix(begin).partition("</think>\n\n")
    assert mark
    return reasoning, value


@pytest.mark.parametrize(
    ("constraint", "check"),
    [
        ({"json_schema": SCHEMA}, lambda value: type(json.loads(value)["n"]) is int),
        ({"regex": "[0-9]{2}"}, lambda value: value.isdigit() and len(value) == 2),
        ({"ebnf": 'root ::= "yes" | "no"'}, lambda value: value in ("yes", "no")),
        ({"lark": 'start: "a" | "b"'}, lambda value: value in ("a", "b")),
        ({"constraint": Choices(("left", "right"))}, lambda value: value in ("left", "right")),
    ],
)
def test_a_value_of_the_constraint_follows_the_reasoning(runtime, constraint, check):
    state = run(runtime, think=True, think_tokens=8, max_tokens=60, **constraint)
    reasoning, value = parts(state)
    assert check(value) and state["x"] == value
    assert state["x_reasoning_content"] == reasoning and reasoning


def test_a_typed_value_is_an_object_and_samples_have_their_own_reasoning(runtime):
    state = run(runtime, think=True, think_tokens=6, max_tokens=48, type=Answer, n=3, temperature=1.0, seed=1)
    assert all(type(answer) is Answer for answer in state["x"])
    assert len(state["x_reasoning_content"]) == 3 and len(set(state["x_reasoning_content"])) > 1
    assert run(runtime, think=True, think_tokens=0, max_tokens=48, type=Literal["a", "b"])["x"] in ("a", "b")


def test_a_typed_value_is_complete_when_max_tokens_end_the_reasoning(runtime):
    state = run(runtime, think=True, max_tokens=24, type=Answer)
    assert type(state["x"]) is Answer and len(state["x_reasoning_content"]) > 10
    assert state.get_meta_info("x")["completion_tokens"] <= 24


def test_stop_strings_are_for_the_value(runtime):
    free = run(runtime, think=True, think_tokens=8, max_tokens=40, regex="[a-z]{1,8}END[a-z]*")
    stops = ["END", " ", "\n"]
    stopped = run(runtime, think=True, think_tokens=8, max_tokens=40, regex="[a-z]{1,8}END[a-z]*", stop=stops)
    assert stopped["x_reasoning_content"] == free["x_reasoning_content"]
    assert " " in stopped["x_reasoning_content"]
    assert free["x"].startswith(stopped["x"] + "END") and "END" not in stopped["x"]


def test_a_compiled_program_and_forks_think(runtime):
    @plait.function
    def program(s):
        s += QUESTION
        forks = s.fork(2)
        for fork in forks:
            fork += plait.gen("x", think=True, think_tokens=5, max_tokens=30, regex="[0-9]{1,3}")
        s["all"] = " ".join(fork["x"] for fork in forks)

    direct = program.run(backend=runtime)
    assert all(number.isdigit() for number in direct["all"].split())

    @plait.function
    def straight(s, question):
        s += question + plait.gen("x", think=True, think_tokens=5, max_tokens=30, regex="[0-9]{1,3}")
        s += "\n" + plait.gen("y", max_tokens=3)

    compiled = straight.compile(temperature=0).run(question=QUESTION, backend=runtime)
    plain = straight.run(QUESTION, backend=runtime, temperature=0)
    for state in (compiled, plain):
        reasoning, x, y = (state[name] for name in ("x_reasoning_content", "x", "y"))
        assert x.isdigit() and reasoning
        assert state.text() == f"{QUESTION}<think>{reasoning}</think>\n\n{x}\n{y}"


def test_reasoning_is_counted(runtime):
    session = runtime.client.open_session()
    session.append(QUESTION)
    spec = Reasoning(Choices(("yes", "no")), max_tokens=4)
    result = session.generate(sampling_params(max_tokens=30), spec).result()
    session.close()
    head, mark, value = result.text.partition("</think>\n\n")
    assert value in ("yes", "no")
    token_bytes = runtime.client.tokenizer.vocabulary.token_bytes
    reasoning = result.token_ids[: result.usage.reasoning_tokens]
    assert b"".join(token_bytes[token] for token in reasoning).decode() == head + mark
    assert result.usage.completion_tokens == len(result.token_ids) > len(reasoning)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"think": True}, "think needs a constraint"),
        ({"think": True, "regex": "a", "exact": True}, "cannot be combined with exact"),
        ({"think": "gpt", "regex": "a"}, "think must be True or one of deepseek-r1"),
        ({"think_tokens": 3, "regex": "a"}, "think_tokens needs think=True"),
        ({"think": True, "think_tokens": -1, "regex": "a"}, "think_tokens must be a number"),
    ],
)
def test_wrong_use_is_an_input_error(keywords, message):
    with pytest.raises(plait.InputError, match=message):
        plait.gen("x", **keywords)
