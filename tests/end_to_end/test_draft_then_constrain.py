"""`gen(..., draft_then_constrain=True)`: a free draft, then a constrained value after it, on the embedded model."""

from __future__ import annotations

import json
from typing import Literal

import pytest
from pydantic import BaseModel

import plait
from plait import InputError, assistant, function, gen, user
from plait.lang.tracing.program_request import UnsupportedControlFlow

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


class Answer(BaseModel):
    city: str


@function
def sums(s, a, b):
    s += user(f"What is {a} plus {b}?")
    s += assistant("Answer: " + gen("x", json_schema=SCHEMA, draft_then_constrain=True, draft_tokens=24, max_tokens=40))


def test_the_text_has_the_value_and_the_meta_info_has_the_draft(exact):
    state = sums.run(7, 8, backend=exact, temperature=0)
    assert type(json.loads(state["x"])["n"]) is int
    meta = state.get_meta_info("x")
    assert meta["draft"] and meta["draft"] not in state.text() and "Give this answer" not in state.text()
    assert state.messages()[-1]["content"] == "Answer: " + state["x"]
    assert 24 >= meta["completion_tokens"] - len(plait.load_vocabulary().encode(state["x"])) > 0  # both are counted
    again = sums.run(7, 8, backend=exact, temperature=0)
    assert (again["x"], again.get_meta_info("x")["draft"]) == (state["x"], meta["draft"])


def test_the_value_follows_the_draft(exact):
    """The same draft and question, written as a program, give the same value."""

    @function
    def by_hand(s, draft):
        s += user("What is 7 plus 8?") + assistant("Answer: " + draft)
        s += user("Give this answer again in the required form, and nothing else.")
        s += assistant("Answer: " + gen("x", json_schema=SCHEMA, max_tokens=40))

    state = sums.run(7, 8, backend=exact, temperature=0)
    draft = state.get_meta_info("x")["draft"]
    assert by_hand.run(draft, backend=exact, temperature=0)["x"] == state["x"]


def test_typed_values_groups_forks_streams_and_turnless_text(runtime):
    @function
    def program(s):
        s += "Q: What is the capital of France?\nA: "
        s += gen("a", type=Answer, draft_then_constrain=True, draft_tokens=8, max_tokens=32)
        s += "\nB: " + gen("b", type=Literal["yes", "no"], draft_then_constrain=True, draft_tokens=4)
        for branch in s.fork(2):
            branch += "\nC: " + gen("c", regex="(?P<year>[0-9]{4})", draft_then_constrain=True, draft_tokens=4)
            assert branch["year"] == branch["c"]

    state = program.run(backend=runtime, temperature=1.0, seed=5, stream=True)
    text = "".join(state.text_iter())
    assert type(state["a"]) is Answer and state["b"] in ("yes", "no")
    assert text == state.text() == f"Q: What is the capital of France?\nA: {state.text_of('a')}\nB: {state['b']}"
    assert state.partial("a") == state["a"]


def test_a_budget_counts_the_draft(runtime):
    state = sums.run(1, 2, backend=runtime, temperature=0, budget=plait.Budget(tokens=500))
    assert state.usage.completion_tokens == state.get_meta_info("x")["completion_tokens"]
    with pytest.raises(plait.ProgramError, match=r"the budget of 5 tokens is spent \(used: 5 tokens"):
        sums.run(1, 2, backend=runtime, temperature=0, budget=plait.Budget(tokens=5))


def test_a_resumed_item_has_its_draft(runtime, tmp_path):
    file = tmp_path / "done.jsonl"
    runs = [
        sums.run_batch([{"a": 1, "b": 2}], backend=runtime, temperature=0, resume=file)[0].get_meta_info("x")
        for _ in range(2)
    ]
    assert runs[0]["draft"] == runs[1]["draft"]


@pytest.mark.parametrize(
    ("keywords", "error"),
    [
        ({}, "draft_then_constrain needs a constraint"),
        ({"regex": "a", "n": 2}, "cannot be combined with n"),
        ({"type": int, "retries": 1}, "draft_then_constrain cannot be combined with retries"),
        ({"regex": "a", "exact": True}, "draft_then_constrain cannot be combined with exact"),
        ({"regex": "a", "think": True}, "think cannot be combined with"),
        ({"regex": "a", "draft_then_constrain": "yes"}, "draft_then_constrain must be True or False, not 'yes'"),
        ({"regex": "a", "draft_tokens": 0}, "draft_tokens must be a number of tokens from 1 to 1048576, not 0"),
        (
            {"regex": "a", "draft_tokens": 1 << 21},
            "draft_tokens must be a number of tokens from 1 to 1048576, not 20971",
        ),
        (
            {"regex": "a", "draft_then_constrain": None, "draft_tokens": 4},
            "draft_tokens needs draft_then_constrain=True",
        ),
    ],
)
def test_what_cannot_be_combined(keywords, error):
    with pytest.raises(InputError, match=error):
        gen("x", **{"draft_then_constrain": True, **keywords})


def test_a_program_with_a_draft_is_no_request():
    @function
    def program(s):
        s += "Q" + gen("x", regex="a", draft_then_constrain=True)

    with pytest.raises(UnsupportedControlFlow, match="draft_then_constrain runs in Python only"):
        program.compile().json()
