"""How programs run and end: streaming, batches, threads, errors, interrupts. Nothing waits for ever."""

from __future__ import annotations

import asyncio
import concurrent.futures
import signal
import threading
import time
import traceback

import pytest
from scripted_scheduler import Gate

import plait
from plait import gen
from plait.runtime.messages import Generate

pytestmark = pytest.mark.timeout(20)


@plait.function
def qa(s, question):
    s += question + gen("answer")


# -- errors ---------------------------------------------------------------------------------------


@plait.function
def broken(s):
    s += "p" + gen("fine")
    raise ZeroDivisionError("by zero")


def test_an_exception_in_the_body_comes_from_run_with_its_traceback(backend):
    with pytest.raises(plait.ProgramError, match="program 'broken': ZeroDivisionError: by zero") as caught:
        broken.run()
    assert caught.value.program == "broken" and caught.value.variable is None
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert 'raise ZeroDivisionError("by zero")' in "".join(traceback.format_exception(caught.value))
    assert backend.scheduler.open_sessions() == 0


def test_an_exception_while_streaming_comes_from_every_read(backend):
    reads = [
        lambda state: state["fine"],
        lambda state: state["other"],
        lambda state: state.text(),
        lambda state: state.messages(),
        lambda state: state.sync(),
        lambda state: state.ret_value,
        lambda state: list(state.text_iter()),
        lambda state: list(state.text_iter("other")),
        lambda state: asyncio.run(collect(state.text_async_iter())),
        lambda state: asyncio.run(collect(state.text_async_iter("other"))),
        lambda state: state.get_meta_info("other"),
    ]
    for read in reads:
        state = broken.run(stream=True)
        assert isinstance(state.error().__cause__, ZeroDivisionError)
        for _ in range(2):
            with pytest.raises(plait.ProgramError, match="by zero") as caught:
                read(state)
            assert isinstance(caught.value.__cause__, ZeroDivisionError)


async def collect(pieces):
    return [piece async for piece in pieces]


def test_what_came_before_the_exception_is_streamed_first(backend):
    seen = []
    with pytest.raises(plait.ProgramError, match="by zero"):
        seen.extend(note(seen, broken.run(stream=True).text_iter()))
    assert seen[0] == "p"


def note(seen, pieces):
    for piece in pieces:
        seen.append(piece)
        yield from ()


def test_a_body_that_raises_ends_its_calls_and_readers_learn_why(backend):
    gate = Gate("never", early="some")
    backend.script(("p", gate))
    go = threading.Event()

    @plait.function
    def program(s):
        s += "p" + gen("x")
        s.fork(2)[0].__iadd__("q" + gen("y"))
        go.wait(5)
        raise LookupError("no document")

    state = program.run(stream=True)
    pieces = state.text_iter("x")
    assert next(pieces) == "some"
    go.set()
    with pytest.raises(plait.ProgramError, match="LookupError: no document"):
        list(pieces)
    assert state.error().variable is None
    assert backend.scheduler.open_sessions() == 0


def test_a_call_that_begins_while_the_program_is_ended_is_ended_too(backend):
    from plait.lang.core.results import GenResult
    from plait.lang.core.run import Run
    from plait.lang.sampling_options import Options
    from plait.runtime.sampling_params import SamplingParams

    backend.script(default=Gate("never"))
    run = Run("program", backend.client, Options())
    session = run.open_session()
    session.append("p")
    call = session.generate(SamplingParams())
    run.close(session)
    run.abort()
    run.add(GenResult(run, "x", call))
    assert isinstance(run.call_segments()[0].failure().__cause__, plait.Aborted)
    with pytest.raises(plait.Aborted):
        run.open_session()


def test_a_failed_call_names_program_and_variable(backend):
    backend.script(("b", plait.DeadlineExceeded("took longer than 2 s")))

    @plait.function
    def story(s):
        s += "a" + gen("first") + "b" + gen("second")

    said = "program 'story', variable 'second': DeadlineExceeded: took longer than 2 s"
    with pytest.raises(plait.ProgramError, match=said) as caught:
        story.run()
    assert (caught.value.program, caught.value.variable) == ("story", "second")

    state = story.run(stream=True)
    assert state["first"] == " fine."
    for read in (lambda: state["second"], state.text, state.sync, lambda: list(state.text_iter("second"))):
        with pytest.raises(plait.ProgramError, match=said):
            read()
    assert isinstance(state.error().__cause__, plait.DeadlineExceeded)
    assert state.usage.calls == 1 and state.usage.failed_calls == 1


