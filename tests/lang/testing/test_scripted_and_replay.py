"""`plait.testing`: a script is strict in both directions, and a recording gives the same run again without a model."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import plait
from plait import assistant, gen, select, system, user
from plait.constrained.specs import Choices, JsonSchema, Regex
from plait.runtime.client.constraint_check import constraint_mismatch
from plait.runtime.errors import CallFailed, DeadlineExceeded
from plait.runtime.messages import Generate
from plait.testing import Answer, Recording, Replay, ReplayMismatch, Scripted, ScriptError, always, call, recorded


@dataclass
class Person:
    name: str
    born: date
    mood: Literal["calm", "lively"]


def add(a: int, b: int = 0) -> int:
    """Adds."""
    return a + b


@plait.function
def trip(s, country):
    s += system("You help.") + user(f"The capital of {country}?") + assistant(gen("capital", stop="\n", max_tokens=8))
    s += user("Known for?") + assistant(select("kind", ["food", "art"]))
    forks = s.fork(2)
    forks += lambda i: user(f"Tip {i + 1}.") + assistant(gen("tip", max_tokens=8))
    forks.join()
    return s["capital"]


TRIP = {"capital": "Paris", "kind": "art", "tip": ["Go early.", "Eat well."]}


# -- scripts --------------------------------------------------------------------------------------


def test_answers_go_by_the_names_of_variables():
    with Scripted(TRIP) as script:
        state = trip.run("France")
    assert (state["capital"], state["kind"], state["tip"], state.ret_value) == ("Paris", "art", TRIP["tip"], "Paris")
    assert [asked.name for asked in script.asked] == ["capital", "kind", "tip", "tip"]
    assert "capital of France" in script.asked[0].prompt and script.asked[0].params.stop == ("\n",)
    assert script.asked[1].choices == ("food", "art") and script.asked[3].prompt.endswith("assistant\n")
    assert "Paris" in script.asked[2].prompt and "Go early" not in script.asked[3].prompt
    assert state.messages()[2] == {"role": "assistant", "content": "Paris"}
    assert state.usage.calls == 4 and 0 < state.usage.cached_tokens < state.usage.prompt_tokens
    assert state.get_meta_info("kind")["choice_scores"] == [-1.0, 0.0]


def test_answers_in_order_and_by_a_function():
    with Scripted(["Rome", {"food": -0.5, "art": -2.0}, "a", "b"]):
        state = trip.run("Italy")
    assert (state["kind"], state["tip"]) == ("food", ["a", "b"])
    assert state.get_meta_info("kind")["choice_scores"] == [-0.5, -2.0]
    with Scripted(lambda asked: asked.choices[0] if asked.choices else f"{asked.name}!"):
        assert trip.run("Italy")["tip"] == ["tip!", "tip!"]
    with Scripted(TRIP | {"tip": always("Rest."), "capital": lambda asked: asked.prompt[-3:].strip() + "x"}):
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
        (TRIP | {"capital": lambda asked: 1 / 0}, r"the script's function failed for gen\('capital'\): ZeroDivision"),
        (TRIP | {"other": "x"}, "answers that no call used: 1 of 'other'; the calls were gen"),
        (TRIP | {"tip": ["a", "b", "c"]}, "1 of 'tip'"),
        (TRIP | {"other": always("x")}, "those of 'other'"),
        (["Paris"], r"no answer for select\('kind'\), call 2"),
        (["Paris", "art", "a", "b", "c"], "1 of the list"),
    ],
)
def test_a_script_that_does_not_fit_is_an_error(answers, message):
    def test() -> None:
        with Scripted(answers):
            trip.run("France")

    with pytest.raises((plait.ProgramError, ScriptError), match=message) as caught:
        test()
    assert isinstance(caught.value, ScriptError) or isinstance(caught.value.__cause__, ScriptError)


def test_a_mistake_is_not_hidden_by_a_body_that_handles_failures():
    @plait.function
    def careful(s):
        s += "p"
        try:
            s += gen("x")
        except plait.ProgramError:
            s["x"] = "none"

    with pytest.raises(ScriptError, match=r"no answer for gen\('x'\)"), Scripted({}):
        assert careful.run()["x"] == "none"


def test_a_gen_of_no_tokens_needs_no_answer():
    @plait.function
    def warm(s):
        s += "p" + gen("x", max_tokens=0)

    with Scripted({}):
        assert warm.run()["x"] == ""


CASES = [
    (dict(regex="[0-9]+"), "12", "12"),
    (dict(type=int), 12, 12),
    (dict(type=bool), True, True),
    (dict(type=date), date(2024, 5, 1), date(2024, 5, 1)),
    (dict(type=Literal["a", 2]), 2, 2),
    (dict(type=Person), Person("Ada", date(1815, 12, 10), "calm"), Person("Ada", date(1815, 12, 10), "calm")),
    (dict(type=list[int]), [[1, 2]], [1, 2]),  # a list of answers, whose one answer is a list
    (dict(json_schema={"type": "object", "properties": {"a": {"type": "integer"}}}), {"a": 3}, '{"a":3}'),
    (dict(choices=["x", "y"], temperature=1.0), "y", "y"),
    (dict(regex="[0-9]{4}"), Answer("12", finish_reason="length"), "12"),
]


@pytest.mark.parametrize(("held", "answer", "value"), CASES, ids=[str(list(held)) for held, *_ in CASES])
def test_an_answer_that_fits_is_read_as_its_type(held, answer, value):
    @plait.function
    def one(s):
        s += "p" + gen("x", **held)

    with Scripted({"x": answer}):
        assert one.run()["x"] == value


@pytest.mark.parametrize(
    ("held", "answer", "why"),
    [
        (dict(regex="[0-9]{4}"), "12", "'12' breaks off before it is complete"),
        (dict(regex="[0-9]{2}"), "1x", "'x' does not fit behind '1'"),
        (dict(type=int), "twelve", "it cannot begin with 'twelve'"),
        (dict(type=Person), {"name": "Ada"}, r"""'\}' does not fit behind"""),
        (dict(type=Literal["a", "b"]), "c", "it cannot begin with 'c'"),
        (dict(type=int), Answer("12", finish_reason="length", tokens=200), "200 tokens"),
        (dict(type=Person), Answer('{"name', finish_reason="length"), "complete=True"),
        (dict(ebnf='root ::= "yes" | "no"'), "ye", "'ye' breaks off where 's' must follow"),
        (dict(tools=[add]), "add", "it cannot begin"),
        (dict(tools=[add]), call("mul", a=1), "a tool of that name"),
        (dict(tools=[add]), call("add", a="one"), "does not fit"),
    ],
)
def test_an_answer_that_breaks_its_constraint_is_an_error(held, answer, why):
    @plait.function
    def one(s):
        s += "p" + gen("x", **held)

    with pytest.raises(plait.ProgramError, match=why) as caught, Scripted({"x": answer}):
        one.run()
    assert caught.value.variable == "x" and isinstance(caught.value.__cause__, ScriptError)


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_tools_are_called_from_a_script(choice):
    @plait.function
    def agent(s):
        s += system("You add.", tools=[add]) + user("1 + 2?")
        s += assistant(gen("step", tools=[add], tool_choice=choice))
        s.call("step")
        s += assistant(gen("answer"))

    with Scripted({"step": call("add", b=2, a=1), "answer": "3."}) as script:
        state = agent.run()
    assert state["step"].arguments == {"a": 1, "b": 2} and "Result of add: 3" in script.asked[1].prompt
    if choice == "auto":
        with Scripted({"step": "No tool is needed.", "answer": "3."}):
            assert agent.run()["step"] is None


def test_a_constraint_that_no_runtime_takes_fails_the_call():
    @plait.function
    def one(s):
        s += "p" + gen("x", ebnf='root ::= "yes" | nothing')

    script = Scripted({"x": "yes"})
    with pytest.raises(plait.ProgramError, match=r"variable 'x': ConstraintFailed: .*nothing") as caught:
        one.run(backend=script)
    assert isinstance(caught.value.__cause__, plait.ConstraintFailed)


def test_calls_fail_when_the_script_says_so():
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


def test_async_streamed_batched_and_raced_programs():
    @plait.function
    async def later(s, question):
        s += user(question) + assistant(gen("answer", n=2))
        return (await s["answer"])[1]

    with Scripted({"answer": ["a", "b"]}):
        assert asyncio.run(later.arun("?")).ret_value == "b"

    def answer(asked):
        return "food" if asked.choices else "France!" if "France" in asked.prompt else "Italy!"

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


def test_the_default_backend_comes_back_and_backend_takes_a_script_too(backend):
    with Scripted(TRIP):
        trip.run("France")
    assert backend.scheduler.sent(Generate) == []
    script = Scripted(TRIP)
    trip.run("France", backend=script)
    script.check()
    with pytest.raises(plait.InputError, match="a dict, a list or a function"):
        Scripted("text")


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet='ab1{}":', max_size=6))
def test_fitting_agrees_with_the_meaning_of_constraints(text):
    assert (constraint_mismatch(Regex("a+b?|1"), text) is None) == (re.fullmatch("a+b?|1", text) is not None)
    assert (constraint_mismatch(Choices(("a", "ab")), text) is None) == (text in ("a", "ab"))
    cut = any(longer.startswith(text) for longer in ("a", "ab"))
    assert (constraint_mismatch(Choices(("a", "ab")), text, require_complete=False) is None) == cut
    schema = JsonSchema({"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": False})
    assert (constraint_mismatch(schema, text) is None) == (text in ("{}", '{"a":1}'))


def test_the_pages_own_test_runs(tmp_path):
    root = Path(__file__).parents[3]
    program = re.search(r"```python\n(.*?)\n\nstate = review", (root / "README.md").read_text(), re.DOTALL)
    shown = re.search(r"```python\n(.*?)```", (root / "docs" / "testing.md").read_text(), re.DOTALL)
    page = tmp_path / "page.py"
    page.write_text(f"{program[1]}\n\n{shown[1]}")
    runpy.run_path(str(page))["test_review"]()


# -- recordings -----------------------------------------------------------------------------------


def everything(state):
    names = ["capital", "kind", "tip"]
    metas = [state.get_meta_info(name) for name in names[:2]]
    usage = state.usage
    tokens = [usage.calls, usage.prompt_tokens, usage.cached_tokens, usage.computed_tokens, usage.completion_tokens]
    return [state.text(), state.messages(), [state[name] for name in names], metas, tokens, usage.queue_s]


@pytest.fixture
def tape(backend, tmp_path):
    """A recording of `trip` on the scripted scheduler, and what the run gave."""
    path = tmp_path / "trip.jsonl"
    backend.script(("assistant\n", "Paris"), default="fine")
    with Recording(path):
        state = trip.run("France", temperature=0, return_logprob=True, top_logprobs_num=2)
        given = everything(state)
    return path, given


def run_again(country="France", **changed):
    return trip.run(country, **{"temperature": 0, "return_logprob": True, "top_logprobs_num": 2, **changed})


def test_a_replay_is_the_same_run_without_a_runtime(tape, backend):
    path, given = tape
    asked = len(backend.scheduler.sent(Generate))
    with Replay(path):
        assert everything(run_again()) == given
    assert len(backend.scheduler.sent(Generate)) == asked, "nothing reached the runtime"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["plait_recording"] == 1 and len(lines) == 5
    assert {line["name"] for line in lines[1:]} == {"capital", "kind", "tip"}
    assert isinstance(given[3][0]["output_token_logprobs"][0], tuple)


@pytest.mark.parametrize(
    ("country", "changed", "message"),
    [
        (
            "Spain",
            {},
            r"gen\('capital'\) was not recorded\. It differs from .*line 2\) in the prompt, "
            r"from character \d+ on, after '.*capital of ': recorded 'France\?.*now 'Spain\?",
        ),
        ("France", {"temperature": 0.5}, "in temperature: recorded 0.0, now 0.5 "),
        ("France", {"seed": 7, "top_p": 0.9}, "in seed: recorded None, now 7; top_p: recorded 1.0, now 0.9 "),
    ],
)
def test_what_differs_is_said(tape, country, changed, message):
    with pytest.raises(plait.ProgramError, match=message) as caught, Replay(tape[0]):
        run_again(country, **changed)
    assert isinstance(caught.value.__cause__, ReplayMismatch)


def test_a_recorded_call_is_played_once_and_must_be_asked(tape):
    with Replay(tape[0]) as replay:
        run_again()
    with pytest.raises(plait.ProgramError, match="made more often than it was recorded"):
        run_again(backend=replay)
    with pytest.raises(ScriptError, match=r"4 recorded calls were not made: 'capital' \(line 2\)"), Replay(tape[0]):
        pass
    with Replay(tape[0], all_used=False):
        pass


def test_deadlines_are_not_compared_and_failures_are_played_too(backend, tmp_path):
    backend.scheduler.answer = lambda prompt, request: CallFailed("broken")
    path = tmp_path / "failed.jsonl"
    with Recording(path), pytest.raises(plait.ProgramError, match="broken"):
        trip.run("France", timeout=5)
    assert len(path.read_text().splitlines()) == 2, "calls behind a failure have no text before them"
    with Replay(path), pytest.raises(plait.ProgramError, match="broken") as caught:
        trip.run("France", timeout=6)
    assert type(caught.value.__cause__) is CallFailed


def test_recorded_makes_the_file_and_then_uses_it(backend, tmp_path):
    path = tmp_path / "trip.jsonl"
    for _ in range(2):
        with recorded(path):
            states = trip.run_batch([{"country": each} for each in "abcdef"], num_threads=3)
            assert all(state["capital"] == " fine." for state in states)
    assert len(backend.scheduler.sent(Generate)) == 18
    with pytest.raises(KeyError), Recording(tmp_path / "broken.jsonl"):
        trip.run("France")["nothing"]
    assert [each.name for each in tmp_path.iterdir()] == ["trip.jsonl"], "a test that failed leaves no recording"
    for text in ("", "{}\n", "nonsense\n", path.read_text() + '{"name": 1}\n'):
        path.write_text(text)
        with pytest.raises(plait.InputError, match=r"trip\.jsonl"):
            Replay(path)


def test_tools_with_the_models_own_template_replay(backend, tmp_path):
    @plait.function
    def agent(s):
        s += system("You add.", tools=[add]) + user("1 + 2?")
        s += assistant(gen("step", tools=[add]))
        s.call("step")
        s += assistant(gen("answer"))

    backend.script(("assistant\n<tool_call>\n", '{"name":"add","arguments":{"a":1,"b":2}}'), default="3.")
    for _ in range(2):
        with recorded(tmp_path / "agent.jsonl"):
            state = agent.run()
        assert state["step"].arguments == {"a": 1, "b": 2} and state["answer"] == "3."
