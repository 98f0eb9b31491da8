"""The ways to choose among given texts, as names; the scheduler does the scoring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.runtime.messages import SelectMethod


@dataclass(frozen=True)
class ChoicesMethod:
    """How `select` scores its choices. Use one of the three objects of this module.

    >>> select("tool", ["calculator", "search"], choices_method=greedy_token_selection)  # doctest: +SKIP
    """

    name: SelectMethod


token_length_normalized = ChoicesMethod("token_length_normalized")
"""The highest mean logprob over a choice's tokens wins. The default."""

greedy_token_selection = ChoicesMethod("greedy_token_selection")
"""Token by token, the choices whose next token is not the likeliest drop out; a choice that has ended takes
part with its mean."""

unconditional_likelihood_normalized = ChoicesMethod("unconditional_likelihood_normalized")
"""The highest mean of (logprob minus the logprob without the prompt) wins: surface forms that are likely
everywhere lose their advantage (Holtzman et al. 2021, arXiv:2104.08315, per token)."""


def method_name(method: object) -> SelectMethod:
    """The wire's name of a choices method; None is the default. Raises InputError for anything else."""
    if method is None:
        return token_length_normalized.name
    if isinstance(method, ChoicesMethod):
        return method.name
    raise InputError(
        "choices_method must be token_length_normalized, greedy_token_selection or "
        f"unconditional_likelihood_normalized (the objects, not their names), not {method!r:.80}"
    )
