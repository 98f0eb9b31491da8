"""Draws a constrained text from the model's own distribution, conditioned on the constraint: p(x | x is admissible).

A mask draws each token from what it allows and so favours prefixes whose continuations the model finds unlikely. Here
the tokens are drawn from all tokens. Where the drawn token is not allowed, the text does not start again from its first
token; the search continues at the prefix where the next best text is, and what was lost is never drawn again.

This is A* sampling (Maddison et al. 2014, arXiv:1411.0030) over the tree of texts. Each text x has a random value
log p(x) + Gumbel noise; the admissible text with the largest value is a draw from p(x | admissible). The largest value
below a prefix is drawn before its texts are known: that of the best token's prefix is the same, that of all other
tokens together is a Gumbel number cut off there. A heap keeps the prefixes by their largest values. A text that is on
top and complete is the result.

The value of a text depends on random numbers of its own prefixes only, not on the order of the search, so several
prefixes of the heap can be computed at once: the result is the complete text whose value no other bound exceeds.

The probability of the lost tokens leaves the search at once, as in ASAp (arXiv:2405.21047) and CARS
(arXiv:2510.01902). The result depends only on the seed and the probabilities, not on what earlier samples have left in
the shared tree.
"""

from __future__ import annotations

import heapq
import math
from typing import Protocol

from plait.runtime.sampling.logit_ops import hash_uniform
from plait.runtime.sampling.mass_probes import MassProbes
from plait.runtime.sampling.prefix_tree import AllowedTokens, PrefixNode, PrefixTree, TokenDistribution, TokensLeft

MAX_MODEL_STEPS = 8192  # of one sample
PROBED_FROM = 64  # model steps without a sample
MAX_PREFIXES = 65536  # that one sample takes from its heap
MAX_PREFIXES_AT_ONCE = 512  # without a model step between them

Path = tuple[int, ...]


class SearchLimitReached(Exception):
    """The sample needs, or would need, more steps than it may take: the model would hardly write what is allowed."""


class NothingAdmissible(Exception):
    """No text that the constraint allows has a probability above 0 within the limits."""


class Constraint(Protocol):
    """What the search asks about a prefix that the constraint allows. The last token may be an end token."""

    def is_end(self, path: Path) -> bool:
        """Whether the text ends here."""

    def is_dead(self, path: Path) -> bool:
        """Whether no complete text begins so."""

    def num_missing(self, path: Path) -> float:
        """About how many tokens follow at least, if they are as long as those of the prefix."""


class _Prefix:
    """One prefix in this search. `left`: the allowed tokens after it that are not prefixes of their own yet.

    `seed`, `num_draws`: of its own random numbers, so that these do not depend on the order in which prefixes are
    computed.
    """

    __slots__ = ("distribution", "left", "logprob", "node", "num_draws", "parent", "seed", "token")

    def __init__(self, parent: _Prefix | None, token: int, logprob: float, node: PrefixNode, seed: int) -> None:
        self.parent, self.token, self.logprob, self.node = parent, token, logprob, node
        self.distribution = node.distribution
        self.left: TokensLeft | None = None
        self.seed, self.num_draws = seed, 0

    def path(self) -> Path:
        tokens: list[int] = []
        prefix = self
        while prefix.parent is not None:
            tokens.append(prefix.token)
            prefix = prefix.parent
        return tuple(reversed(tokens))

    def uniform(self) -> float:
        """The next random number in (0, 1)."""
        self.num_draws += 1
        return hash_uniform(self.seed, self.num_draws) or 2**-53


