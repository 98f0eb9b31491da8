"""Mistakes in programs: the type of the error, the key phrases of its message, and the line that it names.

Each function below makes one mistake, at the line marked `# here`. The phrases are identifiers, values and the code to
write instead; the sentences around them may change.
"""

from __future__ import annotations

import asyncio
import linecache
import re
from pathlib import Path

import pytest
from scripted_scheduler import Gate

import plait
from plait import assistant, gen, race, select, system, user
from plait.lang.source_location import error_location
from plait.runtime.errors import DeadlineExceeded
from plait.runtime.messages import Generate

MISTAKES = []


def mistake(*phrases, kind=plait.ProgramError):
    """Registers a function that makes one mistake: as the body of a program, or, if it takes no state, as its caller.

    `phrases`: texts that the message must contain. `kind`: the type of the error.
    """

    def register(function):
        MISTAKES.append(pytest.param(function, phrases, kind, id=function.__name__))
        return function

    return register


@plait.function
def qa(s, question, mark="?"):
    s += question + mark + gen("answer")


@plait.function
async def aqa(s, question):
    s += question + gen("answer")


# -- reading --------------------------------------------------------------------------------------


@mistake("'anwser'", "did you mean 'answer'", kind=plait.MissingVariable)
def a_misspelt_variable(s):
    s += "p" + gen("answer")
    return s["anwser"]  # here


@mistake("'answer'", "no variables", kind=plait.MissingVariable)
def read_before_it_is_generated(s):
    s += "p"
    s["answer"].strip()  # here
    s += gen("answer")


@mistake("AttributeError", "s['answer']")
def a_variable_as_an_attribute(s):
    s += "p" + gen("answer")
    return s.answer  # here


@mistake("InputError", "not by 0")
def a_variable_by_number(s):
    s += "p" + gen("answer")
    return s[0]  # here


@mistake("TypeError", "not iterable", "s['name']")
def a_state_gone_through(s):
    s += "p" + gen("answer")
    for piece in s:  # here
        print(piece)


@mistake("ValueError", "' fine.'")
def a_number_that_is_none(s):
    s += "p" + gen("answer")
    return int(s["answer"])  # here


@mistake("InputError", "forks[i]['x']", "join()")
def a_variable_of_a_group(s):
    s += "p"
    forks = s.fork(2)
    forks += gen("x")
    return forks["x"]  # here


@mistake("InputError", "no meta info")
def meta_info_of_a_plain_value(s):
    s["x"] = 1
    return s.get_meta_info("x")  # here


@mistake("InputError", "'x'", "tools=[...]")
def a_call_of_what_is_no_call(s):
    s += "p" + gen("x")
    s.call("x")  # here


@mistake("variable 'x'", "list[int]", "' f'", "raise max_tokens", kind=plait.UnreadableValue)
def a_value_that_was_cut(s):
    s += "p"
    s += gen("x", type=list[int], max_tokens=2, complete=False)  # here
    return s["x"]


# -- appending ------------------------------------------------------------------------------------


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
def a_helper_without_return(s):
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
def another_program_itself(s):
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


# -- arguments of gen and select ------------------------------------------------------------------


@mistake("InputError", "gen('x')", "'temprature'", "did you mean 'temperature'")
def a_misspelt_keyword(s):
    s += "p" + gen("x", temprature=1)  # here


@mistake("InputError", "gen('x'): temperature")
def a_temperature_below_zero(s):
    s += "p"
    s += gen("x", temperature=-1)  # here


@mistake("InputError", "gen('x')", "regex", "unterminated character set")
def a_pattern_that_is_none(s):
    s += "p" + gen("x", regex="([")  # here


@mistake("InputError", "gen('x')", "json_schema", "Expecting property name")
def a_schema_that_is_no_json(s):
    s += "p" + gen("x", json_schema="{'type': 'object'}")  # here


@mistake("InputError", "gen('x')", "regex and json_schema")
def two_constraints(s):
    s += "p" + gen("x", regex="a+", json_schema={})  # here


@mistake("InputError", "min_tokens (500)", "max_tokens (128)")
def a_contradiction_with_the_defaults(s):
    s += "p"
    s += gen("x", min_tokens=500)  # here


@mistake("InputError", "gen('x')", "ValueError", "cannot be generated")
def a_type_without_a_form(s):
    s += "p" + gen("x", type=ValueError)  # here


@mistake("InputError", "select('x')", "list", "'yes'")
def one_text_as_choices(s):
    s += "p" + select("x", "yes")  # here


