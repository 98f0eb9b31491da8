"""best_of, vote and map, and the usage per variable of a program with forks."""

from __future__ import annotations

import pytest

import plait
from plait import assistant, gen, select, user

pytestmark = pytest.mark.timeout(120)


def answer_with_numbers(backend):
    """Makes 0, 1, 2, ... the answers."""
    count = iter(range(1000))
    backend.scheduler.answer = lambda prompt, request: str(next(count))


def test_best_of_adopts_the_branch_with_the_best_score(backend):
    answer_with_numbers(backend)

    @plait.function
    def program(s):
        s += user("Q")
        return plait.best_of(s, 3, assistant(gen("x")), by=lambda b: -abs(int(b["x"]) - 1))

    state = program.run()
    assert state.ret_value == [-1.0, 0.0, -1.0] and state["x"] == "1"
    assert state.messages() == [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "1"}]
    assert state.error() is None


def test_judge_runs_on_all_branches_before_scores_are_read(backend):
    answer_with_numbers(backend)
    order = []

    def judge(branch):
        branch += " Score: " + gen("score", type=int)
        order.append("run")
        return lambda: order.append("read") or branch["score"]

    @plait.function
    def program(s):
        s += "Q"
        return plait.best_of(s, 3, gen("x"), judge)

    state = program.run()
    assert order == ["run"] * 3 + ["read"] * 3
    assert state.ret_value == [3.0, 4.0, 5.0] and state["x"] == "2" and state.text() == "Q2" and "score" not in state


def test_vote_adopts_the_most_frequent_value(backend):
    answers = iter(["7", "8", "9", "8", "7", "8"])
    backend.scheduler.answer = lambda prompt, request: next(answers)

    @plait.function
    def program(s):
        s += "Q"
        return plait.vote(s, 6, ": " + gen("x", type=int), "x")

    state = program.run()
    assert state.ret_value == 8 == state["x"] and state.text() == "Q: 8"


def test_map_runs_one_branch_per_item(backend):
    @plait.function
    def program(s):
        s += "Q"
        branches = plait.map(s, ["a", "b"], lambda branch, item: branch._append(item + gen("x")))
        return [branch.text() for branch in branches]

    state = program.run()
    assert state["x"] == [" fine."] * 2 and state.ret_value == ["Qa fine.", "Qb fine."]


def test_usage_by_variable_includes_forks(backend):
    @plait.function
    def program(s):
        s += "Q" + gen("a") + gen()
        forks = s.fork(2)
        forks += gen("b")
        s += select("c", ["x", "y"])

    usage = program.run().usage
    assert usage.calls == 5 and {name: part.calls for name, part in usage.by_variable.items()} == {
        "a": 1,
        "b": 2,
        "c": 1,
    }
    assert usage.completion_tokens == usage.sampled_tokens + usage.forced_tokens
    assert usage.by_variable["b"].completion_tokens == 12
    assert usage.wall_s >= usage.by_variable["b"].wall_s >= 0


def test_stop_iteration_of_a_function_reaches_the_body(backend):
    """As every exception does; inside of a coroutine or generator Python makes it a RuntimeError."""

    def first(*_):
        return next(iter(()))

    @plait.function
    def patterns(s):
        s += "A"
        for pattern in (
            lambda: plait.map(s, [1, 2], first),
            lambda: plait.best_of(s, 2, " is", by=first),
            lambda: plait.best_of(s, 2, " is", by=lambda _: first),
        ):
            with pytest.raises(StopIteration):
                pattern()

    patterns.run()
