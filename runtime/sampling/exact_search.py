"""Draws a constrained text from the model's own distribution, conditioned on the constraint: p(x | x is admissible).

A mask draws each token from what it allows and so favours prefixes whose continuations the model finds unlikely. Here
the tokens are drawn from all tokens. Where the drawn token is not allowed, the text does not start again from its first
token; the search continues at the prefix where the next best text is, and what was lost is never drawn again.

This is A* sampling (Maddison et al. 2014, arXiv:1411.0030) over the tree of texts. Each text x has a random value
log p(x) + Gumbel noise; the admissible text with the largest value is a draw from p(x | admissible). The largest value
below a prefix is drawn before its texts are known: that of the best token's prefix is the same, that of all other
tokens together is a Gumbel number cut off there. A heap keeps the prefixes by their largest values. A text that is on
top and complete is the result.

The probability of the lost tokens leaves the search at once, as in ASAp (arXiv:2405.21047) and CARS
(arXiv:2510.01902). The result depends only on the seed and the probabilities, not on what earlier samples have left in
the shared tree.
"""

from __future__ import annotations

import heapq
import math
from typing import Protocol

from plait.runtime.arrays import Float64Array
from plait.runtime.sampling.logit_ops import hash_uniform
from plait.runtime.sampling.prefix_tree import PrefixNode, PrefixTree, TokenDistribution, TokensLeft

MAX_MODEL_STEPS = 8192  # of one sample
MAX_PREFIXES = 65536  # that one sample takes from its heap
MAX_PREFIXES_AT_ONCE = 512  # without a model step between them

Path = tuple[int, ...]


class SearchLimitReached(Exception):
    """The sample needs more steps than it may take: the constraint allows too little of what the model would write."""


class NothingAdmissible(Exception):
    """No text that the constraint allows has a probability above 0 within the limits."""


class Constraint(Protocol):
    """What the search asks about a prefix that the constraint allows. The last token may be an end token."""

    def is_end(self, path: Path) -> bool:
        """Whether the text ends here."""

    def is_dead(self, path: Path) -> bool:
        """Whether no complete text begins so."""


class _Prefix:
    """One prefix in this search. `left`: the allowed tokens after it that are not prefixes of their own yet."""

    __slots__ = ("distribution", "left", "logprob", "node", "parent", "token")

    def __init__(self, parent: _Prefix | None, token: int, logprob: float, node: PrefixNode) -> None:
        self.parent, self.token, self.logprob, self.node = parent, token, logprob, node
        self.distribution = node.distribution
        self.left: TokensLeft | None = None

    def path(self) -> Path:
        tokens: list[int] = []
        prefix = self
        while prefix.parent is not None:
            tokens.append(prefix.token)
            prefix = prefix.parent
        return tuple(reversed(tokens))


class ExactSearch:
    """One sample. Alternate `advance`, which names a prefix, and `feed` with the probabilities there."""

    def __init__(self, tree: PrefixTree, constraint: Constraint, seed: int) -> None:
        self.tree, self.num_model_steps, self.logprob = tree, 0, 0.0
        self._constraint, self._seed, self._num_draws, self._num_taken = constraint, seed, 0, 0
        root = _Prefix(None, -1, 0.0, tree.root)
        self._pending: tuple[float, _Prefix, bool] | None = None
        self._heap: list[tuple[float, int, _Prefix, bool]] = []
        self._push(-math.log(-math.log(self._uniform())), root, is_rest=False)
        self.value: Path | None = None

    def advance(self) -> Path | None:
        """Returns the prefix whose probabilities are needed next; None when `value` is found.

        Raises SearchLimitReached or NothingAdmissible.
        """
        num_at_once = 0
        while self._heap:
            bound, _, prefix, is_rest = heapq.heappop(self._heap)
            self._num_taken += 1
            num_at_once += 1
            if self._num_taken > MAX_PREFIXES or self.num_model_steps >= MAX_MODEL_STEPS:
                raise SearchLimitReached
            if not is_rest:
                if self._is_end(prefix):
                    self.value, self.logprob = prefix.path(), prefix.logprob
                    self.tree.add_found(self.value, math.exp(prefix.logprob))
                    return None
                if self._constraint.is_dead(prefix.path()):
                    prefix.node.lower_mass(0.0)
                    continue
            if num_at_once >= MAX_PREFIXES_AT_ONCE or not self._extend(-bound, prefix, is_rest, None):
                self._pending = (-bound, prefix, is_rest)
                return prefix.path()
        raise NothingAdmissible

    def feed(self, allowed_weights: Float64Array) -> None:
        """Takes the probabilities [V] after the prefix of `advance`, set to 0 where the constraint allows no token."""
        assert self._pending is not None
        (bound, prefix, is_rest), self._pending = self._pending, None
        self.num_model_steps += 1
        if prefix.distribution is None:
            prefix.distribution = TokenDistribution(allowed_weights)
            self.tree.keep(prefix.node, prefix.distribution)
        self._extend(bound, prefix, is_rest, allowed_weights)

    def _is_end(self, prefix: _Prefix) -> bool:
        if prefix.node.is_end is None:
            prefix.node.is_end = self._constraint.is_end(prefix.path())
        return prefix.node.is_end

    def _extend(self, bound: float, prefix: _Prefix, is_rest: bool, allowed_weights: Float64Array | None) -> bool:
        """Draws the best token after a prefix, whose texts have no larger value than `bound`, and pushes its prefix.

        `is_rest`: among the allowed tokens that are not drawn. Else among all tokens; then the best one may be lost.
        Returns False, without a change, if the probabilities are needed and not given.
        """
        distribution = prefix.distribution
        if distribution is None:
            return False
        if prefix.left is None:
            prefix.left = TokensLeft(distribution)
        if not prefix.left.count:
            return True
        fraction = self._uniform()
        if not is_rest:
            if fraction >= distribution.allowed_mass:
                self._push_rest(bound, prefix, prefix.left)
                return True
            fraction = min(fraction / distribution.allowed_mass, 1 - 2**-53)
        drawn = distribution.draw(prefix.left, fraction, allowed_weights)
        if drawn is None:
            self._num_draws -= 1
            return False
        token, probability = drawn
        child = self.tree.child(prefix.node, token, probability)
        self._push(bound, _Prefix(prefix, token, prefix.logprob + math.log(probability), child), is_rest=False)
        self._push_rest(bound, prefix, prefix.left)
        return True

    def _push_rest(self, bound: float, prefix: _Prefix, left: TokensLeft) -> None:
        """Pushes the allowed tokens that are not drawn, with the largest value of their texts, below `bound`."""
        mass = left.mass
        if mass <= 0.0:
            return
        location = prefix.logprob + math.log(mass)
        value = location - _log_add(location - bound, math.log(-math.log(self._uniform())))
        self._push(value, prefix, is_rest=True)

    def _push(self, value: float, prefix: _Prefix, *, is_rest: bool) -> None:
        heapq.heappush(self._heap, (-value, self._num_draws, prefix, is_rest))
        self._num_draws += 1

    def _uniform(self) -> float:
        """The next random number in (0, 1)."""
        self._num_draws += 1
        return hash_uniform(self._seed, self._num_draws) or 2**-53


def _log_add(a: float, b: float) -> float:
    """log(exp(a) + exp(b))"""
    high, low = max(a, b), min(a, b)
    return high + math.log1p(math.exp(low - high))
