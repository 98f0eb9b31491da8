"""Scores of choices by every method, against a plain simulation of greedy selection, and their probabilities."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from plait.runtime.sampling.choice_scores import choice_probabilities, score_choices


def test_scores_of_every_method():
    logprobs = [[-1.0, -2.0], [-1.0, -1.5], [-1.2]]
    assert score_choices("token_length_normalized", logprobs, None) == [-1.5, -1.25, -1.2]
    assert score_choices("greedy_token_selection", logprobs, None) == [0.5, 1.0, 0.0]
    unconditional_logprobs = [[-1.0, -2.0], [-3.0, -3.5], [-1.2]]
    assert score_choices("unconditional_likelihood_normalized", logprobs, unconditional_logprobs) == [0.0, 2.0, 0.0]
    assert score_choices("exact", [[-1.0], [-0.5, -0.5]], None) == [0.5, 0.5]


@given(st.lists(st.lists(st.sampled_from([-0.5, -1.0, -1.5]), min_size=1, max_size=4), min_size=1, max_size=5))
def test_greedy_selection_drops_choices_token_by_token(logprobs):
    """The steps of a choice are its logprobs, and then its mean for ever."""
    names = dict(enumerate(logprobs))
    for position in range(5):
        step = {i: own[position] if position < len(own) else sum(own) / len(own) for i, own in names.items()}
        names = {i: own for i, own in names.items() if step[i] == max(step.values())}
        if len(names) == 1:
            break
    scores = score_choices("greedy_token_selection", logprobs, None)
    assert {i for i, score in enumerate(scores) if score == 1.0} == set(names)


def test_probabilities_of_impossible_choices():
    assert choice_probabilities([[-1.0], [-math.inf], [-1.0]]) == [0.5, 0.0, 0.5]
    assert choice_probabilities([[-math.inf], [-math.inf]]) == [0.5, 0.5]
