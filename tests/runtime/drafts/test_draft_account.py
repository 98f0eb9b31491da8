"""The account of a draft model: what it measures, and what a later start reads of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.runtime.drafts.draft_account import MAX_BALANCE, DraftAccount


def used():
    """An account of steps of 2 rows that take 1 s, whose draft tokens cost three times what is supposed."""
    account = DraftAccount(0.1, 0.01)
    for _ in range(40):
        account.begin_step()
        account.record_step(2, 2, 0, 0, 0.0, 1.0)
        account.record_forward(2, 2, 0.15)
        account.record_step(2, 5, 3, 3, 0.5, 1.75)
        account.rate.record(0, True)
        account.record_accepted(2)
    return account


def test_costs_are_those_measured():
    account = used()
    assert account.guess_cost(2) == pytest.approx(0.15) and account.guess_cost(3) is None
    assert 2.5 < account.row_cost_factor(2) < 3.0 and account.row_cost_factor(4) == 1.0
    for _ in range(3000):  # without drafts
        account.record_step(2, 2, 0, 0, 0.0, 1.0)
    assert account.row_cost_factor(2) < 1.1


@pytest.mark.parametrize("num_tokens", [1, 3, 500])
def test_an_interrupted_pass_does_not_end_the_drafts(num_tokens):
    account = DraftAccount(0.1, 0.01)
    account.record_step(1, 1, 0, 0, 0.0, 1.0)
    for _ in range(2):
        account.record_forward(1, num_tokens, 3600.0)
        account.record_step(1, 2, 1, 1, 0.5, 1.1)
    kept = DraftAccount.from_bytes(account.to_bytes())
    kept.balance, kept.is_resting = 5.0, False
    assert account.balance > -25 and kept.guess_cost(1) < 0.2 and kept.may_catch_up(1, 100)
    for _ in range(40):  # as slow as that in truth
        account.record_forward(1, num_tokens, 3600.0)
    assert not account.may_catch_up(1, 100) or account.guess_cost(1) > 100


def test_another_number_of_texts_is_guessed_for_in_one_pass():
    account = DraftAccount(0.1, 0.01)
    account.record_step(8, 8, 0, 0, 0.0, 1.7)
    assert account.guess_cost(8) == pytest.approx(0.1 * 1.7 / 1.7)


def test_a_later_start_continues():
    account, kept = used(), DraftAccount.from_bytes(used().to_bytes())
    for name in ("balance", "is_resting", "catch_up_s"):
        assert getattr(kept, name) == getattr(account, name)
    assert kept.rate.rates() == account.rate.rates()
    assert kept.guess_cost(2) == account.guess_cost(2) and kept.row_cost_factor(2) == account.row_cost_factor(2)
    assert kept.to_bytes() == account.to_bytes()
    account.record_step(1, 1, 0, 0, 0.0, 1.0)
    for _ in range(50):  # ever slower
        account.record_forward(1, 1, 1000.0)
    account.record_step(1, 1, 0, 0, 0.0, 1.0)
    assert account.is_resting and DraftAccount.from_bytes(account.to_bytes()).is_resting


@pytest.mark.parametrize(
    ("index", "value"),
    [(0, -1.0), (0, np.nan), (1, np.inf), (3, 0.0), (3, 1e9), (4, 1.5), (5, 2.0), (6, 0.0), (8, -1.0)],
)
def test_numbers_that_are_no_accounts_are_refused(index, value):
    numbers = np.frombuffer(used().to_bytes(), np.float64).copy()
    numbers[index] = value
    assert DraftAccount.from_bytes(numbers.tobytes()) is None


@given(st.binary(max_size=200) | st.lists(st.floats(), max_size=20).map(lambda x: np.array(x, np.float64).tobytes()))
def test_any_other_content_is_refused_or_an_account(content):
    account = DraftAccount.from_bytes(content)
    if account is not None:
        assert account.balance <= MAX_BALANCE and DraftAccount.from_bytes(account.to_bytes()) is not None
