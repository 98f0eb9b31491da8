"""The draft of one request while a step verifies it."""

from __future__ import annotations

from dataclasses import dataclass, field

from plait.runtime.arrays import IntArray

FORCED = -1  # in `Draft.draws`: the token of the position is not drawn


@dataclass
class Draft:
    """Tokens behind the request's text, and what the step needs to choose a token at each position of them.

    Position i is that of `tokens[i]`; one more follows the last. `draws[i]`: how many tokens are drawn before the one
    of position i, or FORCED if the constraint forces it. `masks[i]`: the packed mask [num_words] of its tokens; none if
    all are allowed.
    """

    tokens: list[int] = field(default_factory=list)
    draws: list[int] = field(default_factory=list)
    masks: dict[int, IntArray] = field(default_factory=dict)

    def num_accepted(self, chosen: list[int]) -> int:
        """Returns how many tokens the model accepted: those before the first position where it chose another.

        chosen [len(tokens) + 1]: its token at each position.
        """
        pairs = zip(self.tokens, chosen, strict=False)
        return next((position for position, (token, other) in enumerate(pairs) if token != other), len(self.tokens))
