"""Mistakes in running a program, and failed calls: the error's type, key phrases of its message, and its line."""

from __future__ import annotations

import asyncio
import linecache

import pytest
from program_mistakes import error_faults, make_registry
from scripted_scheduler import Gate

import plait
from plait import gen
from plait.runtime.errors import DeadlineExceeded

MISTAKES, mistake = make_registry()


@plait.function
def qa(s, question, mark="?"):
    s += question + mark + gen("answer")


@plait.function
async def aqa(s, question):
    s += question + gen("answer")


@mistake("program 'a_failed_call', variable 'slow': DeadlineExceeded", "took longer than 1 s")
def a_failed_call(s):
    s += "p"
    s += gen("slow")  # here
    s += "and on " + gen("other")


@mistake("program 'a_failed_call_in_a_helper', variable 'slow': DeadlineExceeded")
def a_failed_call_in_a_helper(s):
    helper(s)
    s += "."
    return s["slow"]


def helper(s):
    s += "p" + gen("slow")  # here


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
def a_url_as_a_backend():
    qa.run("Why", backend="http://localhost:30000")  # here


@mistake("'no_state'", "def no_state(s, ...)", kind=plait.InputError)
def a_body_without_a_state():
    def no_state():
        pass

    plait.function(no_state)  # here


@mistake("event loop", "await program.arun", kind=plait.InputError)
def run_inside_an_event_loop():
    async def main():
        aqa.run("Why")  # here

    asyncio.run(main())


@mistake("ended", "not extended", kind=plait.InputError)
def a_state_extended_after_the_end():
    state = qa.run("Why")
    state += "more"  # here


@mistake("'anwser'", kind=plait.MissingVariable)
def a_misspelt_variable_outside_the_body():
    state = qa.run("Why")
    state.get_var("anwser")  # here


@mistake("Budget", "tokens", "seconds", kind=plait.InputError)
def a_budget_without_limits():
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
def a_kept_state_extended_after_the_end():
    kept = []
    plait.function(lambda s: kept.append(s)).run()
    kept[0] += "more"  # here


@pytest.mark.parametrize(("function", "phrases", "kind"), MISTAKES)
def test_error_names_the_cause_and_the_line(backend, function, phrases, kind):
    failing = function in (a_failed_call, a_failed_call_in_a_helper)
    backend.scheduler.answer = lambda prompt, request: DeadlineExceeded("took longer than 1 s") if failing else " fine."
    assert error_faults(function, phrases, kind) == []


@pytest.mark.parametrize("mode", ["batch", "stream", "async"])
def test_failed_call_names_its_line_in_batch_stream_and_async_runs(backend, mode):
    gate = Gate("x")
    gate.open()
    backend.scheduler.answer = lambda prompt, request: DeadlineExceeded("took longer than 1 s")
    program = plait.function(a_failed_call_in_a_helper)
    if mode == "batch":
        error = program.run_batch([{}])[0].error()
    elif mode == "stream":
        error = program.run(stream=True).error()
    else:
        with pytest.raises(plait.ProgramError) as caught:
            asyncio.run(program.arun())
        error = caught.value
    assert linecache.getline(error.place.filename, error.place.lineno).strip().endswith('gen("slow")  # here')
