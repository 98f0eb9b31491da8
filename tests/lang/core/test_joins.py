"""A join waits for nothing: joined variables are lists of values to come, and nested forks run side by side."""

from __future__ import annotations

import asyncio
import random
import threading
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_scheduler import Gate, ScriptedBackend
from seeded_programs import PROGRAMS, forwards, write

import plait
from plait import gen, race, select
from plait.runtime.errors import CallFailed
from plait.runtime.messages import Abort, Generate
from plait.testing import Recording, Replay

pytestmark = pytest.mark.timeout(60)


@plait.function
def nested(s, on_written=lambda: None):
    s += "p"
    outer = s.fork(3)
    for i, branch in enumerate(outer):
        inner = branch.fork(2)
        inner += lambda j, i=i: f"{i}{j}:" + gen("leaf")
        inner.join()
    outer.join()
    on_written()
    return s["leaf"]


@plait.function
async def nested_async(s, on_written=lambda: None):
    s += "p"
    outer = s.fork(3)
    for i, branch in enumerate(outer):
        inner = branch.fork(2)
        inner += lambda j, i=i: f"{i}{j}:" + gen("leaf")
        await inner.join()
    await outer.join()
    on_written()
    return await s["leaf"]


@plait.function
def nested_texts(s, on_written=lambda: None):
    s += "p"
    outer = s.fork(3)
    for i, branch in enumerate(outer):
        inner = branch.fork(2)
        inner += lambda j, i=i: f"[{i}{j}:" + gen("leaf") + "]"
        inner.join("concate_and_append")
        branch += f"({i}s:" + gen("sum") + ")"
    outer.join("concate_and_append")
    s += "(end:" + gen("end", n=2) + select("kind", ["yes", "no"])
    tail = s.fork(2)
    tail += lambda i: f"(t{i}:" + gen("tail")
    tail.join()
    on_written()
    return s["tail"]


@plait.function
async def nested_texts_async(s, on_written=lambda: None):
    s += "p"
    outer = s.fork(3)
    for i, branch in enumerate(outer):
        inner = branch.fork(2)
        inner += lambda j, i=i: f"[{i}{j}:" + gen("leaf") + "]"
        await inner.join("concate_and_append")
        branch += f"({i}s:" + gen("sum") + ")"
    await outer.join("concate_and_append")
    s += "(end:" + gen("end", n=2) + select("kind", ["yes", "no"])
    tail = s.fork(2)
    tail += lambda i: f"(t{i}:" + gen("tail")
    await tail.join()
    on_written()
    return await s["tail"]


def gated(backend):
    """Makes the backend wait with all answers. Returns a function that lets them go, in the order of the calls."""
    gates = {}
    backend.scheduler.answer = lambda prompt, request: gates.setdefault(
        (echo(prompt), request.call), Gate(echo(prompt))
    )

    def work():
        opened = set()
        while len(opened) < 13:
            for key, gate in list(gates.items()):
                if key not in opened and gate.reached.is_set():
                    opened.add(key)
                    gate.open()

    def open_all():
        assert len(backend.scheduler.sent(Generate)) == 6, "the leaves were sent; the rest needs their text"
        threading.Thread(target=work, daemon=True).start()

    return open_all


def echo(prompt):
    return prompt[-3:-1]


@pytest.mark.parametrize("program", [nested, nested_async])
def test_all_branches_of_nested_forks_run_before_any_has_ended(backend, program):
    gates = {}
    backend.scheduler.answer = lambda prompt, request: gates.setdefault(echo(prompt), Gate(echo(prompt)))

    def open_backwards():
        assert len(backend.scheduler.sent(Generate)) == 6, "all calls were sent while none had an answer"
        for _, gate in sorted(gates.items(), reverse=True):
            gate.open()

    state = program.run(open_backwards)
    assert state.ret_value == state["leaf"] == [["00", "01"], ["10", "11"], ["20", "21"]]
    assert state.usage.calls == 6 and backend.scheduler.open_sessions() == 0
    meta = state.get_meta_info("leaf")
    assert [[sample["finish_reason"]["type"] for sample in branch] for branch in meta] == [["stop", "stop"]] * 3