@mistake("InputError", "select('x')", "twice", "choice 2")
def a_choice_given_twice(s):
    s += "p" + select("x", ["yes", "no", "yes"])  # here


@mistake("InputError", "select('x')", "gen('x', choices=[...]")
def a_select_with_a_temperature(s):
    s += "p" + select("x", ["yes", "no"], temperature=0.7)  # here


# -- turns, branches ------------------------------------------------------------------------------


@mistake("InputError", "assistant turn", "inside the user turn")
def a_turn_inside_a_turn(s):
    s += user("Say: " + assistant(gen("x")))  # here


@mistake("InputError", "user_end()", "user_begin()", "no turn is open")
def a_turn_that_ends_twice(s):
    s += system("a") + user("b")
    s.user_end()  # here


@mistake("InputError", "joined", "not extended")
def a_branch_extended_after_its_join(s):
    s += "p"
    forks = s.fork(2)
    forks.join()
    forks[0] += "more"  # here


@mistake("InputError", "1 items", "2 branches")
def too_few_texts_for_the_branches(s):
    s += "p"
    forks = s.fork(2)
    forks += ["only one"]  # here


@mistake("InputError", "fork", "not 0")
def a_fork_into_nothing(s):
    s += "p"
    s.fork(len([]))  # here


@mistake("InputError", "first", "2 branches", "not 3")
def more_winners_than_runners(s):
    s += "p"
    race(s.fork(2), first=3)  # here


# -- calls that fail ------------------------------------------------------------------------------


@mistake("program 'a_call_that_fails', variable 'slow': DeadlineExceeded", "took longer than 1 s")
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


@mistake("program 'qa'", "'question'", "question, mark", kind=plait.InputError)
def a_missing_argument():
    qa.run()  # here


@mistake("'temprature'", "did you mean 'temperature'", kind=plait.InputError)
def a_misspelt_keyword_of_run():
    qa.run("Why", temprature=0)  # here


@mistake("run_batch", "list of dicts", kind=plait.InputError)
def a_batch_of_one_dict():
    qa.run_batch({"question": "Why"})  # here


@mistake("item 0", "dict", "'Why'", kind=plait.InputError)
def a_batch_of_texts():
    qa.run_batch(["Why"])  # here


@mistake("Runtime", "Engine", "Client", "'http://localhost:30000'", kind=plait.InputError)
def an_address_as_a_backend():
    qa.run("Why", backend="http://localhost:30000")  # here


@mistake("'no_state'", "def no_state(s, ...)", kind=plait.InputError)
def a_body_without_a_state():
    def no_state():
        pass

    plait.function(no_state)  # here


@mistake("event loop", "await program.arun", kind=plait.InputError)
def run_inside_a_loop():
    async def main():
        aqa.run("Why")  # here

    asyncio.run(main())


@mistake("ended", "not extended", kind=plait.InputError)
def a_state_extended_after_the_end():
    state = qa.run("Why")
    state += "more"  # here


@mistake("'anwser'", kind=plait.MissingVariable)
def a_misspelt_variable_outside():
    state = qa.run("Why")
    state.get_var("anwser")  # here


@mistake("InputError", "map", "no items")
def a_map_over_nothing(s):
    s += "p"
    plait.map(s, [], lambda branch, item: None)  # here


@mistake("InputError", "map", "list", "'abc'")
def a_map_over_a_text(s):
    s += "p"
    plait.map(s, "abc", lambda branch, item: None)  # here


@mistake("InputError", "vote", "at least 1", "not 0")
def a_vote_of_nobody(s):
    s += "p"
    plait.vote(s, 0, gen("x"), "x")  # here


@mistake("InputError", "best_of", "number", "' fine.'")
def a_score_that_is_no_number(s):
    s += "p"
    plait.best_of(s, 2, gen("x"), by=lambda branch: branch["x"])  # here


@mistake("InputError", "best_of", "number", "nan")
def a_score_that_compares_with_none(s):
    s += "p"
    plait.best_of(s, 2, gen("x"), by=lambda branch: float("nan"))  # here


@mistake("InputError", "best_of", "function", "'x'")
def a_judge_that_is_a_name(s):
    s += "p"
    plait.best_of(s, 2, gen("x"), by="x")  # here


@mistake("InputError", "type", "'int'")
def a_type_by_its_name(s):
    s += "p" + gen("x", type="int")  # here


# -- what newcomers try ---------------------------------------------------------------------------


@mistake("InputError", "(await s['x'])")
async def a_comparison_without_await(s):
    s += "p" + gen("x")
    if s["x"] == " fine.":  # here
        s += "yes"


