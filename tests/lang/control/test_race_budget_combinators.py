"""Budgets, races, cancelling, and patterns over forks. What loses ends at once, and nothing of it stays."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest
from scripted_scheduler import Gate

import plait
from plait import Budget, assistant, gen, race, select, user
from plait.lang import budget
from plait.runtime.errors import Aborted, CallFailed
from plait.runtime.messages import Abort, Generate, Select

pytestmark = pytest.mark.timeout(30)


# -- races ----------------------------------------------------------------------------------------


@plait.function
def contest(s, n, first):
    s += "Q"
    forks = s.fork(n)
    forks += lambda i: f"{i}:" + gen("x")
    winners = race(forks, first)
    open_now = s._run.client._transport.open_sessions()
    winners.join()
    return open_now, forks


def test_the_first_wins_and_the_others_end_at_once(backend):
    never = Gate("late")
    backend.script(("1:", "one"), default=never)
    state = contest.run(3, 1)
    open_now, forks = state.ret_value
    assert state["x"] == ["one"] and state.error() is None
    assert open_now <= 2, "the losers' sessions were gone before the race returned"
    assert len(backend.scheduler.sent(Abort)) >= 2
    with pytest.raises(plait.ProgramError, match="Aborted"):
        forks[0]["x"]
    assert state.usage.calls == 1 and state.usage.failed_calls == 2
    assert backend.scheduler.open_sessions() == 0


def test_winners_are_in_the_order_they_were_done(backend):
    gates = {str(i): Gate(f"<{i}>") for i in range(4)}
    backend.script(*((f"{i}:", gates[str(i)]) for i in range(4)))
    reached = threading.Thread(target=lambda: [gates["3"].reached.wait(5), gates["2"].open(), gates["0"].open()])
    reached.start()
    assert contest.run(4, 2)["x"] in (["<2>", "<0>"], ["<0>", "<2>"])
    reached.join()


def test_who_fails_cannot_win(backend):
    backend.script(("1:", "one"), default=CallFailed("no", "deadline"))
    assert contest.run(3, 1)["x"] == ["one"]
    with pytest.raises(plait.ProgramError, match="program 'contest', variable 'x': DeadlineExceeded: no"):
        contest.run(3, 2)
    assert backend.scheduler.open_sessions() == 0


def test_a_losers_own_branches_end_too(backend):
    never = Gate("late")
    backend.script(("0:", "zero"), default=never)

    @plait.function
    def program(s):
        s += "Q"
        forks = s.fork(2)
        forks[0].__iadd__("0:" + gen("x"))
        forks[1].__iadd__("1:")
        inner = forks[1].fork(2)
        inner += "deep" + gen("y")
        forks[1].__iadd__(gen("x"))
        race(forks).join()
        return inner

    state = program.run()
    assert state["x"] == ["zero"] and state.error() is None
    assert isinstance(state.ret_value[1].error().__cause__, Aborted)


def test_race_in_an_async_program(backend):
    backend.script(("1:", "one"), default=Gate("late"))

    @plait.function
    async def program(s):
        s += "Q"
        forks = s.fork(3)
        forks += lambda i: f"{i}:" + gen("x")
        winners = await race(forks)
        await winners.join()
        return await s["x"]

    assert asyncio.run(program.arun()).ret_value == ["one"]


def test_a_group_that_raced_is_not_joined(backend):
    @plait.function
    def program(s):
        s += "Q"
        forks = s.fork(2)
        forks += gen("x")
        race(forks)
        with pytest.raises(plait.InputError, match="join the group that race"):
            forks.join()
        for first in (0, 3, True, "1"):
            with pytest.raises(plait.InputError, match="first must be from 1 to the 2 branches"):
                race(forks, first)
        with pytest.raises(plait.InputError, match="race takes the branches of one fork"):
            race([s])

    program.run()


# -- cancelling -----------------------------------------------------------------------------------


def test_a_cancelled_branch_ends_and_the_program_goes_on(backend):
    gate = Gate("late")
    backend.script(("slow", gate), default="fast")

    @plait.function
    def program(s):
        s += "Q"
        side, main = s.fork(2)
        side += "slow" + gen("x")
        main += "quick" + gen("x")
        side.cancel()
        with pytest.raises(plait.InputError, match="this text was cancelled"):
            side += "more"
        s += gen("y")
        return main["x"]

    state = program.run()
    assert state.ret_value == "fast" and state["y"] == "fast" and state.error() is None


def test_cancel_from_outside_ends_the_program(backend):
    gate = Gate("late")
    backend.script(default=gate)

    @plait.function
    def program(s):
        s += "Q" + gen("x")

    state = program.run(stream=True)
    assert gate.reached.wait(5)
    state.cancel()
    with pytest.raises(plait.ProgramError, match="Aborted"):
        state["x"]


# -- budgets --------------------------------------------------------------------------------------


@plait.function
def talk(s, turns):
    for i in range(turns):
        s += f"{i}:" + gen(f"x{i}", max_tokens=50)
        s[f"x{i}"]


def test_no_call_gets_more_tokens_than_are_left(backend):
    backend.script(default="12345678")
    state = talk.run(2, budget=Budget(tokens=20))
    assert [request.sampling.max_tokens for request in backend.scheduler.sent(Generate)] == [20, 12]
    assert state.error() is None
    with pytest.raises(plait.ProgramError, match=r"the budget of 20 tokens is spent \(used: 20 tokens") as caught:
        talk.run(4, budget=Budget(tokens=20))
    assert isinstance(caught.value.__cause__, plait.BudgetExceeded)


def test_calls_side_by_side_share_the_budget(backend):
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
    """The budgets' clock, which only the test moves: on a busy machine every real one runs too fast."""
    now = [1000.0]
    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_seconds_are_every_calls_timeout_and_end_the_program(backend, clock):
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


