"""Exact sampling on small vocabularies: drawn texts against the enumerated distribution of the admissible ones."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from small_languages import END, Language, distance

from plait.runtime.sampling import exact_search, prefix_tree
from plait.runtime.sampling.exact_search import ExactSearch, NothingAdmissible, SearchLimitReached
from plait.runtime.sampling.prefix_tree import AllowedTokens, PrefixTree, PrefixTrees, TokenDistribution, TokensLeft

NUM_DRAWS = 20_000


SMALL = Language([(1, 1, 1), (1, 2), (2,), (2, 2, 3, 3, 1), (3, 1, 2), (3, 3), (3, 3, 3), (4, 4, 4, 4)], 6, seed=2)
WIDE = Language([(1, 7), (2,), *((3, token) for token in range(1, 100)), (4, 150, 150)], 200, seed=4)
WIDE.end_logit = 4.0


@pytest.mark.parametrize(
    ("language", "is_shared", "num_draws"), [(SMALL, True, NUM_DRAWS), (SMALL, False, 1000), (WIDE, True, 1500)]
)
def test_draws_have_the_models_distribution_and_masking_does_not(language, is_shared, num_draws):
    expected, _ = language.enumerated()
    shared = PrefixTree()
    drawn = Counter(language.sample(shared if is_shared else PrefixTree(), seed).value for seed in range(num_draws))
    assert set(drawn) <= set(expected)
    noise = sum(math.sqrt(p * (1 - p) / num_draws) for p in expected.values()) * 0.4  # expected of a correct sampler
    assert distance(drawn, expected) <= (0.02 if num_draws == NUM_DRAWS else 0.02 + noise)
    assert distance(language.masked_distribution(), expected) > 0.1, "the example does not tell the two apart"


def test_a_seed_gives_the_same_text_whatever_the_tree_knows():
    shared, results = PrefixTree(), []
    for seed in range(200):
        alone, beside = WIDE.sample(PrefixTree(), seed), WIDE.sample(shared, seed)
        assert alone.value == beside.value and alone.logprob == beside.logprob
        results.append((alone.num_model_steps, beside.num_model_steps))
    steps_alone, steps_beside = (sum(column) for column in zip(*results, strict=True))
    assert steps_beside < steps_alone / 4


def test_a_seed_gives_the_same_text_however_many_prefixes_are_computed_at_once_and_in_which_order():
    for language in (SMALL, WIDE):
        for seed in range(150):
            one = language.sample(PrefixTree(), seed, max_pending=1)
            for max_pending, order in ((4, iter), (4, reversed), (16, reversed)):
                several = language.sample(PrefixTree(), seed, max_pending, order)
                assert (several.value, several.logprob) == (one.value, one.logprob)


def test_several_prefixes_are_named_only_after_losses():
    search = ExactSearch(PrefixTree(), SMALL, seed=1, max_pending=4)
    assert search.advance() == [()] and search.advance() == []
    likely = Language([(1, 2, 3)], 6, seed=2)
    for path, token in {(): 1, (1,): 2, (1, 2): 3, (1, 2, 3): END}.items():
        likely._rows[path] = np.eye(6)[token]
    assert likely.sample(PrefixTree(), 1, max_pending=4).num_model_steps == 4, "nothing was lost"
    most = 0
    for seed in range(50):
        search = ExactSearch(PrefixTree(), SMALL, seed, max_pending=4)
        search.advance()
        while search.value is None:
            most = max(most, len(search.pending))
            path = next(reversed(search.pending))
            search.feed(path, AllowedTokens.of(SMALL.probabilities(path), SMALL.allowed(path)))
            search.advance()
    assert most == 4


def test_the_known_bounds_close_around_the_constraints_probability():
    _, mass = SMALL.enumerated()
    tree, widths = PrefixTree(), []
    for seed in range(500):
        SMALL.sample(tree, seed)
        assert tree.found_mass <= mass + 1e-9 and tree.root.mass >= mass - 1e-9
        widths.append(tree.root.mass - tree.found_mass)
    assert all(later <= width + 1e-12 for width, later in itertools.pairwise(widths))
    assert widths[-1] < widths[0] / 20


def test_logprob_is_the_texts_own():
    expected, mass = SMALL.enumerated()
    for seed in range(20):
        sample = SMALL.sample(PrefixTree(), seed)
        assert math.exp(sample.logprob) / mass == pytest.approx(expected[sample.value])


def test_a_tree_without_room_changes_nothing_but_the_steps(monkeypatch):
    expected = [WIDE.sample(PrefixTree(), seed).value for seed in range(50)]
    monkeypatch.setattr(prefix_tree, "MAX_TREE_BYTES", 4000)
    tree = PrefixTree()
    assert [WIDE.sample(tree, seed).value for seed in range(50)] == expected
    assert tree.num_bytes <= 4000
    _, mass = WIDE.enumerated()
    assert tree.found_mass <= mass <= tree.root.mass


def test_an_impossible_constraint_ends_with_an_error():
    impossible = Language([(1,)], 4)
    impossible._rows[()] = np.array([0.5, 0.0, 0.5, 0.0])
    with pytest.raises(NothingAdmissible):
        impossible.sample(PrefixTree(), 1)


def test_an_endless_search_ends_with_an_error(monkeypatch):
    monkeypatch.setattr("plait.runtime.sampling.exact_search.MAX_MODEL_STEPS", 40)

    class Endless(Language):
        def allowed(self, path):
            return np.array([False, True, True])

    with pytest.raises(SearchLimitReached):
        Endless([(1,)], 3).sample(PrefixTree(), 1)


class Long(Language):
    """Texts of 60 tokens 1 or 2, each of which the model writes with a probability of 0.02."""

    def is_end(self, path):
        return len(path) == 60

    def allowed(self, path):
        return np.array([False, True, True, False])

    def probabilities(self, path):
        return np.array([0.0, 0.01, 0.01, 0.98])


@pytest.mark.parametrize("max_pending", [1, 4])
def test_a_search_that_would_hardly_end_is_given_up_early(max_pending):
    language, sizes, steps = Long([(1,)], 4), list[int](), list[int]()

    class Recorded(PrefixTree):
        def keep(self, node, distribution):
            steps.append(1)
            super().keep(node, distribution)

    def order(pending):
        sizes.append(len(pending))
        return iter(pending)

    with pytest.raises(SearchLimitReached):
        language.sample(Recorded(), 1, max_pending, order)
    assert len(steps) < exact_search.PROBED_FROM + 100 and max(sizes) == max(3, max_pending)


class Foreseen(Long):
    """Texts of `length` tokens 1 to 8, each of a probability of 0.1."""

    length = 300

    def is_end(self, path):
        return len(path) == self.length

    def num_missing(self, path):
        return self.length - len(path)

    def allowed(self, path):
        return np.arange(10) % 9 > 0

    def probabilities(self, path):
        return np.array([0.0, *[0.1] * 8, 0.2])


def test_a_search_for_long_texts_is_given_up_by_their_first_tokens():
    language, fed = Foreseen([(1,)], 10), []
    language.allowed = lambda path: fed.append(path) or np.arange(10) % 9 > 0
    with pytest.raises(SearchLimitReached):
        language.sample(PrefixTree(), 1, order=iter)
    assert max(map(len, fed)) <= 24, "sixty without what is foreseen"


def test_a_search_for_texts_that_end_soon_is_not_given_up_by_their_first_tokens(monkeypatch):
    monkeypatch.setattr(exact_search, "PROBED_FROM", 1)
    monkeypatch.setattr(Foreseen, "length", 20)
    for seed in range(20):
        assert len(Foreseen([(1,)], 10).sample(PrefixTree(), seed).value) == 20


class Unlikely(Language):
    """Texts of 12 tokens that begin with ten of a probability of 0.01 each; the last two are 1 or 2."""

    def is_end(self, path):
        return len(path) == 12

    def allowed(self, path):
        return np.array([False, True, len(path) >= 10, False])

    def probabilities(self, path):
        return np.array([0.0, 0.01, 0.01, 0.98]) if len(path) < 10 else np.array([0.0, 0.5, 0.5, 0.0])


@pytest.mark.parametrize("max_pending", [1, 4])
def test_a_search_for_unlikely_texts_that_ends_soon_is_not_given_up(monkeypatch, max_pending):
    monkeypatch.setattr(exact_search, "PROBED_FROM", 1)
    for seed in range(20):
        search = Unlikely([(1,)], 4).sample(PrefixTree(), seed, max_pending)
        assert search.value[:10] == (1,) * 10 and search.logprob < -45
        assert search.num_model_steps < 80


def test_probes_change_no_value(monkeypatch):
    rare = Language([(1, 1, 1), (2, 2), (3, 1, 2, 3)], 5, seed=8)
    rare.spread = 3.0
    expected = [rare.sample(PrefixTree(), seed).value for seed in range(200)]
    monkeypatch.setattr(exact_search, "PROBED_FROM", 1)
    for max_pending in (1, 4):
        assert [rare.sample(PrefixTree(), seed, max_pending).value for seed in range(200)] == expected


def test_dead_prefixes_are_left():
    class Limited(Language):
        def is_dead(self, path):
            return len(path) == 3 and path[-1] != END

    language = Limited([(1, 1, 1), (1, 2), (2,)], 4, seed=3)
    possible = {(1, 2, END), (2, END)}
    assert {language.sample(PrefixTree(), seed).value for seed in range(100)} == possible


def test_tokens_are_drawn_by_the_cumulative_distribution():
    weights = np.random.default_rng(0).random(500)
    weights[::3] = 0.0
    weights /= 2 * weights.sum()
    allowed = AllowedTokens.of(weights, weights > 0)
    distribution = TokenDistribution(allowed)
    assert distribution.allowed_mass == pytest.approx(0.5)
    in_tail = int(np.setdiff1d(np.flatnonzero(weights), distribution.ids)[0])

    def left():
        tokens = TokensLeft(distribution)
        tokens.take_top(0)
        tokens.take_from_tail(in_tail, float(weights[in_tail]))
        return tokens

    counts = Counter(distribution.draw(left(), (i + 0.5) / 5000, allowed)[0] for i in range(5000))
    expected = np.where(np.isin(np.arange(500), [distribution.ids[0], in_tail]), 0.0, weights)
    assert left().mass == pytest.approx(expected.sum())
    assert all(abs(counts[token] - 5000 * expected[token] / expected.sum()) <= 1.01 for token in range(500))
    assert distribution.draw(left(), 0.999, None) is None and distribution.draw(left(), 0.0, None) is not None


def test_trees_are_bounded_in_number_and_by_tenant():
    trees = PrefixTrees()
    first = trees.get("a", 0)
    for key in range(100):
        trees.get("b", key)
    assert trees.get("a", 0) is first and len(trees) == 1 + prefix_tree.MAX_TREES_OF_TENANT
    for tenant in range(100):
        trees.get(str(tenant), 0)
    assert len(trees) <= prefix_tree.MAX_TREES
