"""Mistakes with turns, forks, races and combinators: the error's type, key phrases of its message, and its line."""

from __future__ import annotations

import pytest
from program_mistakes import error_faults, make_registry

import plait
from plait import assistant, gen, race, system, user

MISTAKES, mistake = make_registry()


@mistake("InputError", "assistant turn", "inside the user turn")
def a_turn_inside_a_turn(s):
    s += user("Say: " + assistant(gen("x")))  # here


@mistake("InputError", "user_end()", "user_begin()", "no turn is open")
def user_end_without_an_open_turn(s):
    s += system("a") + user("b")
    s.user_end()  # here


@mistake("InputError", "joined", "not extended")
def a_branch_extended_after_its_join(s):
    s += "p"
    forks = s.fork(2)
    forks.join()
    forks[0] += "more"  # here


@mistake("InputError", "1 items", "2 branches")
def fewer_texts_than_branches(s):
    s += "p"
    forks = s.fork(2)
    forks += ["only one"]  # here


@mistake("InputError", "fork", "not 0")
def a_fork_into_zero_branches(s):
    s += "p"
    s.fork(len([]))  # here


@mistake("InputError", "first", "2 branches", "not 3")
def a_race_with_more_winners_than_branches(s):
    s += "p"
    race(s.fork(2), first=3)  # here


@mistake("InputError", "map", "no items")
def a_map_over_an_empty_list(s):
    s += "p"
    plait.map(s, [], lambda branch, item: None)  # here


@mistake("InputError", "map", "list", "'abc'")
def a_map_over_a_text(s):
    s += "p"
    plait.map(s, "abc", lambda branch, item: None)  # here


@mistake("InputError", "vote", "at least 1", "not 0")
def a_vote_of_zero_samples(s):
    s += "p"
    plait.vote(s, 0, gen("x"), "x")  # here


@mistake("InputError", "best_of", "number", "' fine.'")
def a_text_score(s):
    s += "p"
    plait.best_of(s, 2, gen("x"), by=lambda branch: branch["x"])  # here


@mistake("InputError", "best_of", "number", "nan")
def a_nan_score(s):
    s += "p"
    plait.best_of(s, 2, gen("x"), by=lambda branch: float("nan"))  # here


@mistake("InputError", "best_of", "function", "'x'")
def a_judge_that_is_no_function(s):
    s += "p"
    plait.best_of(s, 2, gen("x"), by="x")  # here


@mistake("InputError", "copy", "with")
def a_copy_without_with(s):
    s += "p"
    c = s.copy()
    c += gen("x")  # here


@mistake("'x'", "no variables", kind=plait.MissingVariable)
def a_branchs_variable_before_the_join(s):
    s += "p"
    forks = s.fork(2)
    forks += gen("x")
    return s["x"]  # here


@mistake("InputError", "joined already")
def a_second_join(s):
    s += "p"
    forks = s.fork(2)
    forks.join()
    forks.join()  # here


@mistake("InputError", "gather_variable", "concate_and_append", "'concat'")
def an_unknown_join_mode(s):
    s += "p"
    s.fork(2).join("concat")  # here


@mistake("IndexError")
def a_branch_index_out_of_range(s):
    s += "p"
    s.fork(2)[2].user("Why")  # here


@mistake("TypeError", "takes 0 positional arguments")
def a_branch_function_without_the_index_parameter(s):
    s += "p"
    forks = s.fork(2)
    forks += lambda: gen("x")  # here


@mistake("InputError", "first", "2 branches", "not 0")
def a_race_without_winners(s):
    s += "p"
    race(s.fork(2), first=0)  # here


@mistake("InputError", "race", "not list")
def a_race_of_a_list(s):
    s += "p"
    race(list(s.fork(2)))  # here


@mistake("'y'", "'x'", kind=plait.MissingVariable)
def a_vote_on_an_unknown_variable(s):
    s += "p"
    plait.vote(s, 2, gen("x"), "y")  # here


@pytest.mark.parametrize(("function", "phrases", "kind"), MISTAKES)
def test_error_names_the_cause_and_the_line(backend, function, phrases, kind):
    backend.script(default=" fine.")
    assert error_faults(function, phrases, kind) == []
