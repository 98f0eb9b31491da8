"""Programs on an event loop: awaited reads, streams, thousands at a time, cancelling. No thread waits for them."""

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
def plain(s, question):
    s += question + gen("answer")


def run(coroutine):
    return asyncio.run(coroutine)


def test_reads_are_awaited(backend):
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
    said = state.ret_value
    assert said["number"] == 6 and said["text_of"] == "5" and said["scope"] == "...5" and said["mine"] == 3
    assert said["text"] == state.text() and said["messages"] == state.messages()
    assert said["meta"] == "stop" and said["calls"] == 2 and said["error"] is None and said["sync"] is None
    assert state["number"] == 5, "the state that arun gives is read like any other"


def test_the_same_program_by_run_arun_stream_and_batch(backend):
    async def streamed():
        state = await chat.arun("Q", stream=True)
        pieces = [piece async for piece in state.stream("answer")]
        await state.sync()
        return "".join(pieces), state.ret_value, await state.text(), await state["kind"]

    whole = chat.run("Q").text()
    assert run(chat.arun("Q")).text() == whole
    assert run(streamed()) == (" fine.", (" fine.", "yes"), whole, "yes")
    state = chat.run("Q", stream=True)
    assert "".join(state.text_iter()) == whole and state.ret_value == (" fine.", "yes")
    for states in (chat.run_batch([{"question": "Q"}] * 3), run(chat.arun_batch([{"question": "Q"}] * 3))):
        assert [state.text() for state in states] == [whole] * 3
    assert run(plain.arun("Q")).text() == plain.run("Q").text()


def test_thousands_at_a_time_on_one_loop(backend):
    count, gates = 2000, []
    all_there = threading.Event()

    def answer(prompt, request):
        gates.append(Gate(f" {len(gates)}"))
        if len(gates) == count:
            all_there.set()
        return gates[-1]

    backend.scheduler.answer = answer
    before = threading.active_count()

    @plait.function
    async def one(s, i):
        s += f"{i}:" + gen("x")
        return await s["x"]

    async def main():
        batch = asyncio.create_task(one.arun_batch([{"i": i} for i in range(count)]))
        while not all_there.is_set():
            await asyncio.sleep(0.01)
        assert threading.active_count() <= before + 1, "no program holds a thread"
        for gate in list(gates):
            gate.open()
        return await batch

    states = run(main())
    assert sorted(state.ret_value for state in states) == sorted(f" {i}" for i in range(count))
    assert [state.text().split(":")[0] for state in states] == [str(i) for i in range(count)]
    assert backend.scheduler.open_sessions() == 0


def test_plain_programs_hold_no_thread_while_their_calls_go_on(backend):
    gates = []

    def answer(prompt, request):
        gates.append(Gate("x"))
        return gates[-1]

    backend.scheduler.answer = answer

    async def main():
        batch = asyncio.create_task(plain.arun_batch([{"question": str(i)} for i in range(300)]))
        while len(gates) < 300:  # many more than there are threads
            await asyncio.sleep(0.01)
        for gate in gates:
            gate.open()
        return await batch

    assert [state["answer"] for state in run(main())] == ["x"] * 300


def test_max_concurrency_and_progress(backend, capsys):
    most, now = [0], [0]

    @plait.function
    async def one(s, i):
        now[0] += 1
        most[0] = max(most[0], now[0])
        await asyncio.sleep(0.001)
        now[0] -= 1

    run(one.arun_batch([{"i": i} for i in range(20)], max_concurrency=3, progress_bar=True))
    assert most[0] == 3 and "20/20" in capsys.readouterr().err
    one.run_batch([{"i": i} for i in range(5)], progress_bar=True)
    assert "5/5" in capsys.readouterr().err


def test_branches(backend):
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


def test_async_tools_run_on_the_loop_and_plain_ones_beside_it(backend):
    seen = []

    async def here(x: int) -> int:
        seen.append(threading.current_thread())
        return x + 1

    def there(x: int) -> int:
        seen.append(threading.current_thread())
        return x + 2

    @plait.function
    async def program(s, name):
        s += user("Q") + assistant(gen("call", tools=[here, there]))
        return await s.call("call")

    for name, value in (("here", 2), ("there", 3)):
        backend.script(default=json.dumps({"name": name, "arguments": {"x": 1}}, separators=(",", ":")))
        assert run(program.arun(name)).ret_value.value == value
    assert seen[0] is threading.main_thread() is not seen[1]


# -- errors and ends ------------------------------------------------------------------------------


def test_errors_come_from_arun_and_from_every_read(backend):
    @plait.function
    async def broken(s):
        s += "p" + gen("fine")
        await s["fine"]
        raise ZeroDivisionError("by zero")

    with pytest.raises(plait.ProgramError, match="program 'broken': ZeroDivisionError: by zero"):
        run(broken.arun())
    with pytest.raises(plait.ProgramError, match="by zero"):
        broken.run()

    async def streamed():
        state = await broken.arun(stream=True)
        assert isinstance((await state.error()).__cause__, ZeroDivisionError)
        for read in (state["fine"], state.text(), state.messages(), state.sync(), state.get_meta_info("fine")):
            with pytest.raises(plait.ProgramError, match="by zero"):
                await read

    run(streamed())
    states = run(broken.arun_batch([{}] * 2))
    assert all(isinstance(state.error().__cause__, ZeroDivisionError) for state in states)
    assert backend.scheduler.open_sessions() == 0


def test_a_failed_call_names_its_variable_and_may_be_handled(backend):
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
        run(plain.arun("Q"))
    with pytest.raises(plait.MissingVariable, match="no variable 'y'"):
        run(missing.arun())


@plait.function
async def missing(s):
    await s["y"]


def test_cancelling_ends_the_calls_at_once(backend):
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


def test_inside_a_loop_run_says_what_to_write(backend):
    async def main():
        with pytest.raises(plait.InputError, match=r"await program\.arun"):
            chat.run("Q")
        with pytest.raises(plait.InputError, match="arun_batch"):
            chat.run_batch([{"question": "Q"}])
        assert plain.run("Q")["answer"] == " fine."

    run(main())


def test_programs_in_programs(backend):
    @plait.function
    async def outer(s):
        await chat(s, "one")
        with pytest.raises(plait.InputError, match="'plain' is a plain function"):
            plain(s, "Q")
        return await s["answer"]

    @plait.function
    def wrong(s):
        chat(s, "Q")

    state = run(outer.arun())
    assert state.ret_value == " fine." and len(state.messages()) == 4
    with pytest.raises(plait.ProgramError, match="'chat' is async def"):
        wrong.run()


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "auto"])
def test_wrong_arguments(backend, value):
    with pytest.raises(plait.InputError, match="max_concurrency"):
        run(chat.arun_batch([{"question": "Q"}], max_concurrency=value))
    with pytest.raises(plait.InputError, match="stream"):
        run(chat.arun("Q", stream=1))
    with pytest.raises(plait.InputError, match="did you mean 'question'"):
        run(chat.arun(qestion="Q"))
    assert backend.scheduler.sent(Generate) == []