@pytest.mark.parametrize("program", [nested_texts, nested_texts_async])
def test_texts_are_appended_when_they_are_known_and_nothing_waits(backend, program):
    backend.scheduler.answer = lambda prompt, request: echo(prompt)
    expected = program.run()
    texts = expected.text(), expected.messages(), expected.ret_value, expected["end"]
    backend.scheduler.requests.clear()
    open_all = gated(backend)
    state = program.run(open_all)
    assert (state.text(), state.messages(), state.ret_value, state["end"]) == texts
    assert state.text().startswith("p[00:00][01:01](0s:0s)[10:10]") and texts[2] == ["t0", "t1"]
    assert "".join(state.text_iter()) == state.text() and state.usage.calls == 14
    assert len(state.get_meta_info("kind")["choice_scores"]) == 2
    assert backend.scheduler.open_sessions() == 0


def test_recording_has_the_names_of_calls_that_waited(backend, tmp_path):
    open_all = gated(backend)
    with Recording(tmp_path / "calls.jsonl", backend):
        recorded = nested_texts.run(open_all)
    with Replay(tmp_path / "calls.jsonl"):
        assert nested_texts.run().text() == recorded.text()


def test_error_of_any_class_ends_the_calls_that_wait(backend, monkeypatch):
    gate = Gate("late")
    backend.script(("leaf:", gate), default="fine")

    @plait.function
    def program(s):
        s += "p"
        forks = s.fork(1)
        forks += "leaf:" + gen("x")
        forks.join("concate_and_append")
        s += gen("after")
        monkeypatch.setattr(type(s._branch._session._session), "generate", lambda *_: 1 / 0)
        gate.open()
        return s["after"]

    with pytest.raises(plait.ProgramError, match="ZeroDivisionError"):
        program.run()


@pytest.mark.parametrize("ending", ["fails", "abort", "cancel", "deadline"])
def test_calls_after_a_text_that_never_comes_end(backend, ending):
    gate, is_written = Gate(CallFailed("no", "constraint") if ending == "fails" else "late"), threading.Event()
    backend.script(("leaf:", gate), default="fine")

    @plait.function
    def program(s):
        s += "p"
        forks = s.fork(2)
        forks += ["leaf:" + gen("x"), "other:" + gen("x")]
        forks.join("concate_and_append")
        s += gen("after", timeout=0.01 if ending == "deadline" else None) + select("kind", ["a", "b"])
        children = s.fork(2)
        children += gen("child")
        is_written.set()
        if ending == "cancel":
            s.cancel()
        return s["after"]

    state = program.run(stream=True)
    assert is_written.wait(30)
    if ending == "abort":
        state.abort()
    if ending == "fails":
        gate.open()
    error = state.error()
    expected = {
        "fails": plait.ConstraintFailed,
        "abort": plait.Aborted,
        "cancel": plait.Aborted,
        "deadline": plait.DeadlineExceeded,
    }
    assert isinstance(error.__cause__, expected[ending]), error
    assert all(call_segment.call.done() or ending == "deadline" for call_segment in state._run.call_segments())
    gate.open()
    assert backend.scheduler.open_sessions() == 0


def test_compiled_program_sends_the_same_calls(backend):
    @plait.function
    def program(s):
        s += "p"
        outer = s.fork(2)
        for i in range(2):
            inner = outer[i].fork(2)
            inner += lambda j, i=i: f"{i}{j}:" + gen("leaf")
            inner.join()
        outer.join()
        s += s["leaf"][1][0]

    backend.scheduler.answer = lambda prompt, request: echo(prompt)
    assert program.compile().run().text() == program.run().text() == "p10"


@pytest.mark.parametrize("is_read", [False, True])
def test_failed_branch_fails_the_read_of_the_list_or_the_run(backend, is_read):
    backend.script(("1:", CallFailed("no")))

    @plait.function
    def program(s):
        s += "p"
        forks = s.fork(3)
        forks += lambda i: f"{i}:" + gen("x") + gen("after")
        forks.join()
        if is_read:
            with pytest.raises(plait.ProgramError, match="variable 'x': CallFailed: no"):
                s["x"]

    with pytest.raises(plait.ProgramError, match=r"variable '(x|after)': CallFailed"):
        program.run()


