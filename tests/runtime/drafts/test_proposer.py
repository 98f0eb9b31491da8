"""The rates of a text's proposers: what is counted, and which guess comes first."""

from __future__ import annotations

import numpy as np
import pytest

from plait.runtime.drafts.proposer import AcceptanceRates, Guess, TextProposers


class Fixed:
    """Guesses given tokens at its only level."""

    prior = (0.5,)

    def __init__(self, *tokens):
        self.tokens, self.accepted = tokens, []

    def guesses(self, text, forced_end):
        return [Guess(token, 0) for token in self.tokens]

    def accept(self, text, forced):
        self.accepted.append((text.tolist(), forced))


def array(*tokens):
    return np.array(tokens, dtype=np.int32)


def two_proposers():
    shared = [AcceptanceRates((0.5,), 0.99), AcceptanceRates((0.6,), 0.99)]
    proposers = [Fixed(1), Fixed(2)]
    return TextProposers(list(zip(proposers, shared, strict=True))), shared, proposers


def test_the_proposer_that_was_right_comes_first():
    text, shared, proposers = two_proposers()
    assert [guess.token for guess in text.guesses(array(9), 0)] == [2, 1]
    text.remember(1, text.guesses(array(9), 0))
    text.accept(array(9, 1), [])
    assert [guess.token for guess in text.guesses(array(9, 1), 0)] == [1, 2]
    assert shared[0].rates()[0] > 0.5 and shared[1].rates()[0] < 0.6
    assert proposers[0].accepted == [([9, 1], [])]


def test_a_new_text_begins_with_the_rates_of_all_texts():
    text, shared, _ = two_proposers()
    for _ in range(100):
        text.remember(1, text.guesses(array(9), 0))
        text.accept(array(9, 1), [])
    new = TextProposers([(Fixed(1), shared[0]), (Fixed(2), shared[1])])
    rates = {guess.token: guess.rate for guess in new.guesses(array(9), 0)}
    assert rates[1] > 0.75 and rates[2] < 0.3


@pytest.mark.parametrize(("tokens", "num_counted"), [([9], 0), ([9, 1], 1), ([9, 7, 1], 1), ([9, 1, 7, 1], 2)])
def test_positions_behind_a_refused_token_are_not_counted(tokens, num_counted):
    text, shared, _ = two_proposers()
    counted = []
    shared[0].record = lambda level, is_right: counted.append(is_right)
    for position in (1, 2, 3):
        text.remember(position, text.guesses(array(9), 0), drafted=1)
    text.accept(array(*tokens), [])
    assert len(counted) == num_counted


def test_rates_follow_recent_guesses():
    rates = AcceptanceRates((0.5, 0.1), 0.9)
    for _ in range(50):
        rates.record(0, True)
    assert 0.9 < rates.rate(0) < rates.rates()[0] and rates.rates()[1] == 0.1
    for _ in range(20):
        rates.record(0, False)
    assert rates.rate(0) < 0.2


def test_cooldown_counts_steps():
    text, _, _ = two_proposers()
    text.cooldown = 2
    assert [text.is_due() for _ in range(4)] == [False, False, True, True]


def test_the_speed_is_of_recent_steps():
    text, _, _ = two_proposers()
    assert text.speed(3) == 1.0  # three steps without a draft
    for sampled in range(8, 108, 5):
        text.draft_cost = 2.0
        speed = text.speed(sampled)
    assert 2.2 < speed <= 2.5
    for sampled in range(108, 158):
        speed = text.speed(sampled)
    assert speed < 1.05
