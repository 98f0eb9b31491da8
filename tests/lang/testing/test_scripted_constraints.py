"""`Scripted` and constraints: an answer must fit the type, regex, schema, choices or tools of its call."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trip_program import add

import plait
from plait import assistant, gen, system, user
from plait.constrained.specs import Choices, JsonSchema, Regex
from plait.runtime.client.constraint_check import constraint_mismatch
from plait.testing import Answer, Scripted, ScriptError, call


@dataclass
class Person:
    name: str
    born: date
    mood: Literal["calm", "lively"]


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


@pytest.mark.parametrize(
    ("constraint", "answer", "value"), CASES, ids=[str(list(constraint)) for constraint, *_ in CASES]
)
def test_answer_that_fits_the_constraint_is_read_as_its_type(constraint, answer, value):
    @plait.function
    def program(s):
        s += "p" + gen("x", **constraint)

    with Scripted({"x": answer}):
        assert program.run()["x"] == value


@pytest.mark.parametrize(
    ("constraint", "answer", "reason"),
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
def test_answer_that_does_not_fit_the_constraint_is_a_script_error(constraint, answer, reason):
    @plait.function
    def program(s):
        s += "p" + gen("x", **constraint)

    with pytest.raises(plait.ProgramError, match=reason) as caught, Scripted({"x": answer}):
        program.run()
    assert caught.value.variable == "x" and isinstance(caught.value.__cause__, ScriptError)


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_script_answers_with_tool_calls(choice):
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


def test_invalid_grammar_fails_the_call():
    @plait.function
    def program(s):
        s += "p" + gen("x", ebnf='root ::= "yes" | nothing')

    script = Scripted({"x": "yes"})
    with pytest.raises(plait.ProgramError, match=r"variable 'x': ConstraintFailed: .*nothing") as caught:
        program.run(backend=script)
    assert isinstance(caught.value.__cause__, plait.ConstraintFailed)


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet='ab1{}":', max_size=6))
def test_constraint_mismatch_agrees_with_regex_choices_and_schema(text):
    assert (constraint_mismatch(Regex("a+b?|1"), text) is None) == (re.fullmatch("a+b?|1", text) is not None)
    assert (constraint_mismatch(Choices(("a", "ab")), text) is None) == (text in ("a", "ab"))
    cut = any(longer.startswith(text) for longer in ("a", "ab"))
    assert (constraint_mismatch(Choices(("a", "ab")), text, require_complete=False) is None) == cut
    schema = JsonSchema({"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": False})
    assert (constraint_mismatch(schema, text) is None) == (text in ("{}", '{"a":1}'))