@mistake("AttributeError", "(await s['x']).strip")
async def a_method_without_await(s):
    s += "p" + gen("x")
    return s["x"].strip()  # here


@mistake("InputError", "(await s['x'])")
async def text_made_without_await(s):
    s += "p" + gen("x")
    s += f"You said {s['x']}"  # here


@mistake("InputError", "gen('x')", "'%s'")
def a_gen_formatted_with_percent(s):
    s += "You said %s" % gen("x")  # noqa: UP031  # here


@mistake("InputError", "gen('x')", "f-string")
def an_unread_gen_in_an_f_string(s):
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
def gens_joined_as_texts(s):
    s += "".join(["p", gen("x")])  # here


@mistake("InputError", "copy", "with")
def a_copy_without_with(s):
    s += "p"
    c = s.copy()
    c += gen("x")  # here


@mistake("InputError", "s['x'] = ...", "s += ...")
def a_gen_assigned_to_its_name(s):
    s["x"] = gen("x")  # here


@mistake("InputError", "s['name']", "typed gen")
def a_variable_by_an_untyped_gen(s):
    s += "p" + gen("x")
    return s[gen("x")]  # here


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
def a_misspelt_join(s):
    s += "p"
    s.fork(2).join("concat")  # here


@mistake("IndexError")
def a_branch_that_is_not_there(s):
    s += "p"
    s.fork(2)[2].user("Why")  # here


@mistake("TypeError", "takes 0 positional arguments")
def a_branch_function_without_its_number(s):
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
def a_vote_on_another_name(s):
    s += "p"
    plait.vote(s, 2, gen("x"), "y")  # here


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
def no_choices(s):
    s += "p" + gen("x", choices=[])  # here


@mistake("InputError", "select('x')", "choices")
def a_select_without_choices(s):
    s += "p" + select("x")  # here


@mistake("InputError", "regex", "text", "not Pattern")
def a_compiled_pattern(s):
    s += "p" + gen("x", regex=re.compile("a+"))  # here


@mistake("InputError", "type", "list[int]")
def a_list_of_a_type_as_a_type(s):
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


@mistake("InputError", "function", "{'name': 'look_up'}")
def a_tool_in_openais_form(s):
    s += "p" + gen("x", tools=[{"name": "look_up"}])  # here


@mistake("Budget", "tokens", "seconds", kind=plait.InputError)
def a_budget_of_nothing():
    plait.Budget()  # here


@mistake("tokens", "at least 1", "not -1", kind=plait.InputError)
def a_budget_below_zero():
    plait.Budget(tokens=-1)  # here


@mistake("run", "Budget(tokens=..., seconds=...)", "100", kind=plait.InputError)
def a_number_as_a_budget():
    qa.run("Why", budget=100)  # here


@mistake("'turns'", "yield", kind=plait.InputError)
def a_body_that_yields():
    def turns(s):
        yield s

    plait.function(turns)  # here


@mistake("program 'qa'", "'question'", kind=plait.InputError)
def an_argument_given_twice():
    qa.run("Why", question="How")  # here


@mistake("Runtime", "<class", kind=plait.InputError)
def a_class_as_a_backend():
    qa.run("Why", backend=plait.Runtime)  # here


@mistake("ended", "not extended", kind=plait.InputError)
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


def error_of(function):
    """Makes the mistake. Returns the error, and the line that it names."""
    takes_state = "s" in function.__code__.co_varnames[: function.__code__.co_argcount]
    with pytest.raises(Exception) as caught:  # noqa: PT011  # the caller checks the type
        plait.function(function).run() if takes_state else function()
    error = caught.value
    return error, error.place if isinstance(error, plait.ProgramError) else error_location(error)


@pytest.mark.parametrize(("function", "phrases", "kind"), MISTAKES)
def test_the_error_names_the_cause_and_the_line(backend, function, phrases, kind):
    backend.script(("slow", ""), default=" fine.")
    backend.scheduler.answer = lambda prompt, request: (
        DeadlineExceeded("took longer than 1 s") if function.__name__ in ("a_call_that_fails", "caller") else " fine."
    )
    error, place = error_of(function)
    assert isinstance(error, kind), repr(error)
    missing = [phrase for phrase in phrases if phrase not in str(error)]
    assert not missing, f"{str(error)!r} does not contain {missing}"
    assert "# here" in linecache.getline(place.filename, place.lineno), place
    if isinstance(error, plait.ProgramError):
        assert str(error).endswith(f"{Path(__file__).name}:{place.lineno})")


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
