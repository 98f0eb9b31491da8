"""Mistakes in reading variables: the error's type, key phrases of its message, and its line."""

from __future__ import annotations

import pytest
from program_mistakes import error_faults, make_registry

import plait
from plait import gen

MISTAKES, mistake = make_registry()


@mistake("'anwser'", "did you mean 'answer'", kind=plait.MissingVariable)
def a_misspelt_variable(s):
    s += "p" + gen("answer")
    return s["anwser"]  # here


@mistake("'answer'", "no variables", kind=plait.MissingVariable)
def a_variable_read_before_its_gen(s):
    s += "p"
    s["answer"].strip()  # here
    s += gen("answer")


@mistake("AttributeError", "s['answer']")
def a_variable_as_an_attribute(s):
    s += "p" + gen("answer")
    return s.answer  # here


@mistake("InputError", "not by 0")
def a_variable_by_index(s):
    s += "p" + gen("answer")
    return s[0]  # here


@mistake("TypeError", "not iterable", "s['name']")
def iteration_over_a_state(s):
    s += "p" + gen("answer")
    for piece in s:  # here
        print(piece)


@mistake("ValueError", "' fine.'")
def an_answer_that_is_no_number(s):
    s += "p" + gen("answer")
    return int(s["answer"])  # here


@mistake("InputError", "forks[i]['x']", "join()")
def a_variable_of_a_group_of_forks(s):
    s += "p"
    forks = s.fork(2)
    forks += gen("x")
    return forks["x"]  # here


@mistake("InputError", "no meta info")
def meta_info_of_a_plain_value(s):
    s["x"] = 1
    return s.get_meta_info("x")  # here


@mistake("InputError", "'x'", "tools=[...]")
def s_call_of_a_text_variable(s):
    s += "p" + gen("x")
    s.call("x")  # here


@mistake("variable 'x'", "list[int]", "' f'", "raise max_tokens", kind=plait.UnreadableValue)
def a_value_cut_off_by_max_tokens(s):
    s += "p"
    s += gen("x", type=list[int], max_tokens=2, complete=False)  # here
    return s["x"]


@mistake("InputError", "(await s['x'])")
async def a_comparison_without_await(s):
    s += "p" + gen("x")
    if s["x"] == " fine.":  # here
        s += "yes"


@mistake("AttributeError", "(await s['x']).strip")
async def a_method_without_await(s):
    s += "p" + gen("x")
    return s["x"].strip()  # here


@mistake("InputError", "s['name']", "typed gen")
def a_variable_by_an_untyped_gen(s):
    s += "p" + gen("x")
    return s[gen("x")]  # here


@pytest.mark.parametrize(("function", "phrases", "kind"), MISTAKES)
def test_error_names_the_cause_and_the_line(backend, function, phrases, kind):
    backend.script(default=" fine.")
    assert error_faults(function, phrases, kind) == []
