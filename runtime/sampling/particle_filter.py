"""Sequential Monte Carlo for a constrained text: particles, weights and resampling.

Each of N particles is a prefix. A step draws its next token among the admissible ones and multiplies its weight by
their probability, m(prefix), or an unbiased estimate of it (`TokenRejection`); a forced token multiplies it by its own
probability. Where the effective sample size (sum w)^2 / sum w^2 is below half of N, the particles are drawn anew by
their weights (systematic resampling; Douc & Cappe 2005), and the mean of the weights is a factor of the estimate Z.
Before that, particles of negligible weight, or with an unlikely continuation, are ended at random, and the others of
them get more weight (rejection control; Liu, Chen & Wong 1998). The value is drawn by weight among the complete
particles. For every function f of texts

    E[Z f(value)] = sum of p(x) f(x) over the valid texts x,   so E[Z] = p(valid)

(Del Moral 2004; for language models arXiv:2306.03081, arXiv:2504.13139). Without resampling and with one particle the
value is what a mask gives, and Z its importance weight. As N grows, the value's distribution tends to p(x) / p(valid).

Particles with the same prefix are one node: its probabilities are computed once. They always have equal weights.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from plait.runtime.arrays import Float64Array
from plait.runtime.sampling.logit_ops import hash_uniform
from plait.runtime.sampling.prefix_tree import FloatArray
from plait.runtime.sampling.token_rejection import TokenRejection
from plait.runtime.sampling_params import MAX_PARTICLES

RESAMPLE_BELOW = 0.5  # effective sample size, as a fraction of the particles
THIN_BELOW = 0.1  # weight, as a fraction of the mean one
UNLIKELY_LIVE_ON = 0.1  # of the particles whose continuation is unlikely
_RESAMPLE, _PICK, _THIN = range(
    MAX_PARTICLES, MAX_PARTICLES + 3
)  # streams of random numbers; those before belong to nodes
_STREAMS, _MAX_DRAWS = 128, 1 << 12  # streams of a step, random numbers of a stream

Path = tuple[int, ...]


class NoParticleLeft(Exception):
    """Every particle has reached a prefix that no valid text continues."""


class ParticleConstraint(Protocol):
    """What the particles ask about a prefix that the constraint admits. The last token may be an end token."""

    def is_end(self, path: Path) -> bool:
        """Whether the text ends here."""

    def is_dead(self, path: Path) -> bool:
        """Whether the text must end here and is not complete."""

    def accepts(self, path: Path, token: int) -> bool:
        """Whether the token may follow."""

    def allowed(self, path: Path) -> npt.NDArray[np.bool_]:
        """[V]: whether each token may follow."""

    def forced(self, path: Path) -> Path:
        """Tokens that can only follow here."""

    def is_unlikely(self, path: Path) -> bool:
        """Whether the model hardly ever goes on here. A guess: it changes what is computed, and no expectation."""


@dataclass(eq=False)
class ParticleNode:
    """A prefix that `num_particles` particles share. `forced`: tokens that can only follow `path`.

    `first`: the lowest number of its particles, which names its random numbers. `parent`: the node it continues; None
    for the first one.
    """

    path: Path
    forced: Path
    first: int
    num_particles: int
    log_weight: float  # of each particle, since the last resampling
    logprob: float  # of `path`, without the constraint
    parent: ParticleNode | None = None

    @property
    def tokens(self) -> Path:
        return self.path + self.forced


@dataclass
class _Particles:
    """Particles that are equal. `parent`: the node whose last draw made them."""

    path: Path
    num: int
    log_weight: float
    logprob: float
    is_finished: bool
    parent: ParticleNode | None = field(repr=False, default=None)


class ParticleFilter:
    """One value. Compute the probabilities at all `nodes`, `feed` them in any order, `advance`, until `value` is set.

    The result depends on the seed and the probabilities only. log_mass: log Z. logprob: of the value without the
    constraint. effective_sample_size: of the complete particles. num_nodes: prefixes computed. num_checks, num_masks:
    tokens that the constraint checked, and masks that it filled, to draw tokens; `is_unlikely` may fill more.
    """

    def __init__(self, constraint: ParticleConstraint, num_particles: int, seed: int) -> None:
        self.num_particles = num_particles
        self.value: Path | None = None
        self.log_mass = self.logprob = 0.0
        self.effective_sample_size = float(num_particles)
        self.num_resamplings = self.num_nodes = self.num_checks = self.num_masks = 0
        self._constraint, self._seed, self._step = constraint, seed, 0
        self._sampled: list[_Particles] = []
        self.nodes: list[ParticleNode] = []
        self._waiting: set[ParticleNode] = set()
        self._finish_step([_Particles((), num_particles, 0.0, 0.0, constraint.is_end(()))])

    @property
    def num_waiting(self) -> int:
        """Nodes whose probabilities are still to be fed."""
        return len(self._waiting)

    def feed(self, node: ParticleNode, rows: Sequence[FloatArray]) -> None:
        """Takes the probabilities [V] after the node's path and after each of its forced tokens."""
        self._waiting.remove(node)
        self.num_nodes += 1
        forced = [float(row[token]) for row, token in zip(rows, node.forced, strict=False)]
        if not all(forced):
            return
        log_forced = math.fsum(map(math.log, forced))
        tokens, logprob, log_weight = node.tokens, node.logprob + log_forced, node.log_weight + log_forced
        if node.forced and self._constraint.is_end(tokens):
            self._sampled.append(_Particles(tokens, node.num_particles, log_weight, logprob, True, node))
            return
        self._draw(node, _Particles(tokens, node.num_particles, log_weight, logprob, False, node), rows[-1])

    def _draw(self, node: ParticleNode, before: _Particles, row: FloatArray) -> None:
        path, constraint, num_draws = before.path, self._constraint, 0

        def uniform() -> float:
            nonlocal num_draws
            num_draws += 1
            return self._uniform(node.first, num_draws)

        draws = TokenRejection(
            row, lambda token: constraint.accepts(path, token), lambda: constraint.allowed(path), uniform
        )
        counts: dict[int, int] = defaultdict(int)
        for token in draws.draw(node.num_particles):
            counts[token] += 1
        log_mass = math.log(draws.estimate_mass()) if counts else -math.inf
        self.num_checks += draws.num_checks
        self.num_masks += draws.num_masks
        for token, num in sorted(counts.items()):
            after = (*path, token)
            is_finished = constraint.is_end(after)
            if not is_finished and constraint.is_dead(after):
                continue
            logprob = before.logprob + math.log(float(row[token]))
            self._sampled.append(_Particles(after, num, before.log_weight + log_mass, logprob, is_finished, node))

    def advance(self) -> None:
        """Ends a step whose nodes were all fed: resamples, and sets the next `nodes` or the `value`.

        Raises NoParticleLeft.
        """
        assert not self._waiting
        self._step += 1
        sampled, self._sampled = self._sampled, []
        self._finish_step(sorted(sampled, key=lambda particles: particles.path))

    def _finish_step(self, sampled: list[_Particles]) -> None:
        if not sampled:
            raise NoParticleLeft
        if all(particles.is_finished for particles in sampled):
            self._pick(sampled)
            return
        sampled = self._thin(self._thin_unlikely(sampled))
        if self._effective_sample_size(sampled) < RESAMPLE_BELOW * self.num_particles:
            sampled = self._resample(sampled)
        self.nodes, first = [], 0
        for particles in sampled:
            if particles.is_finished:
                self._sampled.append(particles)
            else:
                self.nodes.append(self._node(particles, first))
            first += particles.num
        if not self.nodes:
            self._sampled.clear()
            self._pick(sampled)
            return
        self._waiting = set(self.nodes)

    def _node(self, particles: _Particles, first: int) -> ParticleNode:
        forced = self._constraint.forced(particles.path)
        return ParticleNode(
            particles.path, forced, first, particles.num, particles.log_weight, particles.logprob, particles.parent
        )

    def _thin_unlikely(self, sampled: list[_Particles]) -> list[_Particles]:
        """Ends most particles whose continuation is unlikely, where there are others; see `_thin`."""
        if len(sampled) == 1:  # to ask about it may cost a mask
            return sampled
        flags = [not old.is_finished and self._constraint.is_unlikely(old.path) for old in sampled]
        if all(flags):
            return sampled
        kept = []
        for index, (old, is_unlikely) in enumerate(zip(sampled, flags, strict=True)):
            if is_unlikely:
                num = int(old.num * UNLIKELY_LIVE_ON + self._uniform(_THIN, MAX_PARTICLES + index))
                log_weight = old.log_weight - math.log(UNLIKELY_LIVE_ON)
                old = _Particles(old.path, num, log_weight, old.logprob, False, old.parent)
            if old.num:
                kept.append(old)
        return kept

    def _thin(self, sampled: list[_Particles]) -> list[_Particles]:
        """Ends most particles of negligible weight w, so that their prefixes need not be computed.

        Those below the threshold c live on with probability w / c and then have the weight c, so expected weights stay.
        """
        weights, log_scale = _weights(sampled)
        log_threshold = log_scale + math.log(THIN_BELOW * weights.sum() / self.num_particles)
        kept = []
        for index, old in enumerate(sampled):
            if old.log_weight < log_threshold:
                expected = old.num * math.exp(old.log_weight - log_threshold)
                num = int(expected + self._uniform(_THIN, index))
                old = _Particles(old.path, num, log_threshold, old.logprob, old.is_finished, old.parent)
            if old.num:
                kept.append(old)
        return kept

    def _resample(self, sampled: list[_Particles]) -> list[_Particles]:
        """Systematic resampling: the expected number of each particle is in proportion to its weight."""
        weights, log_scale = _weights(sampled)
        self.log_mass += log_scale + math.log(weights.sum() / self.num_particles)
        self.num_resamplings += 1
        offset = self._uniform(_RESAMPLE, 0)
        targets = (offset + np.arange(self.num_particles)) / self.num_particles * weights.sum()
        chosen = np.minimum(weights.cumsum().searchsorted(targets, side="right"), len(sampled) - 1)
        counts = np.bincount(chosen, minlength=len(sampled))
        return [
            _Particles(old.path, int(num), 0.0, old.logprob, old.is_finished, old.parent)
            for old, num in zip(sampled, counts, strict=True)
            if num
        ]

    def _pick(self, sampled: list[_Particles]) -> None:
        """Draws the value by weight."""
        weights, log_scale = _weights(sampled)
        self.log_mass += log_scale + math.log(weights.sum() / self.num_particles)
        self.effective_sample_size = self._effective_sample_size(sampled)
        target = self._uniform(_PICK, 0) * weights.sum()
        index = min(int(weights.cumsum().searchsorted(target, side="right")), len(sampled) - 1)
        self.nodes, self.value, self.logprob = [], sampled[index].path, sampled[index].logprob

    def _effective_sample_size(self, sampled: list[_Particles]) -> float:
        weights, _ = _weights(sampled)
        squares = sum(weight * weight / particles.num for weight, particles in zip(weights, sampled, strict=True))
        return float(weights.sum() ** 2 / squares)

    def _uniform(self, stream: int, index: int) -> float:
        return hash_uniform(self._seed, (self._step * _STREAMS + stream) * _MAX_DRAWS + index)


def _weights(sampled: list[_Particles]) -> tuple[Float64Array, float]:
    """The sum of the weights of equal particles, divided by exp(scale), and the scale."""
    logs = np.array([particles.log_weight + math.log(particles.num) for particles in sampled])
    scale = float(logs.max())
    return np.exp(logs - scale), scale
