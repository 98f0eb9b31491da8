"""Mistakes that people make: what they are told, and which line they are sent to (the one that is marked `# here`)."""

from __future__ import annotations

import asyncio
import linecache
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from scripted_scheduler import Gate

import plait
from plait import assistant, gen, race, select, system, user
from plait.lang.source_location import error_location
from plait.runtime.errors import DeadlineExceeded
from plait.runtime.messages import Generate

MISTAKES = []


def mistake(said, kind=plait.ProgramError):
    """A function that makes one mistake: as a program's body, or, where it takes no state, as the caller's code."""

    def note(function):
        MISTAKES.append(pytest.param(function, said, kind, id=function.__name__))
        return function

    return note


@plait.function
def qa(s, question, mark="?"):
    s += question + mark + gen("answer")


@plait.function
async def aqa(s, question):
    s += question + gen("answer")


# -- reading --------------------------------------------------------------------------------------


@mistake(r"there is no variable 'anwser' \(did you mean 'answer'\?\); it has 'answer'", plait.MissingVariable)
def a_misspelt_variable(s):
    s += "p" + gen("answer")
    return s["anwser"]  # here


@mistake("there is no variable 'answer'; it has no variables yet", plait.MissingVariable)
def read_before_it_is_generated(s):
    s += "p"
    s["answer"].strip()  # here
    s += gen("answer")


@mistake(r"AttributeError: a state has no attribute 'answer': read the variable with s\['answer'\]")
def a_variable_as_an_attribute(s):
    s += "p" + gen("answer")
    return s.answer  # here


@mistake("InputError: a variable is read by its name or its typed gen, not by 0")
def a_variable_by_number(s):
    s += "p" + gen("answer")
    return s[0]  # here


@mistake(r"TypeError: a state is not iterable; read a variable with s\['name'\]")
def a_state_gone_through(s):
    s += "p" + gen("answer")
    for piece in s:  # here
        print(piece)


@mistake(r"ValueError: invalid literal for int\(\) with base 10: ' fine.'")
def a_number_that_is_none(s):
    s += "p" + gen("answer")
    return int(s["answer"])  # here


@mistake(r"a group has branches, not variables: read forks\[i\]\['x'\], or join\(\) and read s")
def a_variable_of_a_group(s):
    s += "p"
    forks = s.fork(2)
    forks += gen("x")
    return forks["x"]  # here


@mistake("the program made this value itself: no call has meta info for it")
def meta_info_of_a_plain_value(s):
    s["x"] = 1
    return s.get_meta_info("x")  # here


@mistake("variable 'x' is no call: it does not come from")
def a_call_of_what_is_no_call(s):
    s += "p" + gen("x")
    s.call("x")  # here


@mistake("variable 'x': max_tokens ended the list.int. after ' f'; raise max_tokens", plait.UnreadableValue)
def a_value_that_was_cut(s):
    s += "p"
    s += gen("x", type=list[int], max_tokens=2, complete=False)  # here
    return s["x"]


# -- appending ------------------------------------------------------------------------------------


@mistake(r"stands inside an f-string or format\(\), where it would never run; write 'text' \+ gen\(...\) \+ 'text'")
def a_gen_in_an_f_string(s):
    s += f"The answer is {gen('x')}."  # here


@mistake(r"a state grows in place: write s \+= ..., not s \+ ...")
def plus_instead_of_plus_equals(s):
    s = s + "p" + gen("x")  # here


@mistake(r"AttributeError: a state has no method 'gen': write s \+= gen\(...\)")
def gen_as_a_method(s):
    s += "p"
    s.gen("x")  # here


@mistake(r"AttributeError: a state has no attribute 'usr' \(did you mean 'user'\?\)")
def a_misspelt_method(s):
    s.usr("hello")  # here


@mistake("None cannot be appended; does a helper function lack its return?")
def a_helper_without_return(s):
    def helper():
        gen("x")

    s += "p"
    s += helper()  # here


@mistake(r"only text and expressions can be appended, not int; write str\(...\)")
def a_number_appended(s):
    s += "There are "
    s += 5  # here


@mistake(r"only text and expressions can be appended, not int")
def a_number_added_to_a_gen(s):
    s += gen("x") + 5  # here


