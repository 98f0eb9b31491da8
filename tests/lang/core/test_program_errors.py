"""Errors of programs: exceptions of the body, failed calls, missing variables, and where they are raised."""

from __future__ import annotations

import asyncio
import traceback

import pytest
from sample_programs import collect, qa

import plait
from plait import gen

pytestmark = pytest.mark.timeout(120)


@plait.function
def failing(s):
    s += "p" + gen("fine")
    raise ZeroDivisionError("by zero")


def test_run_raises_the_exception_of_the_body_with_its_traceback(backend):
    with pytest.raises(plait.ProgramError, match="program 'failing': ZeroDivisionError: by zero") as caught:
        failing.run()
    assert caught.value.program == "failing" and caught.value.variable is None
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert 'raise ZeroDivisionError("by zero")' in "".join(traceback.format_exception(caught.value))
    assert backend.scheduler.open_sessions() == 0


def test_every_read_of_a_streamed_run_raises_the_exception_of_the_body(backend):
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
        state = failing.run(stream=True)
        assert isinstance(state.error().__cause__, ZeroDivisionError)
        for _ in range(2):
            with pytest.raises(plait.ProgramError, match="by zero") as caught:
                read(state)
            assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_text_before_the_exception_is_streamed(backend):
    seen = []
    with pytest.raises(plait.ProgramError, match="by zero"):
        seen.extend(append_all(seen, failing.run(stream=True).text_iter()))
    assert seen[0] == "p"


def append_all(seen, pieces):
    for piece in pieces:
        seen.append(piece)
        yield from ()


def test_failed_gen_names_program_and_variable(backend):
    backend.script(("b", plait.DeadlineExceeded("took longer than 2 s")))

    @plait.function
    def story(s):
        s += "a" + gen("first") + "b" + gen("second")

    message = "program 'story', variable 'second': DeadlineExceeded: took longer than 2 s"
    with pytest.raises(plait.ProgramError, match=message) as caught:
        story.run()
    assert (caught.value.program, caught.value.variable) == ("story", "second")

    state = story.run(stream=True)
    assert state["first"] == " fine."
    for read in (lambda: state["second"], state.text, state.sync, lambda: list(state.text_iter("second"))):
        with pytest.raises(plait.ProgramError, match=message):
            read()
    assert isinstance(state.error().__cause__, plait.DeadlineExceeded)
    assert state.usage.calls == 1 and state.usage.failed_calls == 1


def test_failed_select_names_its_variable(backend):
    backend.scheduler.pick = lambda prompt, choices: plait.Overloaded("the queue is full")

    @plait.function
    def program(s):
        s += "p" + plait.select("x", ["a", "b"])

    with pytest.raises(plait.ProgramError, match="variable 'x': Overloaded: the queue is full"):
        program.run()
    state = program.run(stream=True)
    with pytest.raises(plait.ProgramError, match="Overloaded"):
        asyncio.run(collect(state.text_async_iter("x")))


def test_body_can_handle_a_failed_call(backend):
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

    assert program.run(False)["x"] == [""]  # a join reads nothing, so what the body has handled stays handled
    with pytest.raises(plait.ProgramError, match="variable 'y': Overloaded"):
        program.run(True)

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


def test_missing_variable_suggests_a_similar_name(backend):
    @plait.function
    def program(s):
        s += "p" + gen("answer") + gen("reason")
        s["ansewr"]

    message = r"there is no variable 'ansewr' \(did you mean 'answer'\?\); it has 'answer', 'reason'"
    with pytest.raises(plait.ProgramError, match=message) as caught:
        program.run()
    assert isinstance(caught.value, KeyError) and isinstance(caught.value, plait.MissingVariable)

    state = qa.run("q")
    with pytest.raises(KeyError):
        state["nothing"]
    with pytest.raises(plait.MissingVariable, match="program 'qa': there is no variable 'nothing'; it has 'answer'"):
        state.get_meta_info("nothing")
    with pytest.raises(plait.MissingVariable, match="it has no variables yet"):
        plait.function(lambda s: None).run()["x"]


def test_error_of_a_nested_program_names_both_programs(backend):
    @plait.function
    def outer(s):
        failing.run()

    with pytest.raises(plait.ProgramError, match="program 'outer': ProgramError: program 'failing': ZeroDivision"):
        outer.run()


def test_empty_prompt_is_an_input_error(backend):
    @plait.function
    def program(s):
        s += gen("x")

    with pytest.raises(plait.ProgramError, match="variable 'x': InputError: the prompt is empty"):
        program.run()


def test_ended_program_can_be_read_and_not_extended(backend):
    state = qa.run("q")
    with pytest.raises(plait.InputError, match="the program has ended"):
        state += "more"
    assert state.text() == "q fine."


def test_handled_failure_is_not_raised_by_run(backend):
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


def test_failed_call_ends_its_state_and_not_the_state_it_was_copied_from(backend):
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
    with pytest.raises(plait.ProgramError, match="'z': DeadlineExceeded: the session cannot"):
        program.run(True)
