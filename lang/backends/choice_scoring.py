"""How choices are scored from their tokens' logprobs: SGLang's three methods."""

from __future__ import annotations

from collections.abc import Sequence

from plait.runtime.messages import SelectMethod


def score_choices(
    method: SelectMethod,
    tokens: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    unconditional: Sequence[Sequence[float]] | None,
) -> tuple[list[float], int]:
    """(a score for each choice, the best one). `unconditional`: logprobs without the prompt.

    >>> score_choices("token_length_normalized", [[1], [2, 3]], [[-1.0], [-0.5, -0.5]], None)
    ([-1.0, -0.5], 1)
    """
    means = [sum(each) / len(each) for each in logprobs]
    if method == "unconditional_likelihood_normalized":
        assert unconditional is not None
        means = [mean - sum(alone) / len(alone) for mean, alone in zip(means, unconditional, strict=True)]
    if method != "greedy_token_selection":
        return means, max(range(len(means)), key=means.__getitem__)
    left = _greedy_choice(tokens, logprobs, means)
    return [float(index == left) for index in range(len(means))], left


def _greedy_choice(tokens: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]], means: Sequence[float]) -> int:
    """Token by token the choices whose next token is not the likeliest drop out; one that has ended takes part
    with its mean."""
    left, at = list(range(len(tokens))), 0
    while len(left) > 1 and at < max(len(tokens[i]) for i in left):
        said = {i: logprobs[i][at] if at < len(logprobs[i]) else means[i] for i in left}
        top = max(said.values())
        left = [i for i in left if said[i] == top]
        at += 1
    return max(left, key=lambda i: (means[i], -i))
