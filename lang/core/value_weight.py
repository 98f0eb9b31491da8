"""The importance weight of a drawn value and its probability under its constraint, from the meta info of its call."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from plait.runtime.errors import InputError


class ValueWeight(NamedTuple):
    """Natural logarithms. weight: of the probability that unconstrained text is a valid value, or of an estimate of it.
    logprob: of the value given that the text is valid: log p(value) - weight."""

    weight: float
    logprob: float


def value_weight(meta: Any, text: str) -> Any:
    """Returns the ValueWeight of a call; of n samples, a list. `meta`: its meta info. `text`: the text of the value.

    With `particles`, the weight is log Z, and E[Z f(value)] is the sum of p(x) f(x) over all valid texts x for every
    function f (`runtime/sampling/particle_filter.py`). With `exact`, it is the middle of the known bounds. Of a
    `select`, it is exact: log of the sum of the choices' probabilities.

    Raises InputError for a call that has no weight.
    """
    if isinstance(meta, list):
        return [value_weight(sample, text) for sample in meta]
    if not isinstance(meta, Mapping):
        raise InputError("only values of gen and select have a weight")
    if (particles := meta.get("particles")) is not None:
        return ValueWeight(particles["log_weight"], particles["logprob"] - particles["log_weight"])
    if (exact := meta.get("exact")) is not None:
        weight = exact["logprob"] - sum(exact["constrained_logprob"]) / 2
        return ValueWeight(weight, exact["logprob"] - weight)
    if (weight := meta.get("weight")) is not None:
        return ValueWeight(weight["log_weight"], weight["constrained_logprob"])
    if meta.get("input_token_logprobs") and meta.get("choice_scores") is not None:
        sums = [math.fsum(token[0] for token in tokens) for tokens in meta["input_token_logprobs"]]
        highest = max(sums)
        weight = highest + math.log(math.fsum(math.exp(total - highest) for total in sums))
        return ValueWeight(weight, sums[meta["choices"].index(text)] - weight)
    raise InputError(
        "the value has no weight: it needs gen(..., particles=8), gen(..., exact=True) or a select. With particles=1 a "
        "value is sampled under its mask as usual, and has one"
    )
