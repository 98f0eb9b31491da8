"""Races and budgets on the embedded model: losing calls and calls over the budget end in the scheduler."""

from __future__ import annotations

import pytest

import plait
from plait import Budget, assistant, gen, race, user


@plait.function
def race_of_four(s):
    s += user("Tell me a story.") + plait.assistant_begin()
    forks = s.fork(4)
    forks += lambda i: gen("story", max_tokens=4 if i == 2 else 600, ignore_eos=True)
    winners = race(forks)
    s.set_var("running", s._run.client.status().running_calls)
    winners.join()


def test_calls_that_lose_a_race_are_aborted(runtime):
    state = race_of_four.run(backend=runtime, temperature=0)
    assert len(state["story"]) == 1 and state["running"] == 0
    assert state.usage.completion_tokens == 4 and state.usage.failed_calls == 3 and state.usage.lost_tokens > 0


@plait.function
def long_story(s):
    s += user("Tell me a story.") + assistant(gen("story", max_tokens=4000, ignore_eos=True))


def test_a_budget_of_seconds_ends_the_call(runtime):
    before = runtime.client.status().sampled_tokens
    with pytest.raises(plait.ProgramError, match="the budget of 1 s is spent") as caught:
        long_story.run(budget=Budget(seconds=1), backend=runtime)
    assert isinstance(caught.value.__cause__, plait.BudgetExceeded)
    assert runtime.client.status().sampled_tokens - before < 4000


def test_a_budget_of_tokens_limits_the_generated_tokens(runtime):
    state = long_story.run(budget=Budget(tokens=10), backend=runtime)
    assert state.usage.completion_tokens == 10
