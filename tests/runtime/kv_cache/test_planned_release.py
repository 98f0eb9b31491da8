"""What a release would make available, against the release itself."""

from __future__ import annotations

from cached_sequences import NAMESPACE, publish, texts
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.runtime.kv_cache.planned_release import PlannedRelease
from plait.runtime.kv_cache.prefix_cache import PrefixCache
from plait.runtime.kv_cache.sequence import Sequence


def running(cache, tokens, is_published):
    seq = Sequence(NAMESPACE, tokens)
    cache.activate(seq, 0)
    cache.extend_from_cache(seq, len(seq) - 1)
    assert cache.allocate(seq, len(seq) - seq.num_computed)
    if is_published:
        cache.publish(seq)
    return seq


def shared_or_needed(cache, seq, planned=None):
    """(pages that the sequence finds locked, those that are available)."""
    num_available = cache.num_available + (planned.num_pages if planned is not None else 0)
    return cache.num_locked_match(seq, len(seq) - 1, planned), num_available


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(texts, st.booleans(), st.booleans()), min_size=1, max_size=8), texts, texts)
def test_a_planned_release_counts_what_the_release_gives(sequences, cached, waiting_text):
    """Sequences that share prefixes with each other, with the cache and with the one that waits, in every state."""
    cache = PrefixCache(400)
    cache.free(publish(cache, cached))
    alive = [(running(cache, tokens, is_published), is_victim) for tokens, is_published, is_victim in sequences]
    waiting, planned = Sequence(NAMESPACE, waiting_text), PlannedRelease()
    victims = [seq for seq, is_victim in alive if is_victim]
    for seq in victims:
        planned.add(seq)
    expected = shared_or_needed(cache, waiting, planned)
    for seq in victims:
        cache.release(seq)
    assert shared_or_needed(cache, waiting) == expected
    cache.check_integrity([seq for seq, _ in alive])


def test_a_prefix_that_a_victim_shares_is_not_there_twice():
    cache = PrefixCache(100)
    planned = PlannedRelease()
    planned.add(running(cache, [1, 2, 3, 4], True))
    assert shared_or_needed(cache, Sequence(NAMESPACE, [1, 2, 3, 9]), planned) == (0, 100)


def test_two_victims_give_up_the_prefix_that_only_they_share():
    cache = PrefixCache(100)
    planned = PlannedRelease()
    for tokens in ([1, 2, 3, 4], [1, 2, 3, 5]):
        planned.add(running(cache, tokens, True))
    assert planned.num_pages == 5 and cache.num_available == 95