def test_error_of_a_joined_value_can_be_handled(backend):
    backend.script(("1:", CallFailed("no")))

    @plait.function
    def program(s):
        s += "p"
        forks = s.fork(2)
        forks += lambda i: f"{i}:" + gen("x")
        forks.join()
        try:
            return s["x"]
        except plait.ProgramError:
            return "handled"

    assert program.run().ret_value == "handled"


def test_sync_and_race_wait_for_joined_branches(backend):
    slow = Gate("slow")
    backend.script(("0:", slow), default="quick")
    ended = []

    @plait.function
    def program(s):
        s += "p"
        forks = s.fork(2)
        for i, branch in enumerate(forks):
            inner = branch.fork(1)
            inner += f"{i}:" + gen("x")
            inner.join()
        winners = race(forks)
        ended.append(winners[0] is forks[1])
        winners.join()
        side = s.fork(1)
        side += "2:" + gen("y")
        side.join()
        s.sync()
        ended.append(s._run.call_segments()[-1].call.done())

    state = program.run()
    assert ended == [True, True] and state["x"] == [["quick"]] and len(backend.scheduler.sent(Abort)) > 0


def test_cancel_ends_the_calls_of_joined_branches_whose_states_are_gone(backend):
    never = Gate("late")
    backend.script(("never:", never), default="quick")

    @plait.function
    def program(s):
        s += "p"
        branch = s.fork(1)[0]

        def start():
            inner = branch.fork(2)
            inner += "never:" + gen("x")
            inner.join()

        start()
        branch.cancel()
        s += gen("y")
        return s["y"]

    state = program.run()
    assert state.ret_value == "quick" and state.usage.failed_calls == 2
    assert backend.scheduler.open_sessions() == 0


def test_async_read_of_a_joined_list_blocks_no_loop(backend):
    gate = Gate("x")
    backend.script(default=gate)

    @plait.function
    async def program(s):
        s += "p"
        forks = s.fork(2)
        forks += gen("x")
        await forks.join()
        reading = asyncio.ensure_future(s.text_of("x"))
        await asyncio.sleep(0)
        threading.Thread(target=gate.open).start()
        return await reading

    backend.scheduler.answer = lambda prompt, request: gate if request.call == first_call(backend) else "y"
    assert asyncio.run(asyncio.wait_for(program.arun(), 30)).ret_value == "['x', 'y']"


def first_call(backend):
    return backend.scheduler.sent(Generate)[0].call


@settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(steps=PROGRAMS.filter(lambda steps: "race" not in str(steps)), order=st.integers(0, 1000).map(random.Random))
def test_answers_in_any_order_give_the_same_texts(steps, order):
    backend = ScriptedBackend()

    @plait.function
    def program(s):
        s += "Q"
        write(s, steps, "", forwards)
        s += "(end)" + gen("end")

    def answered(prompt, request):
        return f"<{zlib.crc32(prompt.encode())}>"

    backend.scheduler.answer = answered
    expected = program.run(backend=backend)
    gates, is_over = [], threading.Event()

    def gate_of(prompt, request):
        gates.append(Gate(answered(prompt, request)))
        return gates[-1]

    def open_in_any_order():
        while not is_over.wait(0.0001):
            if waiting := [gate for gate in list(gates) if gate.reached.is_set() and not gate._opened]:
                order.choice(waiting).open()

    backend.scheduler.answer = gate_of
    opener = threading.Thread(target=open_in_any_order)
    opener.start()
    try:
        state = program.run(backend=backend)
        assert state.text() == expected.text()
        assert {name: state[name] for name in state._branch.variables} == {
            name: expected[name] for name in expected._branch.variables
        }
    finally:
        is_over.set()
        opener.join(30)
    assert backend.scheduler.open_sessions() == 0
