"""A budget that leaves too few tokens for a constrained value is the error, whatever the kind of value."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import plait
from plait import Budget, gen


@dataclass
class Pair:
    first: int
    second: int

    def __post_init__(self):
        if self.first != 7:
            raise ValueError("first must be 7")


@plait.function
def two_values(s):
    s += "Numbers:" + gen("free", max_tokens=6, ignore_eos=True)
    s["free"]
    s += gen("pair", type=Pair, max_tokens=40)


@plait.function
def asks_again(s):
    s += "Numbers:" + gen("pair", type=Pair, max_tokens=40, retries=8)


def town(name: str) -> int:
    """How many people live in a town."""
    return 5


def test_a_value_that_does_not_fit_into_the_budget_names_the_budget(exact):
    with pytest.raises(plait.ProgramError, match=r"budget of 10 tokens is spent.*fits into 4 tokens") as caught:
        two_values.run(backend=exact, temperature=0, budget=Budget(tokens=10))
    assert isinstance(caught.value.__cause__, plait.BudgetExceeded)
    assert caught.value.variable == "pair"


def test_an_attempt_that_does_not_fit_into_the_budget_names_the_budget(exact):
    with pytest.raises(plait.ProgramError, match="the budget of 40 tokens is spent") as caught:
        asks_again.run(backend=exact, temperature=0, budget=Budget(tokens=40))
    assert isinstance(caught.value.__cause__, plait.BudgetExceeded)


def test_an_agent_that_spends_its_budget_names_the_budget(exact):
    with pytest.raises(plait.ProgramError) as caught:
        plait.agent("You help.", [town]).run("Hello", backend=exact, temperature=0, budget=Budget(tokens=12))
    assert isinstance(caught.value.__cause__, plait.BudgetExceeded)


def test_a_value_that_does_not_fit_into_its_own_max_tokens_does_not_name_the_budget(exact):
    @plait.function
    def short(s):
        s += "Numbers:" + gen("pair", type=Pair, max_tokens=3)

    with pytest.raises(plait.ProgramError, match="fits into 3 tokens") as caught:
        short.run(backend=exact, temperature=0, budget=Budget(tokens=10))
    assert isinstance(caught.value.__cause__, plait.ConstraintFailed)