def test_a_failed_select_too(backend):
    backend.scheduler.pick = lambda prompt, choices: plait.Overloaded("the queue is full")

    @plait.function
    def program(s):
        s += "p" + plait.select("x", ["a", "b"])

    with pytest.raises(plait.ProgramError, match="variable 'x': Overloaded: the queue is full"):
        program.run()
    state = program.run(stream=True)
    with pytest.raises(plait.ProgramError, match="Overloaded"):
        asyncio.run(collect(state.text_async_iter("x")))


def test_a_body_may_handle_a_failure(backend):
    backend.script(("p", plait.DeadlineExceeded("slow")), ("q", plait.Overloaded("full")))

    @plait.function
    def program(s, both):
        fork = s.copy()
        with fork as t:
            t += "p" + gen("x")
            try:
                _ = t["x"]
            except plait.ProgramError as error:
                s["x"] = f"gave up: {error.__cause__}"
                t["x"] = ""
        if both:
            s += "q" + gen("y")

    with pytest.raises(plait.ProgramError):
        program.run(False)  # join reads the branch's text again, and that still fails

    @plait.function
    def careful(s, both):
        side = s.fork()[0]
        side += "p" + gen("x")
        try:
            s["x"] = side["x"]
        except plait.ProgramError as error:
            s["x"] = f"gave up: {error.__cause__}"
        if both:
            s += "q" + gen("y")

    state = careful.run(False)
    assert state["x"] == "gave up: slow" and state.error() is None
    with pytest.raises(plait.ProgramError, match="variable 'y': Overloaded"):
        careful.run(True)


def test_a_name_never_generated(backend):
    @plait.function
    def program(s):
        s += "p" + gen("answer") + gen("reason")
        s["ansewr"]

    said = r"there is no variable 'ansewr' \(did you mean 'answer'\?\); it has 'answer', 'reason'"
    with pytest.raises(plait.ProgramError, match=said) as caught:
        program.run()
    assert isinstance(caught.value, KeyError) and isinstance(caught.value, plait.MissingVariable)

    state = qa.run("q")
    with pytest.raises(KeyError):
        state["nothing"]
    with pytest.raises(plait.MissingVariable, match="program 'qa': there is no variable 'nothing'; it has 'answer'"):
        state.get_meta_info("nothing")
    with pytest.raises(plait.MissingVariable, match="it has no variables yet"):
        plait.function(lambda s: None).run()["x"]


def test_a_program_inside_a_program_keeps_both_names(backend):
    @plait.function
    def outer(s):
        broken.run()

    with pytest.raises(plait.ProgramError, match="program 'outer': ProgramError: program 'broken': ZeroDivision"):
        outer.run()


def test_the_prompt_must_not_be_empty(backend):
    @plait.function
    def program(s):
        s += gen("x")

    with pytest.raises(plait.ProgramError, match="variable 'x': InputError: the prompt is empty"):
        program.run()


def test_an_ended_program_can_be_read_but_not_extended(backend):
    state = qa.run("q")
    with pytest.raises(plait.InputError, match="the program has ended"):
        state += "more"
    assert state.text() == "q fine."


def test_a_runtime_that_is_gone(backend):
    backend.scheduler.die("the runtime process ended")
    with pytest.raises(plait.ProgramError, match="RuntimeGone: the runtime process ended"):
        qa.run("q")
    assert all(isinstance(s.error().__cause__, plait.RuntimeGone) for s in qa.run_batch([{"question": "q"}] * 3))


def test_a_runtime_that_dies_ends_every_wait(backend):
    gate = Gate("never")
    backend.script(default=gate)
    states = [qa.run("q", stream=True) for _ in range(4)]
    assert gate.reached.wait(5)
    reads = [lambda s: s["answer"], lambda s: s.text(), lambda s: s.sync(), lambda s: list(s.text_iter())]
    outcomes = []

    def read(state, how):
        try:
            how(state)
        except plait.ProgramError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=read, args=pair) for pair in zip(states, reads, strict=True)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    backend.scheduler.die("killed")
    for thread in threads:
        thread.join(5)
    assert [type(error.__cause__) for error in outcomes] == [plait.RuntimeGone] * 4


# -- streaming ------------------------------------------------------------------------------------


def test_streaming_gives_pieces_while_the_answer_goes_on(backend):
    first, second = Gate("early late", early="early"), Gate("two")
    backend.script(("1:", first), ("2:", second))

    @plait.function
    def program(s):
        s += "1:" + gen("a") + "2:" + gen("b")
        return s["b"]

    state = program.run(stream=True)
    pieces = state.text_iter("a")
    assert next(pieces) + next(pieces) == "early"
    first.open()
    assert "".join(pieces) == " late"
    whole = state.text_iter()
    assert next(whole) == "1:"
    assert "b" in state and state["a"] == "early late"
    second.open()
    assert "1:" + "".join(whole) == "1:early late2:two" == state.text()
    assert state.ret_value == "two"
    assert list(state.text_iter(var_name="b")) == ["two"]