@mistake("gen is a function and cannot be appended: call it, gen")
def a_function_that_was_not_called(s):
    s += "p"
    s += gen  # here


@mistake(r"a state cannot be appended; append one of its values, s \+= state\['name'\]")
def the_state_of_another_program(s):
    s += "p"
    s += qa("Why")  # here


@mistake(r"a program cannot be appended; to run it on this state, call it: program\(s, ...\)")
def another_program_itself(s):
    s += qa  # here


@mistake(r"a value that is still to be awaited cannot be appended: write s \+= await s\['name'\]")
async def a_forgotten_await(s):
    s += "p" + gen("x")
    s += s["x"]  # here


@mistake(r"has no value yet: append it with s \+= ..., then read it with s\['name'\]")
def a_gen_as_a_condition(s):
    s += "p"
    if gen("x"):  # here
        s += "yes"


@mistake("the prompt is empty: add text before gen")
def a_gen_before_any_text(s):
    s += gen("x")  # here


# -- arguments of gen and select ------------------------------------------------------------------


@mistake(r"gen\('x'\) has no keyword 'temprature' \(did you mean 'temperature'\?\)")
def a_misspelt_keyword(s):
    s += "p" + gen("x", temprature=1)  # here


@mistake(r"gen\('x'\): temperature must be")
def a_temperature_below_zero(s):
    s += "p"
    s += gen("x", temperature=-1)  # here


@mistake(r"gen\('x'\): the regex '\(\[' is not valid: unterminated character set")
def a_pattern_that_is_none(s):
    s += "p" + gen("x", regex="([")  # here


@mistake(r"gen\('x'\): the json_schema cannot be used: Expecting property name")
def a_schema_that_is_no_json(s):
    s += "p" + gen("x", json_schema="{'type': 'object'}")  # here


@mistake(r"gen\('x'\): regex and json_schema cannot both hold; give one of them")
def two_constraints(s):
    s += "p" + gen("x", regex="a+", json_schema={})  # here


@mistake(r"min_tokens \(500\) is above max_tokens \(128\)")
def a_contradiction_with_the_defaults(s):
    s += "p"
    s += gen("x", min_tokens=500)  # here


@mistake(r"gen\('x'\): values of type .* cannot be generated")
def a_type_without_a_form(s):
    s += "p" + gen("x", type=ValueError)  # here


@mistake(r"select\('x'\): choices must be a list of texts, not 'yes'")
def one_text_as_choices(s):
    s += "p" + select("x", "yes")  # here


@mistake(r"select\('x'\): a choice is given twice \(choice 2\)")
def a_choice_given_twice(s):
    s += "p" + select("x", ["yes", "no", "yes"])  # here


@mistake(r"select takes the best choice and samples nothing; to sample one, write gen\('x', choices=\[...\]")
def a_select_with_a_temperature(s):
    s += "p" + select("x", ["yes", "no"], temperature=0.7)  # here


# -- turns, branches ------------------------------------------------------------------------------


@mistake("an assistant turn cannot begin inside the user turn; end that one first")
def a_turn_inside_a_turn(s):
    s += user("Say: " + assistant(gen("x")))  # here


@mistake(r"user_end\(\) without its user_begin\(\): no turn is open")
def a_turn_that_ends_twice(s):
    s += system("a") + user("b")
    s.user_end()  # here


@mistake("this branch was joined; its state can be read, not extended")
def a_branch_extended_after_its_join(s):
    s += "p"
    forks = s.fork(2)
    forks.join()
    forks[0] += "more"  # here


@mistake("1 items cannot be appended to 2 branches one by one")
def too_few_texts_for_the_branches(s):
    s += "p"
    forks = s.fork(2)
    forks += ["only one"]  # here


@mistake("fork takes a number of branches from 1 to .*, not 0")
def a_fork_into_nothing(s):
    s += "p"
    s.fork(len([]))  # here


@mistake("first must be from 1 to the 2 branches of the race, not 3")
def more_winners_than_runners(s):
    s += "p"
    race(s.fork(2), first=3)  # here


# -- calls that fail ------------------------------------------------------------------------------


@mistake("program 'a_call_that_fails', variable 'slow': DeadlineExceeded: took longer than 1 s")
def a_call_that_fails(s):
    s += "p"
    s += gen("slow")  # here
    s += "and on " + gen("other")


