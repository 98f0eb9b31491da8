"""Budgets of tokens and seconds: what a call may use, and the error when the budget is spent."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from scripted_scheduler import Gate

import plait
from plait import Budget, gen, select
from plait.lang import budget
from plait.runtime.messages import Generate, Select

pytestmark = pytest.mark.timeout(120)


@plait.function
def talk(s, turns):
    for i in range(turns):
        s += f"{i}:" + gen(f"x{i}", max_tokens=50)
        s[f"x{i}"]


def test_max_tokens_of_a_call_is_at_most_the_remaining_budget(backend):
    backend.script(default="12345678")
    state = talk.run(2, budget=Budget(tokens=20))
    assert [request.sampling.max_tokens for request in backend.scheduler.sent(Generate)] == [20, 12]
    assert state.error() is None
    with pytest.raises(plait.ProgramError, match=r"the budget of 20 tokens is spent \(used: 20 tokens") as caught:
        talk.run(4, budget=Budget(tokens=20))
    assert isinstance(caught.value.__cause__, plait.BudgetExceeded)


def test_concurrent_calls_share_the_budget(backend):
    backend.script(default="12345678")

    @plait.function
    def forks(s):
        s += "Q"
        branches = s.fork(5)
        branches += gen("x")
        branches.join()

    assert len(forks.run(budget=Budget(tokens=40))["x"]) == 5
    late = [Gate("12345678", early="1234") for _ in range(5)]
    answers = iter(late)
    backend.scheduler.answer = lambda prompt, request: next(answers)
    with pytest.raises(plait.ProgramError, match="the budget of 15 tokens is spent"):
        forks.run(budget=Budget(tokens=15))
    assert backend.scheduler.open_sessions() == 0


@pytest.fixture
def clock(monkeypatch):
    """The clock of budgets: [seconds], which only the test advances."""
    time_s = [1000.0]
    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: time_s[0]))
    return time_s


def test_remaining_seconds_are_the_timeout_of_calls(backend, clock):
    @plait.function
    def program(s):
        s += "Q" + gen("x", timeout=1000)
        clock[0] += 20
        s += select("y", ["a", "b"]) + gen("z", timeout=5)
        clock[0] += 21
        s += gen("late")

    with pytest.raises(plait.ProgramError, match=r"variable 'late': BudgetExceeded: the budget of 40 s is spent"):
        program.run(budget=Budget(seconds=40))
    assert [request.sampling.timeout_s for request in backend.scheduler.sent(Generate)] == [40, 5]
    assert backend.scheduler.sent(Select)[0].timeout_s == 20


def test_timeout_at_the_end_of_the_budget_is_budget_exceeded(backend, clock):
    gate = Gate(plait.DeadlineExceeded("the call's timeout passed"))
    backend.script(default=gate)

    @plait.function
    def program(s):
        s += "Q" + gen("x")
        clock[0] += 41
        gate.open()
        s["x"]

    with pytest.raises(plait.ProgramError) as caught:
        program.run(budget=Budget(seconds=40))
    assert isinstance(caught.value.__cause__, plait.BudgetExceeded)


@pytest.mark.parametrize("limits", [{"seconds": 40}, {"seconds": 40, "tokens": 1000}])
def test_spent_seconds_name_the_tokens_of_all_calls(backend, clock, limits):
    running = Gate("12345678", early="1234")
    backend.script(("run:", running), default="12345678")

    @plait.function
    def program(s):
        s += "Q"
        branches = s.fork(2)
        branches += lambda i: gen("x", n=2)
        branches.join()
        s["y"] = s["x"]
        aside = s.fork(1)
        aside += "run:" + gen("slow")
        clock[0] += 41
        s += gen("late")

    used = r"is spent \(used: 36 tokens, 41.0 s\)"  # four calls of 8 tokens, and the 4 that came of the fifth
    with pytest.raises(plait.ProgramError, match=used):
        program.run(budget=Budget(**limits))


def test_batch_items_have_separate_budgets(backend):
    backend.script(default="12345678")
    items = [{"turns": 1}, {"turns": 3}, {"turns": 1}]
    errors = [state.error() for state in talk.run_batch(items, budget=Budget(tokens=16))]
    assert [error is None for error in errors] == [True, False, True]
    again = asyncio.run(talk.arun_batch(items, budget=Budget(tokens=16)))
    assert [state.error() is None for state in again] == [True, False, True]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Budget(), "tokens, seconds or both"),
        (lambda: Budget(tokens=0), "at least 1"),
        (lambda: Budget(tokens=1.5), "at least 1"),
        (lambda: Budget(seconds=0), "above 0"),
        (lambda: Budget(seconds=float("nan")), "above 0"),
        (lambda: talk.run(1, budget=100), "budget takes a Budget"),
        (lambda: talk.run_batch([{"turns": 1}], budget=100), "run_batch: budget takes a Budget"),
    ],
)
def test_wrong_budget_is_an_input_error(backend, make, message):
    with pytest.raises(plait.InputError, match=message):
        make()
