"""Programs on an event loop: awaited reads, streams, thousands of concurrent programs without threads, cancellation."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from scripted_scheduler import Gate

import plait
from plait import assistant, gen, select, user
from plait.runtime.errors import CallFailed
from plait.runtime.messages import Generate

pytestmark = pytest.mark.timeout(30)
NUMBER = gen("number", type=int)


@plait.function
async def chat(s, question):
    s += user(question)
    s += assistant(gen("answer"))
    first = await s["answer"]
    s += user("More?") + assistant(select("kind", ["yes", "no"]))
    return first, await s["kind"]


@plait.function
def plain_program(s, question):
    s += question + gen("answer")


def run(coroutine):
    return asyncio.run(coroutine)


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
            "calls": (await s.usage()).calls,
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


def test_two_thousand_programs_run_on_one_loop(backend):
    count, gates = 2000, []
    all_sent = threading.Event()

    def answer(prompt, request):
        gates.append(Gate(f" {len(gates)}"))
        if len(gates) == count:
            all_sent.set()
        return gates[-1]

    backend.scheduler.answer = answer
    before = threading.active_count()

    @plait.function
    async def item(s, i):
        s += f"{i}:" + gen("x")
        return await s["x"]

    async def main():
        batch = asyncio.create_task(item.arun_batch([{"i": i} for i in range(count)]))
        while not all_sent.is_set():
            await asyncio.sleep(0.01)
        assert threading.active_count() <= before + 1, "programs hold no threads"
        for gate in list(gates):
            gate.open()
        return await batch

    states = run(main())
    assert sorted(state.ret_value for state in states) == sorted(f" {i}" for i in range(count))
    assert [state.text().split(":")[0] for state in states] == [str(i) for i in range(count)]
    assert backend.scheduler.open_sessions() == 0


def test_plain_programs_hold_no_thread_while_they_wait(backend):
    gates = []

    def answer(prompt, request):
        gates.append(Gate("x"))
        return gates[-1]

    backend.scheduler.answer = answer

    async def main():
        batch = asyncio.create_task(plain_program.arun_batch([{"question": str(i)} for i in range(300)]))
        while len(gates) < 300:  # many more than there are threads
            await asyncio.sleep(0.01)
        for gate in gates:
            gate.open()
        return await batch

    assert [state["answer"] for state in run(main())] == ["x"] * 300


def test_max_concurrency_and_progress_bar(backend, capsys):
    most, now = [0], [0]

    @plait.function
    async def item(s, i):
        now[0] += 1
        most[0] = max(most[0], now[0])
        await asyncio.sleep(0.001)
        now[0] -= 1

    run(item.arun_batch([{"i": i} for i in range(20)], max_concurrency=3, progress_bar=True))
    assert most[0] == 3 and "20/20" in capsys.readouterr().err
    item.run_batch([{"i": i} for i in range(5)], progress_bar=True)
    assert "5/5" in capsys.readouterr().err


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
        backend.script(default=json.dumps({"name": name, "arguments": {"x": 1}}, separators=(",", ":")))
        assert run(program.arun(name)).ret_value.value == value
    assert seen[0] is threading.main_thread() is not seen[1]


# -- errors and ends ------------------------------------------------------------------------------


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


def test_cancelling_the_task_ends_its_calls(backend):
    gate = Gate("never")
    backend.script(default=gate)

    async def main():
        task = asyncio.create_task(chat.arun("Q"))
        while not gate.reached.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert backend.scheduler.open_sessions() == 0

    run(main())


def test_run_inside_a_loop_names_arun(backend):
    async def main():
        with pytest.raises(plait.InputError, match=r"await program\.arun"):
            chat.run("Q")
        with pytest.raises(plait.InputError, match="arun_batch"):
            chat.run_batch([{"question": "Q"}])
        assert plain_program.run("Q")["answer"] == " fine."

    run(main())


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


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "auto"])
def test_wrong_argument_is_an_input_error(backend, value):
    with pytest.raises(plait.InputError, match="max_concurrency"):
        run(chat.arun_batch([{"question": "Q"}], max_concurrency=value))
    with pytest.raises(plait.InputError, match="stream"):
        run(chat.arun("Q", stream=1))
    with pytest.raises(plait.InputError, match="did you mean 'question'"):
        run(chat.arun(qestion="Q"))
    assert backend.scheduler.sent(Generate) == []
