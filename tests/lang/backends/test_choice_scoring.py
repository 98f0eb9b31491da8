"""The three methods that score choices from the log probabilities of their tokens."""

from __future__ import annotations

from plait.lang.backends.choice_scoring import score_choices


def test_scores_and_best_choice_of_every_method():
    tokens, logprobs = [[1, 2], [1, 3], [4]], [[-1.0, -2.0], [-1.0, -1.5], [-1.2]]
    assert score_choices("token_length_normalized", tokens, logprobs, None) == ([-1.5, -1.25, -1.2], 2)
    assert score_choices("greedy_token_selection", tokens, logprobs, None)[1] == 1
    unconditional_logprobs = [[-1.0, -2.0], [-3.0, -3.5], [-1.2]]
    assert score_choices("unconditional_likelihood_normalized", tokens, logprobs, unconditional_logprobs) == (
        [0.0, 2.0, 0.0],
        1,
    )
