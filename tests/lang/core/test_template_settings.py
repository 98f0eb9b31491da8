"""`chat_template_kwargs` of a run: the variables of the chat template for the turns of a program."""

from __future__ import annotations

import asyncio

import pytest
from qwen3_template import QWEN3
from scripted_scheduler import ScriptedBackend
from tool_examples import call_text

import plait
from plait import assistant, gen, system, user

OFF = {"enable_thinking": False}


@plait.function
def two_rounds(s):
    s += system("Be good.") + user("Why?") + assistant(gen("a"))
    with s.user():
        s += "Sure?"
    s.assistant(gen("b"))


@pytest.fixture
def qwen3():
    backend = ScriptedBackend(QWEN3)
    backend.scheduler.answer = lambda prompt, request: "yes"
    yield backend
    backend.shutdown()


def text_of(opening: str) -> str:
    answer = f"<|im_start|>assistant\n{opening}yes<|im_end|>\n"
    return (
        f"<|im_start|>system\nBe good.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n{answer}"
        f"<|im_start|>user\nSure?<|im_end|>\n{answer}"
    )


def test_thinking_of_qwen3_is_switched_off_for_a_run(qwen3) -> None:
    assert two_rounds.run(backend=qwen3).text() == text_of("")
    for _ in range(2):
        state = two_rounds.run(backend=qwen3, chat_template_kwargs=OFF)
        assert state.text() == text_of("<think>\n\n</think>\n\n")
        assert state["a"] == state["b"] == "yes" and state.messages()[2]["content"] == "yes"
    assert two_rounds.run(backend=qwen3).text() == text_of(""), "the variables are those of one run"


def test_every_way_to_run_takes_the_variables(qwen3) -> None:
    expected, options = text_of("<think>\n\n</think>\n\n"), {"backend": qwen3, "chat_template_kwargs": OFF}
    states = [
        *two_rounds.run_batch([{}, {}], **options),
        asyncio.run(two_rounds.arun(**options)),
        *asyncio.run(two_rounds.arun_batch([{}], **options)),
        two_rounds.run(stream=True, **options),
        two_rounds.compile(**options).run(backend=qwen3),
        two_rounds.compile(chat_template_kwargs=OFF).run(backend=qwen3),
    ]
    assert [state.text() for state in states] == [expected] * len(states)


def test_forks_and_tools_use_the_variables(qwen3) -> None:
    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    @plait.function
    def program(s):
        s += system("Tools.", tools=[add]) + user("1 + 2?")
        s.fork(2).join()
        s += assistant(gen("call", tools=[add]))

    qwen3.scheduler.answer = lambda prompt, request: call_text("add", a=1, b=2)
    text = program.run(backend=qwen3, chat_template_kwargs=OFF).text()
    assert '<|im_start|>assistant\n<think>\n\n</think>\n\n<tool_call>\n{"name": "add"' in text


def test_a_batch_of_other_variables_is_not_resumed(qwen3, tmp_path) -> None:
    file = tmp_path / "batch.jsonl"
    (thinking,) = two_rounds.run_batch([{}], backend=qwen3, resume=file)
    (off,) = two_rounds.run_batch([{}], backend=qwen3, resume=file, chat_template_kwargs=OFF)
    assert (thinking.text(), off.text()) == (text_of(""), text_of("<think>\n\n</think>\n\n"))


def test_compiled_programs_show_and_send_the_variables() -> None:
    graph = two_rounds.compile(chat_template_kwargs=OFF)
    assert 'defaults chat_template_kwargs={"enable_thinking": false}' in str(graph)
    assert graph.json()["chat_template_kwargs"] == OFF
    assert "chat_template_kwargs" not in two_rounds.compile().json()


@pytest.mark.parametrize(
    ("template", "variables", "message"),
    [
        (QWEN3, {"enable_thinkin": False}, "no variable 'enable_thinkin'; it has: .*enable_thinking"),
        (QWEN3, [1], r"run: chat_template_kwargs must be a dict of variables, not \[1\]"),
        (QWEN3, {1: 2}, "chat_template_kwargs must be a dict"),
        (None, OFF, "chat_template_kwargs: this model has no chat template"),
    ],
)
def test_wrong_variables_are_refused_before_anything_runs(template, variables, message) -> None:
    backend = ScriptedBackend(template)
    with pytest.raises(plait.InputError, match=message):
        two_rounds.run(backend=backend, chat_template_kwargs=variables)
    assert not backend.scheduler.requests
    backend.shutdown()


def test_gen_has_no_such_keyword() -> None:
    with pytest.raises(plait.InputError, match="chat_template_kwargs"):
        gen("x", chat_template_kwargs=OFF)
