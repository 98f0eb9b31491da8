"""The three methods by which `select` scores its choices, which `runtime/sampling/choice_scores.py` has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.runtime.messages import SelectMethod


@dataclass(frozen=True)
class ChoicesMethod:
    """A method of scoring the choices of `select`. Use one of the three instances in this module.

    >>> select("tool", ["calculator", "search"], choices_method=greedy_token_selection)  # doctest: +SKIP
    """

    name: SelectMethod


token_length_normalized = ChoicesMethod("token_length_normalized")
"""The choice with the highest mean logprob of its tokens wins. The default."""

greedy_token_selection = ChoicesMethod("greedy_token_selection")
"""Choices are eliminated token by token: those whose next token is not the most likely one drop out. A choice that has
ended takes part with the mean of its logprobs."""

unconditional_likelihood_normalized = ChoicesMethod("unconditional_likelihood_normalized")
"""The choice with the highest mean of (logprob minus logprob without the prompt) wins. So texts that are likely in any
context have no advantage (Holtzman et al. 2021, arXiv:2104.08315, applied per token)."""


def method_name(method: object) -> SelectMethod:
    """Returns the protocol name of a choices method; None means the default. Raises InputError for anything else."""
    if method is None:
        return token_length_normalized.name
    if isinstance(method, ChoicesMethod):
        return method.name
    raise InputError(
        "choices_method must be token_length_normalized, greedy_token_selection or "
        f"unconditional_likelihood_normalized (the objects, not their names as text), not {method!r:.80}"
    )
