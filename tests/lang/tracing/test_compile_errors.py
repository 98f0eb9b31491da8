"""Mistakes that `compile()` finds before a run, with their lines."""

from __future__ import annotations

import pytest
from compiled_programs import compile_body, marked_comment

import plait
from plait import gen, system, user


def test_failed_call_of_a_graph_names_the_line_of_the_program(backend):
    from plait.runtime.errors import DeadlineExceeded

    backend.scheduler.answer = lambda prompt, request: DeadlineExceeded("took longer than 1 s")
    with pytest.raises(plait.ProgramError, match="variable 'x': DeadlineExceeded") as caught:
        plait.function(min_tokens_above_max_tokens).compile(max_tokens=1000).run()
    assert marked_comment(caught.value.place) == "# here"


def misspelt_variable(s):
    s += "p" + gen("answer")
    s += s["anwser"]  # here


def bad_regex(s):
    s += "p"
    s += gen("x", regex="([")  # here


def bad_lark(s):
    s += "p" + gen("y")
    s += gen("x", lark="start: missing")  # here


def bad_schema(s):
    s += "p"
    s += gen("x", json_schema={"type": "nonsense"})  # here


def bad_schema_text(s):
    s += "p" + gen("x", json_schema="{")  # here


def min_tokens_above_max_tokens(s):
    s += "p" + gen("x", min_tokens=900)  # here


def unused_fork(s):
    s += "p"
    forks = s.fork(2)  # here
    forks += gen("x")


def unused_nested_fork(s):
    s += "p"
    forks = s.fork(2)
    for fork in forks:
        fork.fork(1)[0].user("lost")  # here
    forks.join()


def empty_prompt(s):
    s += gen("x")  # here


def nested_turns(s):
    s += user("a") + "x"
    s.user_begin()
    s += user("b")  # here


def extends_a_joined_branch(s):
    s += "p"
    forks = s.fork(2)
    forks.join()
    forks[0] += "more"  # here


def raises(s):
    s += "p" + gen("x")
    {}["key"]  # here


def raises_with_message(s):
    s += "p" + gen("x")
    raise LookupError("Unknown topic")  # here


def appends_a_number(s):
    s += "p" + gen("n", type=int)
    s += s["n"]  # here


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (misspelt_variable, r"'anwser' \(did you mean 'answer'"),
        (bad_regex, r"gen\('x'\): the regex '\(\[' is not valid"),
        (bad_lark, r"gen\('x'\): the constraint cannot be used: .*missing"),
        (bad_schema, r"gen\('x'\): the constraint cannot be used: the value of type"),
        (bad_schema_text, r"gen\('x'\): the json_schema cannot be used"),
        (min_tokens_above_max_tokens, r"min_tokens \(900\) is above max_tokens"),
        (unused_fork, "the 2 branches of this fork are never used"),
        (unused_nested_fork, "this fork is never used"),
        (empty_prompt, "the prompt is empty: add text before gen"),
        (nested_turns, "user turn cannot begin inside"),
        (extends_a_joined_branch, "branch was joined"),
        (raises, "the body raised KeyError: 'key'"),
        (raises_with_message, "the body raised LookupError: Unknown topic"),
        (appends_a_number, r"not int; write str\(...\)"),
    ],
)
def test_mistake_is_a_compile_error_that_names_its_line(body, message):
    with pytest.raises(plait.CompileError, match=message) as caught:
        compile_body(body)
    assert marked_comment(caught.value.place) == "# here"
    assert str(caught.value).endswith(f"test_compile_errors.py:{caught.value.place.lineno})")


def test_compile_error_lists_all_problems():
    def body(s):
        s += "p" + gen("a", lark="start: one")
        s += gen("b", lark="start: two")
        s.fork(2)

    with pytest.raises(plait.CompileError) as caught:
        compile_body(body)
    first = body.__code__.co_firstlineno
    assert [problem.place.lineno - first for problem in caught.value.problems] == [1, 2, 3]
    assert len(str(caught.value).splitlines()) == 3


def test_fork_that_is_read_or_returned_is_used():
    def reads(s):
        s += "p"
        forks = s.fork(2)
        forks += gen("x")
        s += forks[0]["x"]

    def returns(s):
        s += "p"
        forks = s.fork(2)
        forks += gen("x")
        return forks[1]

    assert compile_body(reads) and compile_body(returns)


def test_turn_that_the_chat_template_refuses_is_a_compile_error(backend):
    from scripted_scheduler import ScriptedBackend

    strict = ScriptedBackend(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}"
    )

    def body(s):
        s += system("a")

    assert compile_body(body)
    with pytest.raises(plait.CompileError, match="no system role"):
        plait.function(body).compile(backend=strict)
