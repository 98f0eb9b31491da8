"""Aborts, interrupts and the end of the runtime: calls and waiting readers end, sessions are closed."""

from __future__ import annotations

import signal
import threading
import time

import pytest
from sample_programs import qa
from scripted_scheduler import Gate

import plait
from plait import gen

pytestmark = pytest.mark.timeout(120)


def test_exception_of_the_body_ends_calls_and_reaches_readers(backend):
    gate = Gate("never", early="some")
    backend.script(("p", gate))
    go = threading.Event()

    @plait.function
    def program(s):
        s += "p" + gen("x")
        s.fork(2)[0].__iadd__("q" + gen("y"))
        go.wait(60)
        raise LookupError("no document")

    state = program.run(stream=True)
    pieces = state.text_iter("x")
    assert next(pieces) == "some"
    go.set()
    with pytest.raises(plait.ProgramError, match="LookupError: no document"):
        list(pieces)
    assert state.error().variable is None
    assert backend.scheduler.open_sessions() == 0


def test_call_added_after_abort_is_aborted(backend):
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


def test_run_after_the_runtime_ended_raises_runtime_gone(backend):
    backend.scheduler.die("the runtime process ended")
    with pytest.raises(plait.ProgramError, match="RuntimeGone: the runtime process ended"):
        qa.run("q")
    assert all(isinstance(s.error().__cause__, plait.RuntimeGone) for s in qa.run_batch([{"question": "q"}] * 3))


def test_end_of_the_runtime_ends_every_waiting_read(backend):
    gate = Gate("never")
    backend.script(default=gate)
    states = [qa.run("q", stream=True) for _ in range(4)]
    assert gate.reached.wait(60)
    reads = [lambda s: s["answer"], lambda s: s.text(), lambda s: s.sync(), lambda s: list(s.text_iter())]
    outcomes = []

    def read(state, call):
        try:
            call(state)
        except plait.ProgramError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=read, args=pair) for pair in zip(states, reads, strict=True)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    backend.scheduler.die("killed")
    for thread in threads:
        thread.join(60)
    assert [type(error.__cause__) for error in outcomes] == [plait.RuntimeGone] * 4


def test_abort_ends_one_call_or_the_program(backend):
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
    assert gates[1].reached.wait(60)
    state.abort()
    assert isinstance(state.error().__cause__, plait.Aborted)
    assert backend.scheduler.open_sessions() == 0


@pytest.mark.parametrize(
    "start", [lambda: waiting.run("q"), lambda: waiting.run_batch([{"question": "q"}] * 5), lambda: qa.run("q")]
)
def test_interrupt_closes_the_sessions(backend, default_signals, start):
    gate = Gate("never")
    backend.script(default=gate)

    def interrupt():
        gate.reached.wait(60)
        time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        start()
    deadline = time.monotonic() + 60
    while backend.scheduler.open_sessions() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert backend.scheduler.open_sessions() == 0


@plait.function
def waiting(s, question):
    s += question + gen("answer")
    s["answer"]
