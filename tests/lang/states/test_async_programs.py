"""Programs on an event loop: awaited reads, streams, forks, tools, nested programs."""

from __future__ import annotations

import threading

import pytest
from async_samples import chat, plain_program, run
from tool_examples import call_text

import plait
from plait import assistant, gen, user

pytestmark = pytest.mark.timeout(120)
NUMBER = gen("number", type=int)


def test_every_read_inside_an_async_program_is_awaited(backend):
    backend.script(default="5")

    @plait.function
    async def program(s):
        s += user("Q") + assistant(NUMBER)
        with s.var_scope("scope"):
            s += "..." + gen("tail", stop="x")
        s["mine"] = 3
        assert "number" in s and "other" not in s
        number = await s[NUMBER]
        return {
            "number": number + 1,
            "text_of": await s.text_of(NUMBER),
            "scope": await s["scope"],
            "mine": await s["mine"],
            "text": await s.text(),
            "messages": await s.messages(),
            "meta": (await s.get_meta_info("number"))["finish_reason"]["type"],
            "calls": (await s.usage).calls,
            "error": await s.error(),
            "sync": await s.sync(),
        }

    state = run(program.arun())
    reads = state.ret_value
    assert reads["number"] == 6 and reads["text_of"] == "5" and reads["scope"] == "...5" and reads["mine"] == 3
    assert reads["text"] == state.text() and reads["messages"] == state.messages()
    assert reads["meta"] == "stop" and reads["calls"] == 2 and reads["error"] is None and reads["sync"] is None
    assert state["number"] == 5, "the state of arun is read without await"


def test_run_arun_stream_and_batch_give_the_same_text(backend):
    async def streamed():
        state = await chat.arun("Q", stream=True)
        pieces = [piece async for piece in state.stream("answer")]
        await state.sync()
        return "".join(pieces), state.ret_value, await state.text(), await state["kind"]

    text = chat.run("Q").text()
    assert run(chat.arun("Q")).text() == text
    assert run(streamed()) == (" fine.", (" fine.", "yes"), text, "yes")
    state = chat.run("Q", stream=True)
    assert "".join(state.text_iter()) == text and state.ret_value == (" fine.", "yes")
    for states in (chat.run_batch([{"question": "Q"}] * 3), run(chat.arun_batch([{"question": "Q"}] * 3))):
        assert [state.text() for state in states] == [text] * 3
    assert run(plain_program.arun("Q")).text() == plain_program.run("Q").text()


def test_forks_and_copies_of_an_async_program(backend):
    @plait.function
    async def program(s):
        s += "Q"
        forks = s.fork(3)
        forks += lambda i: f"{i}:" + gen("tip")
        assert await forks[1]["tip"] == " fine."
        await forks.join()
        async with s.copy() as side:
            side += gen("side")
        return await s["tip"], await s["side"]

    assert run(program.arun()).ret_value == ([" fine."] * 3, [" fine."])


def test_async_tools_run_on_the_loop_and_plain_tools_in_a_thread(backend):
    seen = []

    async def async_tool(x: int) -> int:
        seen.append(threading.current_thread())
        return x + 1

    def plain_tool(x: int) -> int:
        seen.append(threading.current_thread())
        return x + 2

    @plait.function
    async def program(s, name):
        s += user("Q") + assistant(gen("call", tools=[async_tool, plain_tool]))
        return await s.call("call")

    for name, value in (("async_tool", 2), ("plain_tool", 3)):
        backend.script(default=call_text(name, x=1))
        assert run(program.arun(name)).ret_value.value == value
    assert seen[0] is threading.main_thread() is not seen[1]


def test_nested_async_programs(backend):
    @plait.function
    async def outer(s):
        await chat(s, "one")
        with pytest.raises(plait.InputError, match="'plain_program' is a plain function"):
            plain_program(s, "Q")
        return await s["answer"]

    @plait.function
    def calls_async_program(s):
        chat(s, "Q")

    state = run(outer.arun())
    assert state.ret_value == " fine." and len(state.messages()) == 4
    with pytest.raises(plait.ProgramError, match="'chat' is async def"):
        calls_async_program.run()
