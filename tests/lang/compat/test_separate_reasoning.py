"""separate_reasoning: the thought of a reasoning model and its answer are two variables."""

from __future__ import annotations

import asyncio

import pytest

import plait as sgl
from plait.lang.core.derived.reasoning import REASONING_TAGS


@pytest.mark.parametrize(
    ("model_type", "text", "thought", "answer"),
    [
        ("qwen3", "<think>\nso\n</think>\n\nyes", "so", "yes"),
        ("qwen3", "yes", "", "yes"),
        ("Qwen3", "<think>cut off", "cut off", ""),
        ("deepseek-r1", "so</think>yes", "so", "yes"),
        ("deepseek-r1", "<think>so</think>yes", "so", "yes"),
        ("kimi", "◁think▷so◁/think▷yes", "so", "yes"),
    ],
)
def test_separate_reasoning_splits_thought_and_answer(backend, model_type, text, thought, answer):
    backend.script(default=text)

    @sgl.function
    def program(s):
        s += sgl.user("Q")
        s += sgl.assistant(sgl.separate_reasoning(sgl.gen("x", max_tokens=99), model_type=model_type))
        return s["x"], s["x_reasoning_content"]

    state = program.run()
    assert state.ret_value == (answer, thought) == (state["x"], state["x_reasoning_content"])
    assert state.messages()[1]["content"] == text and "".join(state.text_iter("x")) == answer
    assert state.get_meta_info("x")["finish_reason"]["type"] == "stop"
    assert program.run(n=2)["x"] == [answer] * 2


def test_separate_reasoning_in_an_async_program(backend):
    backend.script(default="<think>so</think>yes")

    @sgl.function
    async def program(s):
        s += "Q" + sgl.separate_reasoning(sgl.gen("x", max_tokens=99) + "." + sgl.gen("y", max_tokens=99), "glm45")
        return await s["x"], await s["y_reasoning_content"], [piece async for piece in s.stream("x")]

    assert asyncio.run(program.arun()).ret_value == ("yes", "so", ["yes"])


def test_wrong_use_of_separate_reasoning_is_an_input_error():
    for make, message in (
        (lambda: sgl.separate_reasoning(sgl.gen("x"), model_type="gpt"), "model_type must be one of deepseek-r1"),
        (lambda: sgl.separate_reasoning(sgl.gen(), "qwen3"), "needs a name"),
        (lambda: sgl.separate_reasoning(sgl.gen("x", regex="a"), "qwen3"), "cannot contain reasoning"),
    ):
        with pytest.raises(sgl.InputError, match=message):
            make()
    assert len(REASONING_TAGS) == 7
