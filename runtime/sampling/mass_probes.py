"""Probe texts, drawn under the mask: they stop a search for an exact sample early if it would hardly ever end.

The search computes the probabilities after each allowed prefix that is likelier than all admissible texts together. So
those of `d` tokens count whose probability among the allowed ones exceeds what is lost behind them: for a typical
text of surprise h(d) = -log q(first d tokens) and of loss r(d) = -log(allowed mass behind them), some exp(min(h, r)).
Early losses cost nothing, nor do losses behind tokens that are certain; many open tokens before many losses do.

The texts grow together by sequential Monte Carlo: those that may go on with little are replaced by copies of others.
The sum over d only grows with a text, so the search is given up as soon as it is far beyond the limit for all of them.
Where a text is known to need many more tokens, they are taken to lose half as much each as its last ones did: so
[a-z]{300} is given up after some ten tokens of it rather than after a hundred.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from plait.runtime.sampling.logit_ops import hash_uniform
from plait.runtime.sampling.prefix_tree import AllowedTokens

Path: TypeAlias = tuple[int, ...]

NUM_PROBES = 3  # with the best prefix of the search they are as many rows as it may have
MARGIN = 3.0  # how far beyond the limit the estimate must be, as a logarithm
EXPECTED_LOSS = 0.5  # of a token to come, as a part of what the later half of the tokens lost on average
FORESEEN_FROM, MANY_MISSING = 8, 32  # tokens of a text, and those that it needs beside, from which loss is foreseen


@dataclass(frozen=True)
class _Text:
    """A text; for each of its prefixes, the empty one first, the surprise of its tokens and the loss before it."""

    path: Path = ()
    surprises: tuple[float, ...] = (0.0,)
    losses: tuple[float, ...] = (0.0,)

    def log_steps(self, mass: float, num_missing: float) -> float:
        """Returns the logarithm of the estimated steps, where `mass` is allowed after the text, which needs about
        `num_missing` more tokens."""
        loss = self.losses[-1] - math.log(mass) if mass > 0.0 else math.inf
        if len(self.path) >= FORESEEN_FROM and num_missing >= MANY_MISSING and mass > 0.0:
            half = len(self.losses) // 2
            loss += EXPECTED_LOSS * num_missing * (loss - self.losses[half]) / (len(self.losses) - half)
        return float(np.logaddexp.reduce(np.minimum(self.surprises, loss - np.array(self.losses))))


class MassProbes:
    """The probes of one search. `max_steps`: those that it may take. `is_end`: whether a text is complete.
    `num_missing`: about how many more tokens it needs.

    `are_lost`: whether the search is to be given up.
    """

    def __init__(
        self, seed: int, max_steps: int, is_end: Callable[[Path], bool], num_missing: Callable[[Path], float]
    ) -> None:
        self._most, self._is_end, self._num_missing = math.log(max_steps) + MARGIN, is_end, num_missing
        self._seed, self._num_draws = -2 - seed, 0
        self._texts = [_Text()] * NUM_PROBES  # none once all are complete, or lost
        self._allowed: dict[Path, AllowedTokens] = {}  # after those of them that were fed
        self._ended = set[Path]()
        self.are_lost = False

    def paths(self) -> list[Path]:
        """Returns the prefixes at which the probabilities are needed next."""
        paths = dict.fromkeys(text.path for text in self._texts)
        return [path for path in paths if path not in self._allowed and path not in self._ended]

    def feed(self, path: Path, allowed: AllowedTokens) -> None:
        """Takes the probabilities after a prefix; with the last one that is needed, each text grows by a token."""
        if path not in self.paths():
            return
        self._allowed[path] = allowed
        if self.paths():
            return
        masses = [self._mass_after(text.path) for text in self._texts]
        self.are_lost = all(
            text.log_steps(mass, 0.0 if text.path in self._ended else self._num_missing(text.path)) > self._most
            for text, mass in zip(self._texts, masses, strict=True)
        )
        self._texts = [] if self.are_lost else [self._grown(text) for text in self._resampled(masses)]
        self._allowed.clear()
        self._ended = {text.path for text in self._texts if self._is_end(text.path)}
        if all(text.path in self._ended for text in self._texts):
            self._texts.clear()

    def _mass_after(self, path: Path) -> float:
        return 1.0 if path in self._ended else float(self._allowed[path].weights.sum())

    def _resampled(self, masses: list[float]) -> list[_Text]:
        """Returns texts drawn in proportion to `masses`, at equal distances (systematic resampling)."""
        start, chosen, end = self._uniform(), list[_Text](), 0.0
        for text, mass in zip(self._texts, masses, strict=True):
            end += NUM_PROBES * mass / sum(masses)
            chosen += [text] * (math.ceil(end - start) - len(chosen))
        return chosen

    def _grown(self, text: _Text) -> _Text:
        if text.path in self._ended:
            return text
        allowed, mass = self._allowed[text.path], self._mass_after(text.path)
        found = allowed.weights.cumsum().searchsorted(self._uniform() * mass, side="right")
        index = min(int(found), len(allowed.ids) - 1)
        surprise = text.surprises[-1] - math.log(float(allowed.weights[index]) / mass)
        path = (*text.path, int(allowed.ids[index]))
        return _Text(path, (*text.surprises, surprise), (*text.losses, text.losses[-1] - math.log(mass)))

    def _uniform(self) -> float:
        self._num_draws += 1
        return hash_uniform(self._seed, self._num_draws)