def test_a_name_is_awaited_until_it_appears_or_the_body_ends(backend):
    go = threading.Event()

    @plait.function
    def program(s):
        go.wait(5)
        s += "p" + gen("late")

    state = program.run(stream=True)
    assert "late" not in state
    threading.Timer(0.05, go.set).start()
    assert state["late"] == " fine."
    with pytest.raises(plait.MissingVariable):
        state["never"]


def test_the_body_does_not_wait_for_itself(backend):
    @plait.function
    def program(s):
        s += "p" + gen("x")
        assert list(s.text_iter()) == ["p", " fin", "e."]
        assert s.error() is None and s.usage.calls == 1 and s.ret_value is None
        s.sync()
        with concurrent.futures.ThreadPoolExecutor() as pool:
            assert isinstance(pool.submit(s.get_var, "y").exception(), KeyError)
        s["y"]

    state = program.run(stream=True)
    assert isinstance(state.error(), plait.MissingVariable)


def test_async_streaming(backend):
    gate = Gate("early late", early="early")
    backend.script(("1:", gate))

    @plait.function
    def program(s):
        time.sleep(0.02)
        s += plait.user("hi") + "1:" + gen("a") + plait.select("b", ["x", "y"])

    async def read():
        state = program.run(stream=True)
        seen = []
        async for piece in state.text_async_iter("a"):
            seen.append(piece)
            gate.open()
        whole = await collect(state.text_async_iter())
        with_meta = await collect(state.text_async_iter("a", return_meta_data=True))
        choice = await collect(state.text_async_iter("b", return_meta_data=True))
        with pytest.raises(plait.MissingVariable):
            await collect(state.text_async_iter("c"))
        return state, seen, whole, with_meta, choice

    state, seen, whole, with_meta, choice = asyncio.run(read())
    assert "".join(seen) == "early late"
    assert "".join(whole) == state.text()
    assert all(meta == {"finish_reason": None} for _, meta in with_meta[:-1])
    assert with_meta[-1] == ("", state.get_meta_info("a"))
    assert [piece for piece, _ in choice] == ["x", ""]
    with pytest.raises(plait.InputError, match="needs the name"):
        state.text_async_iter(return_meta_data=True)


def test_many_async_readers(backend):
    async def one(i):
        state = qa.run(f"q{i}", stream=True)
        return "".join(await collect(state.text_async_iter("answer")))

    async def everyone():
        return await asyncio.gather(*(one(i) for i in range(50)))

    assert asyncio.run(everyone()) == [" fine."] * 50


def test_abort_of_a_call_and_of_a_program(backend):
    gates = [Gate("never", early="some"), Gate("never"), Gate("never")]
    backend.script(("a", gates[0]), ("b", gates[1]), ("c", gates[2]))

    @plait.function
    def program(s):
        s += "a" + gen("x")
        next(s.text_iter("x"))
        s.abort("x")
        with pytest.raises(plait.ProgramError, match="variable 'x': Aborted"):
            s["x"]
        s += "b" + gen("y")
        s["y"]

    state = program.run(stream=True)
    assert gates[1].reached.wait(5)
    state.abort()
    assert isinstance(state.error().__cause__, plait.Aborted)
    assert backend.scheduler.open_sessions() == 0


# -- batches --------------------------------------------------------------------------------------


def test_a_batch_keeps_the_order_and_gives_each_item_its_error(backend):
    backend.scheduler.answer = lambda prompt, request: plait.Overloaded("full") if prompt == "q3" else prompt.upper()

    @plait.function
    def item(s, question):
        s += question + gen("answer")
        if question == "q5":
            raise LookupError("no such document")

    states = item.run_batch([{"question": f"q{i}"} for i in range(100)], temperature=0)
    assert all(each.sampling.temperature == 0 for each in backend.scheduler.sent(Generate))
    for i, state in enumerate(states):
        if i == 3:
            assert "variable 'answer': Overloaded" in str(state.error())
            for read in (state.text, lambda state=state: state["answer"]):
                with pytest.raises(plait.ProgramError, match="Overloaded"):
                    read()
        elif i == 5:
            assert isinstance(state.error().__cause__, LookupError)
            with pytest.raises(plait.ProgramError, match="no such document"):
                state["answer"]
        else:
            assert state.error() is None and state["answer"] == f"Q{i}"
    assert backend.scheduler.open_sessions() == 0
    assert item.run_batch([]) == []


