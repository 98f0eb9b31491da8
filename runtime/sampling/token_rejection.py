"""Draws tokens that a constraint admits by rejection, without a mask, and estimates their probability without bias.

Adaptive weighted rejection sampling (AWRS, arXiv:2504.05410): tokens are drawn from the unmasked probabilities, each
one is checked when it is drawn, and a rejected one is never drawn again. What is accepted has the distribution that a
mask would give. Several tokens of one prefix are drawn together, each round by systematic sampling.

The estimate of the admissible probability m is a + r z: a is the probability of the tokens that were accepted, r that
of all tokens never checked, and z the admissible share of NUM_TAIL_DRAWS new draws among those. Which tokens were
checked does not depend on these draws, so E[a + r z] = m, given the drawn tokens as well. It is never 0. Where tokens
were rejected and r is not small, z would say little about m; there the mask is filled, and m is known. Where many
different tokens are expected, which the probabilities tell, the mask is filled at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from plait.runtime.arrays import Float64Array
from plait.runtime.sampling.numpy_ops import DRAW_BLOCK, block_sums
from plait.runtime.sampling.prefix_tree import AllowedTokens, FloatArray

MAX_CHECKED = 2  # expected tokens beside the likeliest one: a mask costs about as much as so many checks
MAX_REJECTED = 1  # tokens of one prefix; then its mask is filled, and the probability is known
NUM_TAIL_DRAWS = 4
SMALL_TAIL = 0.05  # of unchecked probability: one draw is enough


class TokenRejection:
    """The draws at one prefix.

    probabilities: [V], with the sum 1. check: whether the constraint admits a token next. allowed: [V], whether it
    admits each token; called at most once. uniform: a new number in [0, 1).
    """

    def __init__(
        self,
        probabilities: FloatArray,
        check: Callable[[int], bool],
        allowed: Callable[[], npt.NDArray[np.bool_]],
        uniform: Callable[[], float],
    ) -> None:
        self.num_checks = self.num_masks = 0
        self._check, self._allowed, self._uniform = check, allowed, uniform
        self._verdicts: dict[int, bool] = {}
        self._masked: AllowedTokens | None = None  # once the mask is filled
        self._weights = probabilities
        self._block_ends = block_sums(probabilities).cumsum()  # faster than a sum for each token
        self._total = float(self._block_ends[-1])
        self._blocks: dict[int, Float64Array] = {}

    def draw(self, count: int) -> list[int]:
        """Draws `count` admissible tokens. The list is empty if no token with a probability above 0 is admissible.

        The expected number of a token a in it is count p(a) / m: systematic sampling spreads the tokens of a round, and
        those that are rejected are drawn again in the next one.
        """
        tokens: list[int] = []
        if count > MAX_CHECKED and count * (1.0 - float(self._weights.max())) > MAX_CHECKED:
            self._fill_mask()
        while len(tokens) < count:
            num_missing = count - len(tokens)
            if self._masked is not None:
                return tokens + self._draw_masked(self._masked, num_missing) if len(self._masked.ids) else []
            proposals = self._draw_outside(sorted(self._rejected()), num_missing)
            if not proposals:
                return []
            tokens += [token for token in proposals if self._is_admissible(token)]
            if len(self._rejected()) > MAX_REJECTED:
                self._fill_mask()
        return tokens

    def estimate_mass(self) -> float:
        """Returns an unbiased estimate of the probability of all admissible tokens. Call it after `draw`."""
        if self._masked is not None:
            return float(self._masked.weights.sum())
        known = sorted(self._verdicts)
        accepted = math.fsum(float(self._weights[token]) for token in known if self._verdicts[token])
        tail = self._total - float(self._weights[known].sum(dtype=np.float64))
        if tail <= 1e-12:
            return accepted
        if tail >= SMALL_TAIL and self._rejected():
            return float(self._fill_mask().weights.sum())
        count = 1 if tail < SMALL_TAIL else NUM_TAIL_DRAWS
        drawn = [token for _ in range(count) for token in self._draw_outside(known, 1)]
        return accepted + tail * sum(self._is_admissible(token) for token in drawn) / count

    def _rejected(self) -> list[int]:
        return [token for token, is_admissible in self._verdicts.items() if not is_admissible]

    def _is_admissible(self, token: int) -> bool:
        verdict = self._verdicts.get(token)
        if verdict is None:
            self.num_checks += 1
            verdict = self._verdicts[token] = self._check(token)
        return verdict

    def _fill_mask(self) -> AllowedTokens:
        self.num_masks += 1
        self._masked = AllowedTokens.of(self._weights, self._allowed())
        return self._masked

    def _draw_masked(self, masked: AllowedTokens, count: int) -> list[int]:
        """Draws `count` of the admissible tokens by systematic sampling."""
        cumulative = masked.weights.cumsum()
        targets = (self._uniform() + np.arange(count)) / count * cumulative[-1]
        indices = np.minimum(cumulative.searchsorted(targets, side="right"), len(cumulative) - 1)
        tokens: list[int] = masked.ids[indices].tolist()
        return tokens

    def _draw_outside(self, excluded: list[int], count: int) -> list[int]:
        """Draws `count` tokens by systematic sampling among those that are not `excluded` (rising ids).

        The result is empty if no probability is left.
        """
        left = self._total - float(self._weights[excluded].sum(dtype=np.float64))
        if left <= 0.0:
            return []
        targets = (self._uniform() + np.arange(count)) / count * left
        for token in excluded:
            targets = np.where(targets >= self._mass_before(token), targets + self._weights[token], targets)
        tokens = [self._locate(float(target)) for target in targets]
        if any(not self._weights[token] or token in excluded for token in tokens):  # by rounding
            possible = self._weights.copy()
            possible[excluded] = 0.0
            best = int(possible.argmax())
            if not possible[best]:
                return []
            tokens = [token if possible[token] else best for token in tokens]
        return tokens

    def _block_start(self, block: int) -> float:
        return float(self._block_ends[block - 1]) if block else 0.0

    def _within_block(self, block: int) -> Float64Array:
        """Cumulative probabilities of the tokens of a block, from its start."""
        found = self._blocks.get(block)
        if found is None:
            found = self._weights[block * DRAW_BLOCK : (block + 1) * DRAW_BLOCK].cumsum(dtype=np.float64)
            self._blocks[block] = found
        return found

    def _mass_before(self, token: int) -> float:
        block, index = divmod(token, DRAW_BLOCK)
        return self._block_start(block) + (float(self._within_block(block)[index - 1]) if index else 0.0)

    def _locate(self, target: float) -> int:
        """The token where the cumulative probability exceeds `target`."""
        block = min(int(self._block_ends.searchsorted(target, side="right")), len(self._block_ends) - 1)
        index = int(self._within_block(block).searchsorted(target - self._block_start(block), side="right"))
        return min(block * DRAW_BLOCK + index, len(self._weights) - 1)
