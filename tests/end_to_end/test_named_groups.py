"""Named groups as variables, and token budgets of grammar rules, in programs on the embedded model."""

from __future__ import annotations

import asyncio
import re

import pytest

import plait
from plait import InputError, function, gen
from plait.lang.tracing.program_request import UnsupportedControlFlow

DATE = r"(?P<year>[0-9]{4})-(?P<month>[0-9]{2})(?P<time>T[0-9]{2})?"
PERSON = 'start: name ", " age\nname[capture]: /[A-Z][a-z]{1,9}/\nage[capture="years"]: /[0-9]{1,3}/\n'


@function
def release(s):
    s += "The first version was released on " + gen("date", regex=DATE) + " by " + gen("person", lark=PERSON) + "."


def check(state):
    groups = re.fullmatch(DATE, state["date"]).groupdict()
    assert {name: state[name] for name in groups} == groups and groups["year"]
    assert f"{state['name']}, {state['years']}" == state["person"] and state["name"]
    assert state.text().endswith(f"{state['date']} by {state['person']}.")


def test_groups_are_variables(runtime):
    state = release.run(backend=runtime, temperature=0)
    check(state)
    assert state.get_meta_info("year") == state.get_meta_info("date")
    assert state.partial("year") == state["year"]
    check(release.compile().run(backend=runtime))
    check(asyncio.run(release.arun(backend=runtime, temperature=0)))


def test_groups_in_samples_forks_and_after_reasoning(runtime):
    @function
    def program(s):
        s += "It was in " + gen("a", regex="(?P<century>[0-9]{2})(?P<rest>[0-9]{2})", n=3)
        for branch in s.fork(2):
            branch += " and then in " + gen(regex="(?P<then>[0-9]{4})", same_seed=False)
            assert re.fullmatch("[0-9]{4}", branch["then"])
        s += " or " + gen("b", regex="(?P<word>[a-z]+) ?", think=True, think_tokens=4, max_tokens=60, complete=True)

    state = program.run(backend=runtime, temperature=1.0, seed=3)
    assert [f"{century}{rest}" for century, rest in zip(state["century"], state["rest"], strict=True)] == state["a"]
    assert state["word"] == state["b"].strip() and state["b_reasoning_content"]


def test_a_value_that_is_cut_off_has_no_groups(runtime):
    @function
    def program(s):
        s += "Count: " + gen("x", regex="(?P<digits>[0-9]{40})", max_tokens=3)

    state = program.run(backend=runtime, temperature=0)
    assert state["x"] and state["digits"] is None


def test_a_resumed_item_has_its_groups(runtime, tmp_path):
    file = tmp_path / "done.jsonl"
    first = release.run_batch([{}], backend=runtime, temperature=0, resume=file)[0]
    again = release.run_batch([{}], backend=runtime, temperature=0, resume=file)[0]
    check(again)
    assert [again[name] for name in ("year", "month", "time", "name")] == [
        first[name] for name in ("year", "month", "time", "name")
    ]


def test_what_cannot_be(runtime):
    with pytest.raises(InputError, match=r"gen\('year'\): the group 'year' has the name of the gen"):
        gen("year", regex=DATE)
    with pytest.raises(InputError, match="the group 'v_reasoning_content' has the name of its reasoning"):
        gen("v", regex="(?P<v_reasoning_content>a)", think=True)
    with pytest.raises(InputError, match="the name of a capture must be an identifier"):
        gen("x", lark='start: a\na[capture="no name"]: "x"')
    with pytest.raises(UnsupportedControlFlow, match="named groups"):
        release.compile().json()


def test_traced_groups_can_be_used_in_later_text(runtime):
    @function
    def program(s):
        s += "Released in " + gen("date", regex=DATE)
        s += ". The year was " + s["year"] + plait.gen("rest", max_tokens=2)

    state = program.compile().run(backend=runtime)
    assert f". The year was {state['year']}" in state.text()
    assert "groups year, month, time" in program.compile().mermaid()


def test_a_rule_ends_after_its_token_budget(runtime):
    grammar = 'start: "Why: " reason " So: " answer\nreason[max_tokens=6]: /[a-z ]+/\nanswer: "yes" | "no"\n'

    @function
    def program(s):
        s += "Q: Is the sky blue?\n" + gen("x", lark=grammar, max_tokens=60)

    value = program.run(backend=runtime, temperature=0)["x"]
    reason, answer = re.fullmatch("Why: ([a-z ]+) So: (yes|no)", value).groups()
    assert 1 <= len(plait.load_vocabulary().encode(" " + reason)) <= 8 and answer
