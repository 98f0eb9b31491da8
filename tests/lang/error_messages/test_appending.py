"""Mistakes in appending to a state: the error's type, key phrases of its message, and its line."""

from __future__ import annotations

import pytest
from program_mistakes import error_faults, make_registry

import plait
from plait import gen

MISTAKES, mistake = make_registry()


@plait.function
def qa(s, question, mark="?"):
    s += question + mark + gen("answer")


@mistake("InputError", "f-string", "'text' + gen(...) + 'text'")
def a_gen_in_an_f_string(s):
    s += f"The answer is {gen('x')}."  # here


@mistake("InputError", "s += ...")
def plus_instead_of_plus_equals(s):
    s = s + "p" + gen("x")  # here


@mistake("AttributeError", "'gen'", "s += gen(...)")
def gen_as_a_method(s):
    s += "p"
    s.gen("x")  # here


@mistake("AttributeError", "'usr'", "did you mean 'user'")
def a_misspelt_method(s):
    s.usr("hello")  # here


@mistake("InputError", "None", "return")
def a_helper_that_returns_none(s):
    def helper():
        gen("x")

    s += "p"
    s += helper()  # here


@mistake("InputError", "not int", "str(...)")
def a_number_appended(s):
    s += "There are "
    s += 5  # here


@mistake("InputError", "not int")
def a_number_added_to_a_gen(s):
    s += gen("x") + 5  # here


@mistake("InputError", "gen is a function", "gen(...)")
def a_function_that_was_not_called(s):
    s += "p"
    s += gen  # here


@mistake("InputError", "s += state['name']")
def the_state_of_another_program(s):
    s += "p"
    s += qa("Why")  # here


@mistake("InputError", "program(s, ...)")
def a_program_that_was_not_called(s):
    s += qa  # here


@mistake("InputError", "s += await s['name']")
async def a_forgotten_await(s):
    s += "p" + gen("x")
    s += s["x"]  # here


@mistake("InputError", "no value", "s['name']")
def a_gen_as_a_condition(s):
    s += "p"
    if gen("x"):  # here
        s += "yes"


@mistake("InputError", "prompt is empty", "gen")
def a_gen_before_any_text(s):
    s += gen("x")  # here


@mistake("InputError", "(await s['x'])")
async def an_f_string_without_await(s):
    s += "p" + gen("x")
    s += f"You said {s['x']}"  # here


@mistake("InputError", "gen('x')", "'%s'")
def a_gen_formatted_with_percent(s):
    s += "You said %s" % gen("x")  # noqa: UP031  # here


@mistake("InputError", "gen('x')", "f-string")
def a_gen_object_in_an_f_string(s):
    g = gen("x")
    s += "p" + g
    s += f"You said {g}"  # here


@mistake("InputError", "<lambda> is a function", "call it")
def a_gen_in_a_lambda(s):
    s += "p"
    s += lambda: gen("x")  # here


@mistake("InputError", "list", "one by one")
def a_list_appended(s):
    s += ["p", gen("x")]  # here


@mistake("InputError", "dict", "turn", "user(...)")
def a_message_appended(s):
    s += {"role": "user", "content": "Why"}  # here


@mistake("InputError", "bytes", "data.decode()")
def bytes_appended(s):
    s += b"p"  # here


@mistake("TypeError", "Gen found")
def str_join_of_gens(s):
    s += "".join(["p", gen("x")])  # here


@mistake("InputError", "s['x'] = ...", "s += ...")
def a_gen_assigned_to_a_variable(s):
    s["x"] = gen("x")  # here


@pytest.mark.parametrize(("function", "phrases", "kind"), MISTAKES)
def test_error_names_the_cause_and_the_line(backend, function, phrases, kind):
    backend.script(default=" fine.")
    assert error_faults(function, phrases, kind) == []