def test_a_call_that_the_budgets_end_cuts_is_blamed_on_the_budget(backend, clock):
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


def test_each_item_of_a_batch_has_its_own_budget(backend):
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
def test_wrong_budgets(backend, make, message):
    with pytest.raises(plait.InputError, match=message):
        make()


# -- patterns -------------------------------------------------------------------------------------


def numbered(backend):
    """Every answer is the next number."""
    count = iter(range(1000))
    backend.scheduler.answer = lambda prompt, request: str(next(count))


def test_best_of_goes_on_as_the_best_branch(backend):
    numbered(backend)

    @plait.function
    def program(s):
        s += user("Q")
        return plait.best_of(s, 3, assistant(gen("x")), by=lambda b: -abs(int(b["x"]) - 1))

    state = program.run()
    assert state.ret_value == [-1.0, 0.0, -1.0] and state["x"] == "1"
    assert state.messages() == [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "1"}]
    assert state.error() is None


def test_a_judge_is_asked_of_all_before_any_is_read_and_leaves_no_trace(backend):
    numbered(backend)
    order = []

    def judge(branch):
        branch += " Score: " + gen("score", type=int)
        order.append("asked")
        return lambda: order.append("read") or branch["score"]

    @plait.function
    def program(s):
        s += "Q"
        return plait.best_of(s, 3, gen("x"), judge)

    state = program.run()
    assert order == ["asked"] * 3 + ["read"] * 3
    assert state.ret_value == [3.0, 4.0, 5.0] and state["x"] == "2" and state.text() == "Q2" and "score" not in state


def test_vote_goes_on_with_what_most_say(backend):
    answers = iter(["7", "8", "9", "8", "7", "8"])
    backend.scheduler.answer = lambda prompt, request: next(answers)

    @plait.function
    def program(s):
        s += "Q"
        return plait.vote(s, 6, ": " + gen("x", type=int), "x")

    state = program.run()
    assert state.ret_value == 8 == state["x"] and state.text() == "Q: 8"


def test_map_has_a_branch_for_each_item(backend):
    @plait.function
    def program(s):
        s += "Q"
        branches = plait.map(s, ["a", "b"], lambda branch, item: branch._append(item + gen("x")))
        return [branch.text() for branch in branches]

    state = program.run()
    assert state["x"] == [" fine."] * 2 and state.ret_value == ["Qa fine.", "Qb fine."]


# -- usage ----------------------------------------------------------------------------------------


def test_usage_by_variable_forks_included(backend):
    @plait.function
    def program(s):
        s += "Q" + gen("a") + gen()
        forks = s.fork(2)
        forks += gen("b")
        s += select("c", ["x", "y"])

    usage = program.run().usage
    assert usage.calls == 5 and {name: each.calls for name, each in usage.by_variable.items()} == {
        "a": 1,
        "b": 2,
        "c": 1,
    }
    assert usage.completion_tokens == usage.sampled_tokens + usage.forced_tokens
    assert usage.by_variable["b"].completion_tokens == 12
    assert usage.wall_s >= usage.by_variable["b"].wall_s >= 0
