"""Particles on small vocabularies: drawn texts and weights against the enumerated distribution of the valid ones."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_languages import Language, distance

from plait.runtime.sampling.particle_filter import NoParticleLeft, ParticleFilter, _Particles
from plait.runtime.sampling.token_rejection import MAX_REJECTED, TokenRejection

TEXTS = [(1, 1, 1), (1, 2), (2,), (2, 2, 3, 3, 1), (3, 1, 2), (3, 3), (3, 3, 3), (4, 4, 4, 4)]
SMALL = Language(TEXTS, 6, seed=2)
FORCED = Language(TEXTS, 6, seed=2)
FORCED.forces = True
GUESSED = Language(TEXTS, 6, seed=2)
GUESSED.unlikely = {(1,), (2,), (3, 1), (2, 2, 3)}  # wrong guesses: such texts have a good part of the probability


def is_near(mean, spread, count, expected, sigmas=4.5):
    return abs(mean - expected) <= sigmas * spread / math.sqrt(count) + 1e-12


# -- tokens of one prefix ---------------------------------------------------------------------------


@st.composite
def cases(draw):
    """Probabilities [V], which tokens are admissible (at least one), and how many tokens are drawn."""
    width = draw(st.integers(2, 40))
    generator = np.random.default_rng(draw(st.integers(0, 10**6)))
    weights = np.exp(generator.normal(size=width) * draw(st.sampled_from([0.0, 1.0, 4.0])))
    weights *= generator.random(width) < draw(st.sampled_from([0.5, 1.0]))
    admissible = generator.random(width) < draw(st.sampled_from([0.05, 0.5, 0.95]))
    chosen = generator.integers(width)
    weights[chosen], admissible[chosen] = max(weights[chosen], 0.05), True
    return weights / weights.sum(), admissible, draw(st.integers(1, 5))


def rejection(probabilities, admissible, generator):
    return TokenRejection(probabilities, lambda token: bool(admissible[token]), lambda: admissible, generator.random)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(cases())
def test_drawn_tokens_are_properly_weighted(case):
    probabilities, admissible, count = case
    generator, parts, num_runs = np.random.default_rng(7), [], 400
    for _ in range(num_runs):
        draws = rejection(probabilities, admissible, generator)
        tokens = draws.draw(count)
        assert len(tokens) == count and admissible[tokens].all() and probabilities[tokens].all()
        mass = draws.estimate_mass()
        assert 0 < mass <= 1 + 1e-9 and draws.num_checks <= MAX_REJECTED + 3 * count + 4 and draws.num_masks <= 1
        parts.append(np.bincount(tokens, minlength=len(probabilities)) / count * mass)
    rows = np.array(parts)
    for token, expected in enumerate(probabilities * admissible):
        seen = rows[:, token]
        rare = 6 / num_runs if not seen.any() or expected * num_runs < 20 else 0.0
        assert abs(seen.mean() - expected) <= 5.5 * seen.std() / math.sqrt(num_runs) + rare + 1e-9
    total = rows.sum(axis=1)
    assert is_near(total.mean(), total.std(), num_runs, (probabilities * admissible).sum(), 6) or total.std() < 0.01


def test_nothing_is_drawn_where_nothing_is_admissible():
    draws = rejection(np.array([0.5, 0.0, 0.5, 0.0]), np.array([False, True, False, True]), np.random.default_rng(1))
    assert draws.draw(3) == []
    many = rejection(np.full(50, 0.02), np.zeros(50, bool), np.random.default_rng(1))
    assert many.draw(3) == [] and many.num_masks == 1


def test_a_likely_admissible_token_costs_few_checks():
    probabilities = np.append(np.full(1000, 1e-5), 0.99)
    draws = rejection(probabilities, np.ones(1001, bool), np.random.default_rng(1))
    assert set(draws.draw(8)) == {1000} and draws.estimate_mass() == pytest.approx(1.0)
    assert draws.num_checks <= 2 and not draws.num_masks


# -- texts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("language", "num_particles"), [(SMALL, 1), (SMALL, 4), (SMALL, 16), (FORCED, 1), (FORCED, 8), (GUESSED, 8)]
)
def test_weights_are_unbiased_for_every_text(language, num_particles):
    expected, mass = language.enumerated()
    samples = [language.sample_particles(num_particles, seed) for seed in range(600)]
    weights = np.array([math.exp(sample.log_mass) for sample in samples])
    assert is_near(weights.mean(), weights.std(), 600, mass)
    for text, share in expected.items():
        parts = np.where([sample.value == text for sample in samples], weights, 0.0)
        if share * 600 > 20:
            assert is_near(parts.mean(), parts.std(), 600, share * mass), text
    for sample in samples[:50]:
        assert math.exp(sample.logprob) / mass == pytest.approx(expected[sample.value])
    assert any(sample.num_resamplings for sample in samples) == (num_particles > 1)


def test_particles_of_negligible_weight_end_and_their_expected_weights_stay():
    weights = np.array([1.0, 0.3, 0.02, 0.004, 1e-9])
    nums = np.array([3, 2, 4, 5, 2])
    sums, num_kept = np.zeros(5), []
    for seed in range(3000):
        particles = ParticleFilter(SMALL, 16, seed)
        drawn = [
            _Particles((index,), int(num), math.log(weight), 0.0, False)
            for index, (num, weight) in enumerate(zip(nums, weights, strict=True))
        ]
        kept = particles._thin(drawn)
        assert [old.num for old in kept[:2]] == [3, 2], "the others are as they were"
        for old in kept:
            sums[old.path[0]] += old.num * math.exp(old.log_weight)
        num_kept.append(len(kept))
    expected = weights * nums
    threshold = 0.1 * expected.sum() / 16
    assert weights[2] < threshold < weights[1], "the example has no negligible particle"
    spread = np.sqrt(np.maximum(expected, threshold) * threshold / 3000)
    assert (abs(sums / 3000 - expected)[:4] <= 4 * spread[:4]).all() and sums[4] <= 3 * threshold
    assert np.mean(num_kept) < 4.5


def test_a_single_prefix_is_never_asked_whether_it_is_unlikely(monkeypatch):
    asked = []
    monkeypatch.setattr(Language, "is_unlikely", lambda self, path: asked.append(path) or False)
    SMALL.sample_particles(1, seed=3)
    assert not asked
    SMALL.sample_particles(8, seed=3)
    assert asked


def test_the_distribution_tends_to_the_models_own():
    expected, _ = SMALL.enumerated()
    masked = distance(SMALL.masked_distribution(), expected)
    distances = [
        distance(Counter(SMALL.sample_particles(count, seed).value for seed in range(800)), expected)
        for count in (1, 8, 64)
    ]
    assert abs(distances[0] - masked) < 0.08, "one particle is a sample under the mask"
    assert all(later < before * 0.7 for before, later in itertools.pairwise(distances))
    assert distances[-1] < 0.1 < masked


def test_a_seed_gives_the_same_value_in_any_order_of_the_nodes():
    for seed in range(40):
        first, other = SMALL.sample_particles(8, seed), ParticleFilter(SMALL, 8, seed)
        while other.value is None:
            for node in other.nodes:
                other.feed(node, [SMALL.probabilities(node.path)])
            other.advance()
        assert (other.value, other.log_mass) == (first.value, first.log_mass)
    assert len({SMALL.sample_particles(8, seed).value for seed in range(40)}) > 2


def test_prefixes_without_a_valid_end_are_left():
    class Limited(Language):
        def is_dead(self, path):
            return len(path) == 2 and path not in self.texts

    language = Limited([(1, 1, 1), (1, 2), (2,)], 4, seed=3)
    weights = []
    for seed in range(300):
        try:
            sample = language.sample_particles(4, seed)
        except NoParticleLeft:
            weights.append(0.0)
            continue
        assert sample.value == (2, 0)
        weights.append(math.exp(sample.log_mass))
    mass = language.probabilities(())[2] * language.probabilities((2,))[0]
    assert is_near(np.mean(weights), np.std(weights), 300, mass)


def test_a_constraint_without_a_text_ends_with_an_error():
    impossible = Language([(1,)], 4)
    impossible._rows[()] = np.array([0.5, 0.0, 0.5, 0.0])
    with pytest.raises(NoParticleLeft):
        impossible.sample_particles(8, 1)