class ExactSearch:
    """One sample. Alternate `advance`, which names prefixes, and `feed` with the probabilities at some of them.

    `max_pending`: prefixes that are named at once at most. The search names one at a time until a drawn token is lost,
    and one more with each loss: those that are computed beside the best one are needed if that one is lost too.
    `pending`: those named and not fed; None for one that only a probe needs (mass_probes.py).
    """

    def __init__(self, tree: PrefixTree, constraint: Constraint, seed: int, max_pending: int = 1) -> None:
        self.tree, self.num_model_steps, self.logprob = tree, 0, 0.0
        self._constraint, self._max_pending = constraint, max_pending
        self._num_taken = self._num_pushed = self._num_lost = 0
        root = _Prefix(None, -1, 0.0, tree.root, seed)
        self.pending: dict[Path, tuple[float, _Prefix, bool] | None] = {}
        self._probes: MassProbes | None = None
        self._seed = seed
        self._heap: list[tuple[float, int, _Prefix, bool]] = []
        self._push(-math.log(-math.log(root.uniform())), root, is_rest=False)
        self.value: Path | None = None

    def advance(self) -> list[Path]:
        """Returns prefixes whose probabilities are needed now, beside those that are pending already.

        Sets `value` where it is found; what is pending then is not needed. Raises SearchLimitReached or
        NothingAdmissible.
        """
        wanted = self._name_probes()
        num_at_once = 0
        while self._heap and len(self._own_pending()) < self._most_pending():
            bound, _, prefix, is_rest = self._heap[0]
            is_end = not is_rest and self._is_end(prefix)
            if is_end and any(-pending_bound < bound for pending_bound, _, _ in self._own_pending()):
                return wanted  # a pending prefix may have a better text
            heapq.heappop(self._heap)
            self._num_taken += 1
            num_at_once += 1
            if self._num_taken > MAX_PREFIXES or self.num_model_steps >= MAX_MODEL_STEPS:
                raise SearchLimitReached
            if is_end:
                self.value, self.logprob = prefix.path(), prefix.logprob
                self.tree.add_found(self.value, math.exp(prefix.logprob))
                return []
            if not is_rest and self._constraint.is_dead(prefix.path()):
                self._num_lost += 1
                prefix.node.lower_mass(0.0)
                continue
            if num_at_once >= MAX_PREFIXES_AT_ONCE or not self._extend(-bound, prefix, is_rest, None):
                path = prefix.path()
                self.pending[path] = (-bound, prefix, is_rest)
                wanted.append(path)
        if not self._own_pending():
            raise NothingAdmissible
        return wanted

    def _most_pending(self) -> int:
        """Returns how many prefixes the search itself may have named at once."""
        num_probes = len(self._probes.paths()) if self._probes is not None else 0
        return max(1, min(self._max_pending - num_probes, 1 + self._num_lost))

    def _own_pending(self) -> list[tuple[float, _Prefix, bool]]:
        return [entry for entry in self.pending.values() if entry is not None]

    def _name_probes(self) -> list[Path]:
        """Returns the prefixes that probes need, as far as there is room. Raises SearchLimitReached."""
        if self._probes is None:
            if self.num_model_steps < PROBED_FROM:
                return []
            constraint = self._constraint
            self._probes = MassProbes(self._seed, MAX_MODEL_STEPS, constraint.is_end, constraint.num_missing)
        if self._probes.are_lost:
            raise SearchLimitReached
        room = max(2, self._max_pending) - len(self.pending)
        new = [path for path in self._probes.paths() if path not in self.pending][: max(0, room)]
        self.pending |= dict.fromkeys(new)
        return new

    def _feed_probes(self, path: Path, allowed: AllowedTokens) -> None:
        if self._probes is not None:
            self._probes.feed(path, allowed)
            wanted = self._probes.paths()
            self.pending = {path: entry for path, entry in self.pending.items() if entry is not None or path in wanted}

    def feed(self, path: Path, allowed: AllowedTokens) -> None:
        """Takes the probabilities after a prefix, of the tokens that the constraint allows, if it is still pending."""
        if path not in self.pending:
            return
        entry = self.pending.pop(path)
        self.num_model_steps += 1
        self._feed_probes(path, allowed)
        if entry is None:
            return
        bound, prefix, is_rest = entry
        if prefix.distribution is None:
            prefix.distribution = TokenDistribution(allowed)
            self.tree.keep(prefix.node, prefix.distribution)
        self._extend(bound, prefix, is_rest, allowed)

    def _is_end(self, prefix: _Prefix) -> bool:
        if prefix.node.is_end is None:
            prefix.node.is_end = self._constraint.is_end(prefix.path())
        return prefix.node.is_end

    def _extend(self, bound: float, prefix: _Prefix, is_rest: bool, allowed: AllowedTokens | None) -> bool:
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
        fraction = prefix.uniform()
        if not is_rest:
            if fraction >= distribution.allowed_mass:
                self._num_lost += 1
                self._push_rest(bound, prefix, prefix.left)
                return True
            fraction = min(fraction / distribution.allowed_mass, 1 - 2**-53)
        sampled = distribution.draw(prefix.left, fraction, allowed)
        if sampled is None:
            prefix.num_draws -= 1
            return False
        token, probability = sampled
        node = self.tree.child(prefix.node, token, probability)
        child = _Prefix(prefix, token, prefix.logprob + math.log(probability), node, child_seed(prefix.seed, token))
        self._push(bound, child, is_rest=False)
        self._push_rest(bound, prefix, prefix.left)
        return True

    def _push_rest(self, bound: float, prefix: _Prefix, left: TokensLeft) -> None:
        """Pushes the allowed tokens that are not drawn, with the largest value of their texts, below `bound`."""
        mass = left.mass
        if mass <= 0.0:
            return
        location = prefix.logprob + math.log(mass)
        value = location - _log_add(location - bound, math.log(-math.log(prefix.uniform())))
        self._push(value, prefix, is_rest=True)

    def _push(self, value: float, prefix: _Prefix, *, is_rest: bool) -> None:
        heapq.heappush(self._heap, (-value, self._num_pushed, prefix, is_rest))
        self._num_pushed += 1


def child_seed(seed: int, token: int) -> int:
    """The seed of a prefix that is one token longer: 53 bits hashed from both."""
    return int(hash_uniform(seed, -1 - token) * 2.0**53)


def _log_add(a: float, b: float) -> float:
    """log(exp(a) + exp(b))"""
    high, low = max(a, b), min(a, b)
    return high + math.log1p(math.exp(low - high))
