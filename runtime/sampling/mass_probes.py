"""Probe texts, drawn under the mask: they stop a search for an exact sample early if it would hardly ever end.

The product of the allowed probabilities along a text that is drawn among the allowed tokens is an unbiased estimate of
p(admissible) (importance sampling), and a search takes about 1 / p(admissible) steps. Where a few such products have
fallen far below what the search may take before their texts are complete, it is given up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from plait.runtime.sampling.logit_ops import hash_uniform
from plait.runtime.sampling.prefix_tree import AllowedTokens

NUM_PROBES = 3  # with the best prefix of the search they are as many rows as it may have
MARGIN = 12.0  # how far below the limit of the search a product is, as a logarithm: single products vary widely


@dataclass
class _Probe:
    path: tuple[int, ...]
    seed: int
    log_mass: float = 0.0


class MassProbes:
    """The probes of one search. `least`: the logarithm of the least p(admissible) for which it may search."""

    def __init__(self, seed: int, least: float) -> None:
        self._least = least - MARGIN
        self._probes = [_Probe((), -2 - seed - index) for index in range(NUM_PROBES)]
        self.are_all_lost = False

    def paths(self) -> list[tuple[int, ...]]:
        """Returns the prefixes at which the probabilities are needed next."""
        return [probe.path for probe in self._probes]

    def feed(self, path: tuple[int, ...], allowed: AllowedTokens) -> list[tuple[int, ...]]:
        """Takes the probabilities after a prefix. Returns the longer prefixes to which probes went on."""
        moved = [probe for probe in self._probes if probe.path == path]
        mass = float(allowed.weights.sum())
        for probe in moved:
            probe.log_mass += math.log(mass) if mass > 0.0 else -math.inf
            if probe.log_mass < self._least:
                self._probes.remove(probe)
                self.are_all_lost = not self._probes
                continue
            target = hash_uniform(probe.seed, len(path)) * mass
            index = int(allowed.weights.cumsum().searchsorted(target, side="right"))
            probe.path += (int(allowed.ids[min(index, len(allowed.ids) - 1)]),)
        return [probe.path for probe in moved if len(probe.path) > len(path)]

    def stop(self) -> None:
        """Ends all probes: one was complete, so a value may be found."""
        self._probes.clear()