@mistake("program 'caller', variable 'slow': DeadlineExceeded")
def caller(s):
    helper(s)
    s += "."
    return s["slow"]


def helper(s):
    s += "p" + gen("slow")  # here


# -- running --------------------------------------------------------------------------------------


@mistake("program 'qa': missing a required argument: 'question'; its parameters are question, mark", plait.InputError)
def a_missing_argument():
    qa.run()  # here


@mistake(r"unexpected keyword argument 'temprature' \(did you mean 'temperature'\?\)", plait.InputError)
def a_misspelt_keyword_of_run():
    qa.run("Why", temprature=0)  # here


@mistake("run_batch takes a list of dicts, one dict of keyword arguments for each item", plait.InputError)
def a_batch_of_one_dict():
    qa.run_batch({"question": "Why"})  # here


@mistake("item 0 of run_batch must be a dict of keyword arguments, not 'Why'", plait.InputError)
def a_batch_of_texts():
    qa.run_batch(["Why"])  # here


@mistake("a backend is a Runtime, an Engine or a Client, not 'http://localhost:30000'", plait.InputError)
def an_address_as_a_backend():
    qa.run("Why", backend="http://localhost:30000")  # here


@mistake("program 'no_state' needs the state as its first parameter: def no_state", plait.InputError)
def a_body_without_a_state():
    def no_state():
        pass

    plait.function(no_state)  # here


@mistake("an event loop runs in this thread: await program.arun", plait.InputError)
def run_inside_a_loop():
    async def main():
        aqa.run("Why")  # here

    asyncio.run(main())


@mistake("the program has ended; its state can be read, not extended", plait.InputError)
def a_state_extended_after_the_end():
    state = qa.run("Why")
    state += "more"  # here


@mistake("there is no variable 'anwser'", plait.MissingVariable)
def a_misspelt_variable_outside():
    state = qa.run("Why")
    state.get_var("anwser")  # here


@mistake("InputError: map has no items to make branches of")
def a_map_over_nothing(s):
    s += "p"
    plait.map(s, [], lambda branch, item: None)  # here


@mistake("InputError: map takes a list of items, one for each branch, not 'abc'")
def a_map_over_a_text(s):
    s += "p"
    plait.map(s, "abc", lambda branch, item: None)  # here


@mistake("InputError: vote: the number of branches must be at least 1, not 0")
def a_vote_of_nobody(s):
    s += "p"
    plait.vote(s, 0, gen("x"), "x")  # here


@mistake("InputError: best_of: by must give a number for each branch, not ' fine.'")
def a_score_that_is_no_number(s):
    s += "p"
    plait.best_of(s, 2, gen("x"), by=lambda branch: branch["x"])  # here


@mistake("InputError: best_of: by must give a number for each branch, not nan")
def a_score_that_compares_with_none(s):
    s += "p"
    plait.best_of(s, 2, gen("x"), by=lambda branch: float("nan"))  # here


@mistake("InputError: best_of: by must be a function, not 'x'")
def a_judge_that_is_a_name(s):
    s += "p"
    plait.best_of(s, 2, gen("x"), by="x")  # here


@mistake(r"type takes a type, such as int or a dataclass, not the text 'int'")
def a_type_by_its_name(s):
    s += "p" + gen("x", type="int")  # here


# -- what newcomers try ---------------------------------------------------------------------------


@mistake(r"InputError: s\['x'\] is still to be awaited: write \(await s\['x'\]\)")
async def a_comparison_without_await(s):
    s += "p" + gen("x")
    if s["x"] == " fine.":  # here
        s += "yes"


@mistake(r"AttributeError: s\['x'\] is still to be awaited: write \(await s\['x'\]\).strip")
async def a_method_without_await(s):
    s += "p" + gen("x")
    return s["x"].strip()  # here


@mistake(r"s\['x'\] is still to be awaited")
async def text_made_without_await(s):
    s += "p" + gen("x")
    s += f"You said {s['x']}"  # here


@mistake(r"InputError: gen\('x'\) is made text by str\(\) or '%s', where it would never run")
def a_gen_formatted_with_percent(s):
    s += "You said %s" % gen("x")  # noqa: UP031  # here


@mistake(r"InputError: gen\('x'\) stands inside an f-string")
def an_unread_gen_in_an_f_string(s):
    g = gen("x")
    s += "p" + g
    s += f"You said {g}"  # here


