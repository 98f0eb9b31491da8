"""Wrong arguments of gen and select: the error's type, key phrases of its message, and its line."""

from __future__ import annotations

import re

import pytest
from program_mistakes import error_faults, make_registry

from plait import gen, select

MISTAKES, mistake = make_registry()


@mistake("InputError", "gen('x')", "'temprature'", "did you mean 'temperature'")
def a_misspelt_keyword(s):
    s += "p" + gen("x", temprature=1)  # here


@mistake("InputError", "gen('x'): temperature")
def a_temperature_below_zero(s):
    s += "p"
    s += gen("x", temperature=-1)  # here


@mistake("InputError", "gen('x')", "regex", "unterminated character set")
def an_invalid_regex(s):
    s += "p" + gen("x", regex="([")  # here


@mistake("InputError", "gen('x')", "json_schema", "Expecting property name")
def an_invalid_json_schema_text(s):
    s += "p" + gen("x", json_schema="{'type': 'object'}")  # here


@mistake("InputError", "gen('x')", "regex and json_schema")
def two_constraints(s):
    s += "p" + gen("x", regex="a+", json_schema={})  # here


@mistake("InputError", "min_tokens (500)", "max_tokens (128)")
def min_tokens_above_the_default_max_tokens(s):
    s += "p"
    s += gen("x", min_tokens=500)  # here


@mistake("InputError", "gen('x')", "ValueError", "cannot be generated")
def a_type_that_cannot_be_generated(s):
    s += "p" + gen("x", type=ValueError)  # here


@mistake("InputError", "select('x')", "list", "'yes'")
def choices_given_as_one_text(s):
    s += "p" + select("x", "yes")  # here


@mistake("InputError", "select('x')", "twice", "choice 2")
def a_choice_given_twice(s):
    s += "p" + select("x", ["yes", "no", "yes"])  # here


@mistake("InputError", "select('x')", "gen('x', choices=[...]")
def a_select_with_a_temperature(s):
    s += "p" + select("x", ["yes", "no"], temperature=0.7)  # here


@mistake("InputError", "type", "'int'")
def a_type_given_as_text(s):
    s += "p" + gen("x", type="int")  # here


@mistake("InputError", "gen('x'): max_tokens", "integer", "'5'")
def a_number_as_text(s):
    s += "p" + gen("x", max_tokens="5")  # here


@mistake("InputError", "name", "not 5")
def a_number_as_a_name(s):
    s += "p" + gen(5)  # here


@mistake("InputError", "gen('x'): stop", "not 5")
def a_stop_that_is_a_number(s):
    s += "p" + gen("x", stop=5)  # here


@mistake("InputError", "gen('x')", "not int", "choice 0")
def choices_that_are_numbers(s):
    s += "p" + gen("x", choices=[1, 2])  # here


@mistake("InputError", "gen('x')", "1 to 1024", "not 0")
def an_empty_list_of_choices(s):
    s += "p" + gen("x", choices=[])  # here


@mistake("InputError", "select('x')", "choices")
def a_select_without_choices(s):
    s += "p" + select("x")  # here


@mistake("InputError", "regex", "text", "not Pattern")
def a_compiled_regex(s):
    s += "p" + gen("x", regex=re.compile("a+"))  # here


@mistake("InputError", "type", "list[int]")
def a_list_object_as_a_type(s):
    s += "p" + gen("x", type=[int])  # here


@mistake("InputError", "gen('x')", "'args'", "'tool'")
def a_tool_with_star_args(s):
    def tool(*args: int) -> int:
        return sum(args)

    s += "p" + gen("x", tools=[tool])  # here


@mistake("InputError", "gen('x')", "'a'", "'tool'", "type")
def a_tool_without_annotations(s):
    def tool(a):
        return a

    s += "p" + gen("x", tools=[tool])  # here


@mistake("InputError", "gen('x')", "function", "<function")
def a_lambda_as_a_tool(s):
    s += "p" + gen("x", tools=[lambda a: a])  # here


@mistake("InputError", "no 'title'", "known are: name, description")
def a_tool_in_openais_form(s):
    s += "p" + gen("x", tools=[{"title": "look_up"}])  # here


@pytest.mark.parametrize(("function", "phrases", "kind"), MISTAKES)
def test_error_names_the_cause_and_the_line(backend, function, phrases, kind):
    backend.script(default=" fine.")
    assert error_faults(function, phrases, kind) == []
