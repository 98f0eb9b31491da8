"""The explored prefixes of one prompt and one constraint: their distributions, and the probability known to be lost.

All exact samples of a prompt and a constraint share a tree. What one sample has computed at a prefix, the others read
there without a model step, and the probability of the texts that the constraint does not allow is known once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plait.runtime.arrays import Float32Array, Float64Array
from plait.runtime.sampling.numpy_ops import first_above, largest_ids

TOP_TOKENS = 64  # allowed tokens whose probabilities are kept at a prefix
MAX_TREE_BYTES = 1 << 20
MAX_TREES = 64  # of all tenants
MAX_TREES_OF_TENANT = 16
_NODE_BYTES = 400
_DISTRIBUTION_BYTES = 400 + TOP_TOKENS * 16

FloatArray = Float32Array | Float64Array


class AllowedTokens(NamedTuple):
    """The tokens with a probability above 0 that a constraint allows after a prefix, by id.

    ids [A], weights [A]: their probabilities, as fractions of that of all tokens.
    """

    ids: npt.NDArray[np.int64]
    weights: Float64Array

    @classmethod
    def of(cls, probabilities: FloatArray, allowed: npt.NDArray[np.bool_]) -> AllowedTokens:
        """Selects the allowed tokens of probabilities [V]."""
        ids = np.flatnonzero(allowed)
        weights = probabilities[ids].astype(np.float64)
        if not weights.all():
            ids, weights = ids[weights > 0], weights[weights > 0]
        return cls(ids, weights)


class TokenDistribution:
    """The probabilities of the allowed tokens after one prefix, as fractions of all tokens' probability.

    `ids`, `weights` [at most TOP_TOKENS]: the likeliest allowed tokens, falling, equal ones by id. `tail_mass`: the sum
    of all other allowed tokens. `allowed_mass`: the sum of all allowed tokens; 1 - allowed_mass is lost.
    """

    __slots__ = ("allowed_mass", "ids", "num_allowed", "tail_mass", "weights")

    def __init__(self, allowed: AllowedTokens) -> None:
        found, values = allowed
        self.num_allowed = len(found)
        kept = largest_ids(values, min(len(found), TOP_TOKENS))
        self.ids: npt.NDArray[np.int64] = found[kept]
        self.weights: Float64Array = values[kept]
        self.allowed_mass = min(1.0, float(values.sum()))
        self.tail_mass = max(0.0, float(values.sum() - self.weights.sum())) if len(found) > len(kept) else 0.0

    def draw(self, left: TokensLeft, fraction: float, allowed: AllowedTokens | None) -> tuple[int, float] | None:
        """Inverts the cumulative distribution of the tokens `left` at `fraction`, in [0, 1), and takes the token out.

        The order is `ids`, then the other tokens by id. Returns the token and its probability; None if the token is one
        of the others and `allowed`, which has their probabilities, is None.
        """
        cumulative = left.weights.cumsum()
        target = fraction * (cumulative[-1] + left.tail_mass)
        if target < cumulative[-1] or self.num_allowed == len(self.ids):
            return left.take_top(first_above(cumulative, target))
        if allowed is None:
            return None
        is_taken = np.isin(allowed.ids, np.append(self.ids, left.taken_from_tail))
        tail = np.where(is_taken, 0.0, allowed.weights)
        tail_cumulative = tail.cumsum()
        if not tail_cumulative[-1]:  # rounding left a rest where there is no token
            return left.take_top(first_above(cumulative, cumulative[-1]))
        index = first_above(tail_cumulative, target - cumulative[-1])
        return left.take_from_tail(int(allowed.ids[index]), float(tail[index]))


class TokensLeft:
    """The allowed tokens after a prefix that one search has not drawn yet."""

    __slots__ = ("_ids", "count", "tail_mass", "taken_from_tail", "weights")

    def __init__(self, distribution: TokenDistribution) -> None:
        self._ids, self.weights = distribution.ids, distribution.weights.copy()
        self.tail_mass, self.count = distribution.tail_mass, distribution.num_allowed
        self.taken_from_tail: list[int] = []

    @property
    def mass(self) -> float:
        return float(self.weights.sum()) + self.tail_mass if self.count else 0.0

    def take_top(self, index: int) -> tuple[int, float]:
        """Takes out the token at `index` of the likeliest ones; returns it and its probability."""
        weight = float(self.weights[index])
        self.weights[index] = 0.0
        self.count -= 1
        return int(self._ids[index]), weight

    def take_from_tail(self, token: int, weight: float) -> tuple[int, float]:
        """Takes out one of the other tokens."""
        self.taken_from_tail.append(token)
        self.tail_mass = max(0.0, self.tail_mass - weight)
        self.count -= 1
        return token, weight


class PrefixNode:
    """One prefix. `mass`: an upper bound of the probability that a text which begins so is admissible.

    `probability`: of its last token after the prefix before. `is_end`: None until it is known whether the constraint
    ends the text here.
    """

    __slots__ = ("children", "distribution", "is_end", "mass", "parent", "probability")

    def __init__(self, parent: PrefixNode | None, probability: float) -> None:
        self.parent, self.probability, self.mass = parent, probability, 1.0
        self.children: dict[int, PrefixNode] = {}
        self.distribution: TokenDistribution | None = None
        self.is_end: bool | None = None

    def lower_mass(self, mass: float) -> None:
        """Lowers the bound of this prefix, and with it those of all shorter ones."""
        node, lost = self, self.mass - mass
        while lost > 0:
            node.mass = max(0.0, node.mass - lost)
            if node.parent is None:
                return
            node, lost = node.parent, lost * node.probability


class PrefixTree:
    """The prefixes of one prompt and constraint. What exceeds MAX_TREE_BYTES is not kept.

    `found_mass`: the probability of all complete texts that were found: a lower bound of what `root.mass` bounds from
    above.
    """

    def __init__(self) -> None:
        self.root = PrefixNode(None, 1.0)
        self.num_bytes = _NODE_BYTES
        self.found_mass = 0.0
        self._found: set[tuple[int, ...]] = set()

    def child(self, node: PrefixNode, token: int, probability: float) -> PrefixNode:
        """Returns the prefix one token longer. Where there is no room it is made for the caller only."""
        child = node.children.get(token)
        if child is not None:
            return child
        is_kept = self.num_bytes + _NODE_BYTES <= MAX_TREE_BYTES and (node.parent is not None or node is self.root)
        child = PrefixNode(node if is_kept else None, probability)
        if is_kept:
            node.children[token] = child
            self.num_bytes += _NODE_BYTES
        return child

    def keep(self, node: PrefixNode, distribution: TokenDistribution) -> None:
        """Stores the distribution after a prefix, and what its constraint loses there."""
        if node.distribution is not None or (node.parent is None and node is not self.root):
            return
        if self.num_bytes + _DISTRIBUTION_BYTES <= MAX_TREE_BYTES:
            node.distribution = distribution
            self.num_bytes += _DISTRIBUTION_BYTES
            node.lower_mass(distribution.allowed_mass)

    def add_found(self, path: tuple[int, ...], probability: float) -> None:
        """Counts a complete text, once."""
        size = 100 + 32 * len(path)
        if path not in self._found and self.num_bytes + size <= MAX_TREE_BYTES:
            self._found.add(path)
            self.num_bytes += size
            self.found_mass += probability


class PrefixTrees:
    """The trees of all prompts and constraints. The least recently used ones are dropped."""

    def __init__(self) -> None:
        self._trees: OrderedDict[tuple[str, Hashable], PrefixTree] = OrderedDict()

    def get(self, tenant: str, key: Hashable) -> PrefixTree:
        """Returns the tree of `key`, which names everything that the probabilities depend on."""
        tree = self._trees.pop((tenant, key), None) or PrefixTree()
        own = [name for name in self._trees if name[0] == tenant]
        if len(own) >= MAX_TREES_OF_TENANT:
            del self._trees[own[0]]
        elif len(self._trees) >= MAX_TREES:
            self._trees.popitem(last=False)
        self._trees[tenant, key] = tree
        return tree

    def __len__(self) -> int:
        return len(self._trees)