@mistake("InputError: <lambda> is a function and cannot be appended: call it")
def a_gen_in_a_lambda(s):
    s += "p"
    s += lambda: gen("x")  # here


@mistake("InputError: a list cannot be appended to one text: append its parts one by one")
def a_list_appended(s):
    s += ["p", gen("x")]  # here


@mistake("InputError: a dict cannot be appended; a message is a turn")
def a_message_appended(s):
    s += {"role": "user", "content": "Why"}  # here


@mistake(r"InputError: bytes cannot be appended; write data.decode\(\)")
def bytes_appended(s):
    s += b"p"  # here


@mistake("TypeError: sequence item 1: expected str instance, Gen found")
def gens_joined_as_texts(s):
    s += "".join(["p", gen("x")])  # here


@mistake("InputError: a copy is used in a with block")
def a_copy_without_with(s):
    s += "p"
    c = s.copy()
    c += gen("x")  # here


@mistake("InputError: .* keeps a value and runs nothing: append the expression")
def a_gen_assigned_to_its_name(s):
    s["x"] = gen("x")  # here


@mistake("InputError: a variable is read by its name, s.'name'., or by a typed gen")
def a_variable_by_an_untyped_gen(s):
    s += "p" + gen("x")
    return s[gen("x")]  # here


@mistake("there is no variable 'x'; it has no variables yet", plait.MissingVariable)
def a_branchs_variable_before_the_join(s):
    s += "p"
    forks = s.fork(2)
    forks += gen("x")
    return s["x"]  # here


@mistake("InputError: these branches were joined already")
def a_second_join(s):
    s += "p"
    forks = s.fork(2)
    forks.join()
    forks.join()  # here


@mistake('join takes "gather_variable" or "concate_and_append", not .concat')
def a_misspelt_join(s):
    s += "p"
    s.fork(2).join("concat")  # here


@mistake("IndexError: list index out of range")
def a_branch_that_is_not_there(s):
    s += "p"
    s.fork(2)[2].user("Why")  # here


@mistake("takes 0 positional arguments but 1 was given")
def a_branch_function_without_its_number(s):
    s += "p"
    forks = s.fork(2)
    forks += lambda: gen("x")  # here


@mistake("first must be from 1 to the 2 branches of the race, not 0")
def a_race_without_winners(s):
    s += "p"
    race(s.fork(2), first=0)  # here


@mistake("race takes the branches of one fork, not list")
def a_race_of_a_list(s):
    s += "p"
    race(list(s.fork(2)))  # here


@mistake("there is no variable 'y'; it has 'x'", plait.MissingVariable)
def a_vote_on_another_name(s):
    s += "p"
    plait.vote(s, 2, gen("x"), "y")  # here


@mistake(r"gen\('x'\): max_tokens must be an integer, not '5'")
def a_number_as_text(s):
    s += "p" + gen("x", max_tokens="5")  # here


@mistake("the name of a variable must be non-empty text, not 5")
def a_number_as_a_name(s):
    s += "p" + gen(5)  # here


@mistake(r"gen\('x'\): stop strings must be non-empty text, not 5")
def a_stop_that_is_a_number(s):
    s += "p" + gen("x", stop=5)  # here


@mistake(r"gen\('x'\): a choice must be a text, not int \(choice 0\)")
def choices_that_are_numbers(s):
    s += "p" + gen("x", choices=[1, 2])  # here


@mistake(r"gen\('x'\): there must be 1 to 1024 choices to score, not 0")
def no_choices(s):
    s += "p" + gen("x", choices=[])  # here


@mistake(r"select\('x'\) needs choices, a list of texts")
def a_select_without_choices(s):
    s += "p" + select("x")  # here


@mistake("regex must be a pattern as text, not Pattern")
def a_compiled_pattern(s):
    s += "p" + gen("x", regex=re.compile("a+"))  # here


@mistake(r"type takes a type, such as list\[int\] or a dataclass, not \[<class 'int'>\]")
def a_list_of_a_type_as_a_type(s):
    s += "p" + gen("x", type=[int])  # here


