"""Where a prompt parts from the cache and why, against a search over all texts that were cached."""

from __future__ import annotations

import pytest
from cached_sequences import NAMESPACE, publish, texts
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.runtime.kv_cache import radix_tree
from plait.runtime.kv_cache.prefix_cache import PrefixCache
from plait.runtime.kv_cache.radix_node import CacheNamespace
from plait.runtime.kv_cache.sequence import Sequence

OTHER = ("", "salt")


def miss(cache, tokens, limit, namespace=NAMESPACE):
    """(position, reason) of a new sequence, which leaves the cache's texts as they were."""
    seq = Sequence(namespace, tokens)
    cache.activate(seq, limit)
    cache.extend_from_cache(seq, limit)
    found = seq.num_computed, cache.miss_reason(seq, limit)
    cache.free(seq)
    return found


def common_length(first, second):
    return next(
        (i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]),
        min(len(first), len(second)),
    )


def expected(cached, tokens, limit):
    """The same from the list of cached texts, without evictions."""
    position = max((common_length(text, tokens[:limit]) for text in cached), default=0)
    if position >= limit:
        return position, "outputs"
    if not position:
        return position, "new_prefix"
    goes_on = any(text[:position] == tokens[:position] and len(text) > position for text in cached)
    return position, "diverged" if goes_on else "extended"


@settings(max_examples=300, deadline=None)
@given(st.lists(texts, max_size=8), st.lists(texts, max_size=4), texts, st.data())
def test_it_equals_a_search_over_the_texts_of_its_namespace(cached, others, tokens, data):
    cache, limit = PrefixCache(300), data.draw(st.integers(0, len(tokens)))
    sequences = [publish(cache, text) for text in cached] + [publish(cache, text, OTHER) for text in others]
    assert miss(cache, tokens, limit) == expected(cached, tokens, limit)
    assert miss(cache, tokens, limit, OTHER) == expected(others, tokens, limit)
    assert miss(cache, tokens, limit, CacheNamespace("tenant")) == expected([], tokens, limit)
    cache.check_integrity(sequences)


def test_evicted_texts_are_told_from_new_ones_until_they_are_cached_again():
    cache = PrefixCache(100)
    publish(cache, [1, 1])  # its pin keeps the root
    for tokens in ([1, 1, 2, 2, 2], [1, 1, 3, 3]):
        cache.free(publish(cache, tokens))
    cache.pool.release(cache.tree.evict(3))
    assert miss(cache, [1, 1, 2, 2, 2], 5) == (2, "evicted")
    assert miss(cache, [1, 1, 3, 4], 4) == (3, "diverged")
    assert miss(cache, [1, 1, 4], 3) == (2, "diverged")
    assert miss(cache, [5], 1) == (0, "new_prefix")
    cache.free(publish(cache, [1, 1, 2, 2, 2]))
    assert miss(cache, [1, 1, 2, 2, 2, 5], 6) == (5, "extended")
    assert miss(cache, [1, 1, 2, 4], 4) == (3, "diverged")


@pytest.mark.parametrize("limit", [1, 4])
def test_a_node_remembers_a_bounded_number_of_evictions(monkeypatch, limit):
    monkeypatch.setattr(radix_tree, "MAX_EVICTED", limit)
    cache = PrefixCache(100)
    publish(cache, [1])
    for token in range(2, 12):
        cache.free(publish(cache, [1, token]))
    cache.pool.release(cache.tree.evict(10))
    reasons = [miss(cache, [1, token], 2) for token in range(2, 12)]
    assert reasons == [(1, "evicted")] * limit + [(1, "extended")] * (10 - limit)


def test_a_step_that_failed_evicts_nothing():
    cache = PrefixCache(100)
    seq = publish(cache, [1, 1])
    other = Sequence(NAMESPACE, [1, 1, 2])
    cache.activate(other, 3)
    cache.extend_from_cache(other, 3)
    assert cache.allocate(other, 1)
    node = cache.publish_early(other)
    cache.discard(other, 2, [node])
    cache.rollback_insert(node)
    assert miss(cache, [1, 1, 2], 3) == (2, "extended")
    cache.check_integrity([seq, other])
