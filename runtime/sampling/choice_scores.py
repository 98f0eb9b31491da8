"""Scores and probabilities of the choices of a select, from the logprobs of their tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

from plait.runtime.messages import SelectMethod

Logprobs = Sequence[Sequence[float]]  # [i][j]: of token j of choice i


def score_choices(method: SelectMethod, logprobs: Logprobs, unconditional: Logprobs | None) -> list[float]:
    """Returns a score for each choice; the highest one wins, of equal ones the first.

    unconditional: the logprobs without the prompt, for `unconditional_likelihood_normalized`.
    method, the first three as SGLang has published them:
        token_length_normalized: the mean logprob of the choice's tokens.
        unconditional_likelihood_normalized: the mean of logprob minus the token's logprob without the prompt.
        greedy_token_selection: token by token, the choices without the best next token are dropped. A choice that has
            ended takes part with its mean logprob.
        exact: the probabilities of the choices, which sum to 1; the caller draws by them.

    >>> score_choices("token_length_normalized", [[-1.0], [-0.5, -1.0]], None)
    [-1.0, -0.75]
    """
    if method == "exact":
        return choice_probabilities(logprobs)
    if method == "greedy_token_selection":
        return _greedy_scores(logprobs)
    if method == "unconditional_likelihood_normalized":
        assert unconditional is not None
        pairs = zip(logprobs, unconditional, strict=True)
        return [mean([p - q for p, q in zip(with_prompt, without, strict=True)]) for with_prompt, without in pairs]
    return [mean(of_choice) for of_choice in logprobs]


def _greedy_scores(logprobs: Logprobs) -> list[float]:
    """1.0 for each choice that is never dropped; for the others the share of positions before they were dropped."""
    longest = max(map(len, logprobs))
    padded = [[*of_choice, *[mean(of_choice)] * (longest - len(of_choice))] for of_choice in logprobs]
    remaining, scores = list(range(len(logprobs))), [0.0] * len(logprobs)
    for position in range(longest):
        best = max(padded[i][position] for i in remaining)
        remaining = [i for i in remaining if padded[i][position] == best]
        for i in remaining:
            scores[i] = 1.0 if len(remaining) == 1 else (position + 1) / longest
        if len(remaining) == 1:
            break
    return scores


def choice_probabilities(logprobs: Logprobs, unconditional: Logprobs | None = None) -> list[float]:
    """Returns how likely each choice is as the next text, given that one of them is: the numbers sum to 1.

    They are the softmax of the summed logprobs of the choices, equal ones where all are impossible. With the logprobs
    without the prompt, which are subtracted, they are calibrated against an empty prompt: a choice that is likely in
    any context has no advantage (Holtzman et al. 2021, arXiv:2104.08315).

    >>> choice_probabilities([[-1.0, -1.0], [-2.0]], [[-3.0], [-3.0]])
    [0.5, 0.5]
    """
    sums = [math.fsum(of_choice) for of_choice in logprobs]
    if unconditional is not None:
        sums = [total - math.fsum(of_choice) for total, of_choice in zip(sums, unconditional, strict=True)]
    highest = max(sums)
    weights = [math.exp(total - highest) if total > -math.inf else 0.0 for total in sums]
    return [weight / math.fsum(weights) for weight in weights] if any(weights) else [1 / len(sums)] * len(sums)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
