"""Small languages and random models of them, whose distributions can be enumerated."""

from __future__ import annotations

import math

import numpy as np

from plait.runtime.sampling.exact_search import ExactSearch
from plait.runtime.sampling.particle_filter import ParticleFilter
from plait.runtime.sampling.prefix_tree import AllowedTokens

END = 0


class Language:
    """A model of random probabilities over `width` tokens, and the admissible texts, each closed by END."""

    end_logit, spread, forces, unlikely = 0.0, 1.0, False, ()

    def __init__(self, texts, width, seed=1):
        self.texts, self.width, self.seed = [(*text, END) for text in texts], width, seed
        self.prefixes = {text[:end] for text in self.texts for end in range(len(text) + 1)}
        self._rows = {}

    def is_end(self, path):
        return path in self.texts

    def is_dead(self, path):
        return False

    def num_missing(self, path):
        return 0.0

    def accepts(self, path, token):
        return (*path, token) in self.prefixes

    def forced(self, path):
        """Up to two tokens that can only follow, if the example has `forces`."""
        tokens = ()
        while self.forces and len(tokens) < 2:
            following = [token for token in range(self.width) if (*path, *tokens, token) in self.prefixes]
            if len(following) != 1 or following == [END]:
                break
            tokens += (following[0],)
        return tokens

    def is_unlikely(self, path):
        return path in self.unlikely

    def probabilities(self, path):
        if path not in self._rows:
            noise = np.random.default_rng([self.seed, *path]).gumbel(size=self.width) * self.spread
            noise[END] += self.end_logit
            self._rows[path] = np.exp(noise) / np.exp(noise).sum()
        return self._rows[path]

    def allowed(self, path):
        return np.array([(*path, token) in self.prefixes for token in range(self.width)], bool)

    def enumerated(self):
        mass = {text: math.prod(self.probabilities(text[:i])[t] for i, t in enumerate(text)) for text in self.texts}
        return {text: probability / sum(mass.values()) for text, probability in mass.items()}, sum(mass.values())

    def sample(self, tree, seed, max_pending=4, order=reversed):
        """`order`: of the prefixes that are pending at once; only the first one is fed before the next step."""
        search = ExactSearch(tree, self, seed, max_pending)
        search.advance()
        while search.value is None:
            path = next(iter(order(search.pending)))
            search.feed(path, AllowedTokens.of(self.probabilities(path), self.allowed(path)))
            search.advance()
        return search

    def sample_particles(self, num_particles, seed):
        particles = ParticleFilter(self, num_particles, seed)
        while particles.value is None:
            for node in reversed(particles.nodes):
                prefixes = [node.tokens[: len(node.path) + i] for i in range(1 + len(node.forced))]
                particles.feed(node, [self.probabilities(prefix) for prefix in prefixes])
            particles.advance()
        return particles

    def masked_distribution(self):
        """The distribution of plain masking, which renormalizes at each token."""
        found = {}
        for text in self.texts:
            found[text] = 1.0
            for i, token in enumerate(text):
                row = self.probabilities(text[:i]) * self.allowed(text[:i])
                found[text] *= row[token] / row.sum()
        return found


def distance(drawn, expected):
    """Total variation."""
    total = sum(drawn.values())
    return sum(abs(drawn.get(text, 0) / total - probability) for text, probability in expected.items()) / 2
