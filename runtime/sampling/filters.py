"""Which candidates top-p and min-p keep; the rule of both array libraries."""

from __future__ import annotations

from typing import Any

from plait.runtime.sampling_params import SamplingParams


def keep_mask(values: Any, before: Any, total: Any, params: SamplingParams) -> Any:
    """Which of the candidates of one row can be sampled, bool [N]; numpy arrays or torch tensors.

    `values` [N] are their probabilities or weights in falling order, `before` [N] the sum of those that come before
    each, `total` the sum of all that top-k leaves. Top-p keeps the shortest prefix with top_p of `total`, min-p those
    with at least min_p of the first.
    """
    return (before < params.top_p * total) & (values >= params.min_p * values[0]) & (values > 0)