@mistake(r"gen\('x'\): parameter 'args' of the tool 'tool' cannot be given by its name")
def a_tool_with_star_args(s):
    def tool(*args: int) -> int:
        return sum(args)

    s += "p" + gen("x", tools=[tool])  # here


@mistake(r"gen\('x'\): parameter 'a' of the tool 'tool' needs a type")
def a_tool_without_annotations(s):
    def tool(a):
        return a

    s += "p" + gen("x", tools=[tool])  # here


@mistake(r"gen\('x'\): a tool is a function with a name of letters and digits, not <function")
def a_lambda_as_a_tool(s):
    s += "p" + gen("x", tools=[lambda a: a])  # here


@mistake("a tool is a function .*, not {'name': 'look_up'}")
def a_tool_in_openais_form(s):
    s += "p" + gen("x", tools=[{"name": "look_up"}])  # here


@mistake("a Budget is of tokens, seconds, or both", plait.InputError)
def a_budget_of_nothing():
    plait.Budget()  # here


@mistake("tokens of a Budget must be an integer of at least 1, not -1", plait.InputError)
def a_budget_below_zero():
    plait.Budget(tokens=-1)  # here


@mistake(r"run: budget takes a Budget\(tokens=..., seconds=...\), not 100", plait.InputError)
def a_number_as_a_budget():
    qa.run("Why", budget=100)  # here


@mistake("program 'turns' must be a function without yield", plait.InputError)
def a_body_that_yields():
    def turns(s):
        yield s

    plait.function(turns)  # here


@mistake("program 'qa': multiple values for argument 'question'", plait.InputError)
def an_argument_given_twice():
    qa.run("Why", question="How")  # here


@mistake("a backend is a Runtime, an Engine or a Client, not <class", plait.InputError)
def a_class_as_a_backend():
    qa.run("Why", backend=plait.Runtime)  # here


@mistake("the program has ended; its state can be read, not extended", plait.InputError)
def a_state_kept_beyond_its_program():
    kept = []
    plait.function(lambda s: kept.append(s)).run()
    kept[0] += "more"  # here


def test_a_list_of_stop_strings_may_be_changed_after_its_gen(backend):
    stop = ["."]
    expr = "p" + gen("x", stop=stop)
    stop[0] = 5

    @plait.function
    def program(s):
        s += expr

    program.run()
    assert backend.scheduler.sent(Generate)[0].sampling.stop == (".",)


@dataclass
class _Told:
    error: Exception
    place: object


def told(function):
    """The error of one mistake, and the line that it names."""
    takes_state = "s" in function.__code__.co_varnames[: function.__code__.co_argcount]
    with pytest.raises(Exception) as caught:  # noqa: PT011  # each row says which
        plait.function(function).run() if takes_state else function()
    error = caught.value
    named = error.place if isinstance(error, plait.ProgramError) else error_location(error)
    return _Told(error, named)


@pytest.mark.parametrize(("function", "said", "kind"), MISTAKES)
def test_the_message_and_the_line(backend, function, said, kind):
    backend.script(("slow", ""), default=" fine.")
    backend.scheduler.answer = lambda prompt, request: (
        DeadlineExceeded("took longer than 1 s") if function.__name__ in ("a_call_that_fails", "caller") else " fine."
    )
    found = told(function)
    assert isinstance(found.error, kind), repr(found.error)
    with pytest.raises(kind, match=said):
        raise found.error
    assert "# here" in linecache.getline(found.place.filename, found.place.lineno), found.place
    if isinstance(found.error, plait.ProgramError):
        assert str(found.error).endswith(f"{Path(__file__).name}:{found.place.lineno})")


def test_there_are_enough_of_them():
    assert len(MISTAKES) >= 90


@pytest.mark.parametrize("how", ["batch", "stream", "async"])
def test_the_line_is_named_however_a_program_runs(backend, how):
    gate = Gate("x")
    gate.open()
    backend.scheduler.answer = lambda prompt, request: DeadlineExceeded("took longer than 1 s")
    program = plait.function(caller)
    if how == "batch":
        error = program.run_batch([{}])[0].error()
    elif how == "stream":
        error = program.run(stream=True).error()
    else:
        with pytest.raises(plait.ProgramError) as caught:
            asyncio.run(program.arun())
        error = caught.value
    assert linecache.getline(error.place.filename, error.place.lineno).strip().endswith('gen("slow")  # here')
