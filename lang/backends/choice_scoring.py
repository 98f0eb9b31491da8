"""Scores the choices of a select from the logprobs of their tokens, by SGLang's three methods."""

from __future__ import annotations

from collections.abc import Sequence

from plait.runtime.messages import SelectMethod


def score_choices(
    method: SelectMethod,
    tokens: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    unconditional: Sequence[Sequence[float]] | None,
) -> tuple[list[float], int]:
    """Returns (one score per choice, index of the best). `unconditional`: the logprobs without the prompt.

    >>> score_choices("token_length_normalized", [[1], [2, 3]], [[-1.0], [-0.5, -0.5]], None)
    ([-1.0, -0.5], 1)
    """
    means = [sum(choice_logprobs) / len(choice_logprobs) for choice_logprobs in logprobs]
    if method == "unconditional_likelihood_normalized":
        assert unconditional is not None
        means = [mean - sum(alone) / len(alone) for mean, alone in zip(means, unconditional, strict=True)]
    if method != "greedy_token_selection":
        return means, max(range(len(means)), key=means.__getitem__)
    winner = _greedy_choice(tokens, logprobs, means)
    return [float(index == winner) for index in range(len(means))], winner


def _greedy_choice(tokens: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]], means: Sequence[float]) -> int:
    """Eliminates choices token by token: those whose next token is not the most likely one drop out. A choice that has
    ended takes part with the mean of its logprobs."""
    remaining, position = list(range(len(tokens))), 0
    while len(remaining) > 1 and position < max(len(tokens[i]) for i in remaining):
        scores = {i: logprobs[i][position] if position < len(logprobs[i]) else means[i] for i in remaining}
        best_score = max(scores.values())
        remaining = [i for i in remaining if scores[i] == best_score]
        position += 1
    return max(remaining, key=lambda i: (means[i], -i))
