"""Errors of programs on an event loop: exceptions, failed calls, wrong arguments, run inside a loop."""

from __future__ import annotations

import asyncio

import pytest
from async_samples import chat, plain_program, run

import plait
from plait import assistant, gen, user
from plait.runtime.errors import CallFailed
from plait.runtime.messages import Generate
from plait.testing import Scripted, call

pytestmark = pytest.mark.timeout(120)
EVER_S = 60.0


def test_arun_and_every_read_raise_the_exception_of_the_body(backend):
    @plait.function
    async def failing(s):
        s += "p" + gen("fine")
        await s["fine"]
        raise ZeroDivisionError("by zero")

    with pytest.raises(plait.ProgramError, match="program 'failing': ZeroDivisionError: by zero"):
        run(failing.arun())
    with pytest.raises(plait.ProgramError, match="by zero"):
        failing.run()

    async def streamed():
        state = await failing.arun(stream=True)
        assert isinstance((await state.error()).__cause__, ZeroDivisionError)
        for read in (state["fine"], state.text(), state.messages(), state.sync(), state.get_meta_info("fine")):
            with pytest.raises(plait.ProgramError, match="by zero"):
                await read

    run(streamed())
    states = run(failing.arun_batch([{}] * 2))
    assert all(isinstance(state.error().__cause__, ZeroDivisionError) for state in states)
    assert backend.scheduler.open_sessions() == 0


def test_failed_call_names_its_variable_and_can_be_handled(backend):
    backend.script(default=CallFailed("no", "deadline"))

    @plait.function
    async def handles(s):
        try:
            async with s.copy() as side:
                side += "x" + gen("x")
                await side["x"]
        except plait.ProgramError as error:
            return error.variable

    assert run(handles.arun()).ret_value == "x"
    with pytest.raises(plait.ProgramError, match="variable 'answer'"):
        run(plain_program.arun("Q"))
    with pytest.raises(plait.MissingVariable, match="no variable 'y'"):
        run(reads_missing_variable.arun())


@plait.function
async def reads_missing_variable(s):
    await s["y"]


def test_run_inside_a_loop_names_arun(backend):
    async def main():
        with pytest.raises(plait.InputError, match=r"await program\.arun"):
            chat.run("Q")
        with pytest.raises(plait.InputError, match="arun_batch"):
            chat.run_batch([{"question": "Q"}])
        assert plain_program.run("Q")["answer"] == " fine."

    run(main())


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "auto"])
def test_wrong_argument_is_an_input_error(backend, value):
    with pytest.raises(plait.InputError, match="max_concurrency"):
        run(chat.arun_batch([{"question": "Q"}], max_concurrency=value))
    with pytest.raises(plait.InputError, match="stream"):
        run(chat.arun("Q", stream=1))
    with pytest.raises(plait.InputError, match="did you mean 'question'"):
        run(chat.arun(qestion="Q"))
    assert backend.scheduler.sent(Generate) == []


def test_a_join_without_await_joins(backend, recwarn):
    backend.script(default="a")

    @plait.function
    async def program(s):
        s += "Q"
        forks = s.fork(2)
        forks += gen("x")
        forks.join()
        return await s["x"]

    assert run(program.arun()).ret_value == ["a", "a"]
    assert not [warning for warning in recwarn if "never awaited" in str(warning.message)]


def test_names_of_async_states_on_a_plain_one(backend):
    @plait.function
    def program(s):
        s += "Q" + gen("x")

    with pytest.raises(AttributeError, match=r"no attribute 'stream' \(did you mean 'text_iter'\?\)"):
        program.run().stream("x")


def test_stop_iteration_in_a_thread_ends_the_wait_for_it():
    """Python 3.11 does not hand it on from a thread to an event loop: the program waited for ever."""

    def first() -> str:
        return next(iter([]))

    @plait.function
    async def calls_tool(s):
        s += user("?") + assistant(gen("call", tools=[first]))
        return (await s.call("call")).error

    @plait.function
    def plain(s):
        first()

    async def run_both():
        backend = Scripted([call("first")])
        state = await asyncio.wait_for(calls_tool.arun(backend=backend), EVER_S)
        assert isinstance(state.ret_value.__cause__, StopIteration)
        with pytest.raises(plait.ProgramError, match="StopIteration"):
            await asyncio.wait_for(plain.arun(backend=backend), EVER_S)

    asyncio.run(run_both())
