"""Messages that a second newcomer found unclear: they say what to write instead."""

from __future__ import annotations

import re

import pytest

import plait
from plait import Budget, gen, select


def final_answer(text: str) -> str:
    """An answer."""
    return text


@plait.function
def greet(s, name):
    s += f"Hello {name}" + gen("x")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: gen("x", regex=re.compile("a")),
            "a pattern as text, not Pattern; write regex=pattern.pattern",
        ),
        (lambda: gen("x", json_schema="nope"), "the json_schema cannot be used: 'nope' is not JSON: "),
        (lambda: select("x", [1, 2]), r"a choice must be a text, not int \(choice 0\); .* such as Literal\[1, 2\]"),
        (lambda: plait.agent("x", [final_answer]), "a tool is named 'final_answer', as the agent's own tool"),
    ],
)
def test_a_wrong_argument(call, text):
    with pytest.raises(plait.InputError, match=text):
        call()


@pytest.mark.parametrize("address", [None, 5, "", ".", "127.0.0.1:30000", "localhost:30000", "tcp://x"])
def test_an_address_that_is_no_path(address):
    with pytest.raises(plait.InputError, match=r"a runtime's address is a path, .* not .*RuntimeEndpoint"):
        plait.Runtime.connect(address)


def test_a_sampling_keyword_of_a_graph_belongs_to_compile(backend):
    with pytest.raises(plait.InputError, match=r"'seed' belongs to compile: program.compile\(seed=...\)"):
        greet.compile().run(name="Ada", seed=7)


def test_a_short_time_of_a_budget_is_not_zero(backend):
    backend.scheduler.answer = lambda prompt, request: "fine"
    with pytest.raises(plait.ProgramError, match=r"the budget of 1e-05 s is spent \(used: 0 tokens, (0\.0*)?[1-9]"):
        greet.run("Ada", budget=Budget(seconds=0.00001))