@pytest.mark.parametrize(("threads", "at_a_time"), [(1, 1), (3, 3), ("auto", 9)])
def test_batches_run_as_many_at_a_time_as_they_may(backend, threads, at_a_time):
    now, most, lock = 0, 0, threading.Lock()
    together = threading.Barrier(at_a_time)

    @plait.function
    def item(s, i):
        nonlocal now, most
        with lock:
            now, most = now + 1, max(most, now + 1)
        together.wait(10)
        with lock:
            now -= 1

    states = item.run_batch([{"i": i} for i in range(9)], num_threads=threads)
    assert [state.error() for state in states] == [None] * 9
    assert most <= at_a_time


def test_a_batch_shows_its_progress(backend, capsys):
    qa.run_batch([{"question": "q"}] * 4, progress_bar=True)
    assert "4/4" in capsys.readouterr().err
    qa.run_batch([{"question": "q"}] * 4)
    assert capsys.readouterr().err == ""


def test_sys_exit_in_a_batch_is_that_items_error(backend):
    @plait.function
    def item(s, i):
        raise SystemExit(3)

    assert isinstance(item.run_batch([{"i": 1}])[0].error().__cause__, SystemExit)
    with pytest.raises(SystemExit):
        item.run(1)
    assert isinstance(item.run(1, stream=True).error().__cause__, SystemExit)


# -- interrupts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "start", [lambda: waiting.run("q"), lambda: waiting.run_batch([{"question": "q"}] * 5), lambda: qa.run("q")]
)
def test_an_interrupt_ends_the_sessions(backend, default_signals, start):
    gate = Gate("never")
    backend.script(default=gate)

    def interrupt():
        gate.reached.wait(5)
        time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        start()
    deadline = time.monotonic() + 5
    while backend.scheduler.open_sessions() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert backend.scheduler.open_sessions() == 0


@plait.function
def waiting(s, question):
    s += question + gen("answer")
    s["answer"]


# -- the default backend --------------------------------------------------------------------------


def test_two_threads_start_one_embedded_runtime_and_it_ends_at_exit(monkeypatch):
    import atexit

    from scripted_scheduler import ScriptedBackend

    import plait.lang.backends.default_backend as backends
    from plait.runtime.process import runtime as launch

    started, at_exit = [], []

    def slow_runtime(**settings):
        time.sleep(0.05)
        started.append(settings)
        return ScriptedBackend()

    monkeypatch.setattr(launch, "Runtime", slow_runtime)
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(backends, "_embedded", None)
    monkeypatch.setattr(backends, "_embedded_settings", {})
    plait.set_default_backend(None)
    backends.configure_embedded(model_path=None, device="cpu")
    states = []
    threads = [threading.Thread(target=lambda: states.append(qa.run("q"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    states += qa.run_batch([{"question": "q"}] * 2)
    assert [state["answer"] for state in states] == [" fine."] * 6
    assert started == [{"device": "cpu"}] and len(at_exit) == 1


def test_a_runtime_that_cannot_start_is_not_a_programs_error(monkeypatch):
    import plait.lang.backends.default_backend as backends
    from plait.runtime.process import runtime as launch

    def no_model(**settings):
        raise plait.ModelNotFound("run: pip install a-model")

    monkeypatch.setattr(launch, "Runtime", no_model)
    monkeypatch.setattr(backends, "_embedded", None)
    plait.set_default_backend(None)
    with pytest.raises(plait.ModelNotFound, match="pip install"):
        qa.run("q")


def test_a_backend_given_to_run_is_used(backend):
    from scripted_scheduler import ScriptedBackend

    other = ScriptedBackend()
    qa.run("q", backend=other)
    qa.run("q", backend=other.client)
    assert len(other.scheduler.sent(Generate)) == 2 and not backend.scheduler.requests


def test_a_failure_that_the_body_handled_is_not_raised_again(backend):
    backend.script(default=plait.DeadlineExceeded("too slow"))

    @plait.function
    def program(s, samples):
        s += "p"
        try:
            s += gen("y", n=samples, timeout=0.2)
            s["y"]
        except plait.ProgramError:
            return "caught"

    for samples in (1, 3):
        assert program.run(samples).ret_value == "caught"


def test_after_a_failure_the_state_cannot_go_on_but_a_copy_fails_alone(backend):
    backend.script(("slow", plait.DeadlineExceeded("too slow")))

    @plait.function
    def program(s, again):
        s += "p"
        try:
            with s.copy() as c:
                c += "slow" + gen("y")
                c["y"]
        except plait.ProgramError:
            s += "other" + gen("y")
        if again:
            s += "slow" + gen("z")
            assert s.error() is not None
            s += "more" + gen("z")
        return s["y"]

    assert program.run(False).ret_value == " fine."
    with pytest.raises(plait.ProgramError, match="'z': DeadlineExceeded: the session cannot continue"):
        program.run(True)
