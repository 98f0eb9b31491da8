"""Forks: branches run concurrently, are joined in order, and are closed when nothing refers to them."""

from __future__ import annotations

import gc

import pytest
from scripted_scheduler import Gate

import plait
from plait import gen
from plait.runtime.messages import Append, Fork, Generate, Open


def test_branches_run_concurrently_and_share_the_prefix(backend):
    gates = [Gate("zero"), Gate("one")]
    backend.script(("0:", gates[0]), ("1:", gates[1]))

    @plait.function
    def program(s):
        s += "shared "
        forks = s.fork(2)
        for i, fork in enumerate(forks):
            fork += f"{i}:" + gen("x")
        assert len(backend.scheduler.sent(Generate)) == 2  # both are on their way
        gates[1].open()
        s += forks[1]["x"] + " "
        gates[0].open()
        s += forks[0]["x"]

    assert program.run().text() == "shared one zero"
    assert len(backend.scheduler.sent(Open)) == 1
    assert backend.scheduler.sent(Append)[0].token_ids == list(b"shared ")


def test_branch_sees_text_turns_and_variables_of_its_parent(backend):
    @plait.function
    def program(s):
        s += plait.user("q") + plait.assistant(gen("a"))
        s.user_begin()
        s += "and "
        fork = s.fork()[0]
        fork += "then?"
        fork.user_end()
        fork["own"] = 1
        assert fork["a"] == s["a"] and "own" not in s
        return fork.messages()

    messages = program.run().ret_value
    assert [m["content"] for m in messages] == ["q", " fine.", "and then?"]


def test_join_gathers_new_variables_in_branch_order(backend):
    backend.scheduler.answer = lambda prompt, request: prompt[-1] * 2

    @plait.function
    def program(s):
        s["old"] = 0
        s += "p"
        forks = s.fork(3)
        forks += lambda i: str(i) + gen("x")
        forks[2] += gen("only")
        forks[0]["old"] = 1
        forks.join()
        return s["x"], s["only"], s["old"], s.text()

    assert program.run().ret_value == (["00", "11", "22"], ["22"], 0, "p")


def test_join_concate_and_append_appends_branch_texts(backend):
    @plait.function
    def program(s):
        s += "p"
        forks = s.fork(2)
        forks += [plait.user("a") + plait.assistant(gen("x")), "plain"]
        s += "!"
        forks.join("concate_and_append")
        s += gen("end")

    state = program.run()
    assert state.text() == ("p!<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n fine.<|im_end|>\nplain fine.")
    assert [m["content"] for m in state.messages()] == ["a", " fine."]
    assert 258 in backend.scheduler.sent(Append)[-1].token_ids  # the template's text is control text again


def test_join_refuses_a_branch_with_an_open_turn(backend):
    @plait.function
    def program(s):
        s += "p"
        forks = s.fork(1)
        forks[0].user_begin()
        forks.join("concate_and_append")

    with pytest.raises(plait.ProgramError, match="turn that it did not finish"):
        program.run()


def test_copy_returns_variables_and_not_text(backend):
    @plait.function
    def program(s):
        s += "p"
        with s.copy() as t:
            t += "?" + gen("x")
        assert s["x"] == [" fine."]
        try:
            with s.copy() as t:
                t += "never"
                raise LookupError
        except LookupError:
            pass
        s += "."

    assert program.run().text() == "p."
    assert backend.scheduler.open_sessions() == 0


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda s: s.fork(0), "from 1 to"),
        (lambda s: s.fork("2"), "from 1 to"),
        (lambda s: s.fork(2, position_ids_offset=[0, 1]), "position_ids_offset is not supported"),
        (lambda s: s.fork(2).join("append"), 'join takes "gather_variable"'),
        (lambda s: s.fork(2)["x"], r"read forks\[i\]\['x'\]"),
        (lambda s: s.fork(2).__iadd__(["a"]), "1 items cannot be appended to 2 branches"),
        (lambda s: s.fork(2).__iadd__(5), "not int"),
        (lambda s: s.fork(2).__iadd__(program), "not Program"),
        (lambda s: s.fork(2).__setitem__(0, s), "a branch cannot be replaced"),
        (lambda s: [forks := s.fork(2), forks.join(), forks.join()], "joined already"),
        (lambda s: [forks := s.fork(2), forks.join(), forks[0].__iadd__("x")], "this branch was joined"),
    ],
)
def test_wrong_use_of_forks_is_a_program_error(backend, use, message):
    @plait.function
    def body(s):
        s += "p"
        use(s)

    with pytest.raises(plait.ProgramError, match=message):
        body.run()


@plait.function
def program(s):
    pass


def test_forks_are_a_sequence(backend):
    @plait.function
    def body(s):
        s += "p"
        forks = s.fork(3)
        forks += "same"
        forks[1] += " more"
        assert len(forks) == 3 and len(list(forks)) == 3 and forks[-1] is forks[2] and forks[1:] == list(forks)[1:]
        return [fork.text() for fork in forks]

    assert body.run().ret_value == ["psame", "psame more", "psame"]


def test_error_in_a_branch_is_raised_by_join_reads_and_run(backend):
    backend.script(("1:", plait.ContextOverflow("too long")))

    def start(s):
        s += "p"
        forks = s.fork(2)
        forks += lambda i: f"{i}:" + gen("x")
        return forks

    uses = {
        "join": lambda s: start(s).join(),
        "read": lambda s: start(s)[1]["x"],
        "text": lambda s: start(s)[1].text(),
        "sync": lambda s: start(s)[1].sync(),
        "run": start,
    }
    for use in uses.values():

        @plait.function
        def tips(s, use=use):
            use(s)

        with pytest.raises(
            plait.ProgramError, match="program 'tips', variable 'x': ContextOverflow: too long"
        ) as caught:
            tips.run()
        assert isinstance(caught.value.__cause__, plait.ContextOverflow)


def test_unreferenced_branches_are_closed_during_the_run(backend):
    @plait.function
    def body(s):
        s += "p"
        most = 0
        for _ in range(50):
            s.fork(2)
            most = max(most, backend.scheduler.open_sessions())
        return most

    assert body.run().ret_value <= 6
    assert backend.scheduler.open_sessions() == 0


def test_garbage_collected_states_close_their_sessions(backend):
    @plait.function
    def body(s):
        s += "p" + gen("x")
        return [s.fork(3), s]

    for _ in range(5):
        body.run()
        body.run(stream=True)
    gc.collect()
    import time

    deadline = time.monotonic() + 60
    while backend.scheduler.open_sessions() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert backend.scheduler.open_sessions() == 0
    # a streamed run ends with its state, which is dropped at once: perhaps before its fork
    assert 5 <= len(backend.scheduler.sent(Fork)) <= 10
