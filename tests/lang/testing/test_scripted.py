"""`Scripted`: answers by name, order or function; a script that does not match the calls is an error."""

from __future__ import annotations

import asyncio
import re
import runpy
from pathlib import Path

import pytest
from trip_program import trip

import plait
from plait import assistant, gen, user
from plait.runtime.errors import CallFailed, DeadlineExceeded
from plait.runtime.messages import Generate
from plait.testing import Answer, Scripted, ScriptError, always

TRIP = {"capital": "Paris", "kind": "art", "tip": ["Go early.", "Eat well."]}


def test_dict_answers_calls_by_variable_name():
    with Scripted(TRIP) as script:
        state = trip.run("France")
    assert (state["capital"], state["kind"], state["tip"], state.ret_value) == ("Paris", "art", TRIP["tip"], "Paris")
    assert [request.name for request in script.asked] == ["capital", "kind", "tip", "tip"]
    assert "capital of France" in script.asked[0].prompt and script.asked[0].params.stop == ("\n",)
    assert script.asked[1].choices == ("food", "art") and script.asked[3].prompt.endswith("assistant\n")
    assert "Paris" in script.asked[2].prompt and "Go early" not in script.asked[3].prompt
    assert state.messages()[2] == {"role": "assistant", "content": "Paris"}
    assert state.usage.calls == 4 and 0 < state.usage.cached_tokens < state.usage.prompt_tokens
    assert state.get_meta_info("kind")["choice_scores"] == [-1.0, 0.0]


def test_list_answers_in_order_and_function_by_request():
    with Scripted(["Rome", {"food": -0.5, "art": -2.0}, "a", "b"]):
        state = trip.run("Italy")
    assert (state["kind"], state["tip"]) == ("food", ["a", "b"])
    assert state.get_meta_info("kind")["choice_scores"] == [-0.5, -2.0]
    with Scripted(lambda request: request.choices[0] if request.choices else f"{request.name}!"):
        assert trip.run("Italy")["tip"] == ["tip!", "tip!"]
    with Scripted(TRIP | {"tip": always("Rest."), "capital": lambda request: request.prompt[-3:].strip() + "x"}):
        assert trip.run("Italy")["tip"] == ["Rest."] * 2


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({}, r"no answer for gen\('capital'\), call 1; it has answers for nothing"),
        (TRIP | {"tip": ["One."]}, r"no answer for gen\('tip'\), call 4; all of its answers are used"),
        (TRIP | {"kind": "sport"}, r"select\('kind'\) cannot return 'sport': the choices are \['food', 'art'\]"),
        (TRIP | {"kind": {"food": 0.0}}, "takes one of .* or a score for each"),
        (TRIP | {"capital": "Paris\n"}, r"gen\('capital'\) cannot return .* end at its stop string '\\n'"),
        (TRIP | {"capital": "a b c d e f g h i"}, "cannot return 9 words: max_tokens is 8"),
        (TRIP | {"capital": Answer("Paris", tokens=9)}, "cannot return 9 tokens: max_tokens is 8"),
        (TRIP | {"capital": lambda request: 1 / 0}, r"the script's function failed for gen\('capital'\): ZeroDivision"),
        (TRIP | {"other": "x"}, "answers that no call used: 1 of 'other'; the calls were gen"),
        (TRIP | {"tip": ["a", "b", "c"]}, "1 of 'tip'"),
        (TRIP | {"other": always("x")}, "those of 'other'"),
        (["Paris"], r"no answer for select\('kind'\), call 2"),
        (["Paris", "art", "a", "b", "c"], "1 of the list"),
    ],
)
def test_script_that_does_not_match_the_calls_is_a_script_error(answers, message):
    def run_script() -> None:
        with Scripted(answers):
            trip.run("France")

    with pytest.raises((plait.ProgramError, ScriptError), match=message) as caught:
        run_script()
    assert isinstance(caught.value, ScriptError) or isinstance(caught.value.__cause__, ScriptError)


def test_script_error_is_raised_even_if_the_body_handles_it():
    @plait.function
    def careful(s):
        s += "p"
        try:
            s += gen("x")
        except plait.ProgramError:
            s["x"] = "none"

    with pytest.raises(ScriptError, match=r"no answer for gen\('x'\)"), Scripted({}):
        assert careful.run()["x"] == "none"


def test_gen_with_max_tokens_0_needs_no_answer():
    @plait.function
    def warm(s):
        s += "p" + gen("x", max_tokens=0)

    with Scripted({}):
        assert warm.run()["x"] == ""


def test_exception_as_answer_fails_the_call():
    @plait.function
    def careful(s):
        s += "p"
        try:
            with s.copy() as c:
                c += gen("long")
                c["long"]
        except plait.ProgramError as error:
            s += f"({type(error.__cause__).__name__})" + gen("short")

    with Scripted({"long": DeadlineExceeded("late"), "short": "ok"}):
        assert careful.run().text() == "p(DeadlineExceeded)ok"
    with Scripted({"capital": CallFailed("broken")}), pytest.raises(plait.ProgramError, match="broken"):
        trip.run("France")


def test_scripted_serves_async_streamed_batched_and_raced_programs():
    @plait.function
    async def async_program(s, question):
        s += user(question) + assistant(gen("answer", n=2))
        return (await s["answer"])[1]

    with Scripted({"answer": ["a", "b"]}):
        assert asyncio.run(async_program.arun("?")).ret_value == "b"

    def answer(request):
        return "food" if request.choices else "France!" if "France" in request.prompt else "Italy!"

    with Scripted(answer) as script:
        states = trip.run_batch([{"country": "France"}, {"country": "Italy"}])
        assert [state["capital"] for state in states] == ["France!", "Italy!"]
        streamed = trip.run("Italy", stream=True)
        assert "".join(streamed.text_iter()) == streamed.text() and len(script.asked) == 12

    @plait.function
    def racing(s):
        s += "p"
        forks = s.fork(2)
        forks += lambda i: f"{i}" + gen("proof")
        plait.race(forks).join()

    with Scripted({"proof": [CallFailed("no"), "second"]}):
        assert racing.run()["proof"] == ["second"]

    @plait.function
    def spender(s):
        s += "p" + gen("x", max_tokens=40) + gen("y")

    with Scripted({"x": Answer("one", tokens=20)}), pytest.raises(plait.ProgramError, match="budget of 20 tokens"):
        spender.run(budget=plait.Budget(tokens=20))


def test_default_backend_is_restored_and_backend_argument_takes_a_script(backend):
    with Scripted(TRIP):
        trip.run("France")
    assert backend.scheduler.sent(Generate) == []
    script = Scripted(TRIP)
    trip.run("France", backend=script)
    script.check()
    with pytest.raises(plait.InputError, match="a dict, a list or a function"):
        Scripted("text")


def test_example_of_the_testing_page_passes(tmp_path):
    root = Path(__file__).parents[3]
    program = re.search(r"```python\n(.*?)\n\nstate = review", (root / "README.md").read_text(), re.DOTALL)
    example = re.search(r"```python\n(.*?)```", (root / "docs" / "testing.md").read_text(), re.DOTALL)
    module = tmp_path / "page.py"
    module.write_text(f"{program[1]}\n\n{example[1]}")
    names = runpy.run_path(str(module))
    assert "test_review" in names
    names["test_review"]()
