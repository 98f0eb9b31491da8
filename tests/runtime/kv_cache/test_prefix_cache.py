"""The prefix cache: random operations on sequences, private pages, roots and the integrity check."""

from __future__ import annotations

import pytest
from cached_sequences import NAMESPACE, publish, texts
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.runtime.kv_cache.eviction import EvictionQueue
from plait.runtime.kv_cache.prefix_cache import PrefixCache
from plait.runtime.kv_cache.sequence import Sequence


def test_roots_of_inactive_tenants_are_removed():
    cache = PrefixCache(10)
    for tenant in range(50):
        cache.free(publish(cache, [1, 2, 3], (str(tenant), "")))
        cache.flush()
    assert list(cache.tree.nodes()) == []
    assert cache.counts() == (10, 0, 0)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_operations_on_sequences_lose_no_page(data):
    """A small pool whose pages are tagged with the text that they hold."""
    cache, alive, content = PrefixCache(40), [], {}

    def check():
        cache.check_integrity(alive)
        for seq in alive:
            tokens = seq.tokens.view().tolist()
            for i, page in enumerate(seq.pages.view().tolist()):
                assert content[page] == tuple(tokens[: i + 1]), "a page holds the KV of other tokens"

    for _ in range(data.draw(st.integers(1, 25))):
        kinds = ["new"] + (["extend", "idle", "fork", "free", "cut", "discard"] if alive else [])
        action = data.draw(st.sampled_from(kinds))
        seq = alive[data.draw(st.integers(0, len(alive) - 1))] if alive else None
        if action == "new":
            alive.append(Sequence(NAMESPACE, data.draw(texts)))
        elif action == "extend":
            cache.activate(seq, data.draw(st.integers(0, len(seq))))
            seq.tokens.extend(data.draw(texts))
            cache.extend_from_cache(seq, len(seq) - 1)
            start = seq.num_computed
            if cache.allocate(seq, len(seq) - start):
                for i in range(start, len(seq)):
                    content[int(seq.pages.view()[i])] = tuple(seq.tokens.view()[: i + 1].tolist())
                if data.draw(st.booleans()):
                    cache.publish_early(seq)
            else:
                cache.release(seq)
        elif action == "idle":
            cache.release(seq)
        elif action == "fork":
            alive.append(cache.fork(seq))
        elif action == "cut" and seq.is_locked and seq.num_in_tree < seq.num_computed:
            keep = data.draw(st.integers(seq.num_in_tree, seq.num_computed))
            seq.tokens.truncate(max(keep, 1))
            cache.truncate(seq, keep)
        elif action == "discard":
            num_written = data.draw(st.integers(0, seq.num_computed if seq.is_locked else 0))
            is_below = seq.node is not None and data.draw(st.booleans())
            if seq.is_locked or is_below:
                cache.discard(seq, num_written, [seq.node] if is_below else [])
                assert seq.num_computed == (0 if is_below else num_written)
        elif action == "free":
            cache.free(seq)
            alive.remove(seq)
        check()
    for seq in alive:
        cache.free(seq)
    cache.flush()
    assert cache.counts() == (40, 0, 0)


@pytest.mark.parametrize(
    ("cached_text", "num_replaced"), [([], 0), ([1, 2], 0), ([1, 2, 9, 9], 0), ([1, 2, 3], 3), ([1, 2, 3, 4], 3)]
)
def test_private_pages_are_replaced_if_the_tree_holds_the_same_tokens(cached_text, num_replaced):
    """Tokens that the tree lacks stay private, because the cache cannot know whether their KV is written yet."""
    cache = PrefixCache(20)
    seq = Sequence(NAMESPACE, [1, 2, 3, 4, 5])
    cache.activate(seq, 0)
    assert cache.allocate(seq, 3)
    private = seq.pages.view().tolist()
    if cached_text:
        publish(cache, cached_text)
    free = cache.pool.num_free
    cache.extend_from_cache(seq, 4)
    assert cache.pool.num_free == free + num_replaced
    assert seq.num_computed == (max(3, len(cached_text)) if num_replaced else 3)
    assert seq.num_in_tree == (seq.num_computed if num_replaced else 0)
    assert (seq.pages.view()[:3].tolist() == private) == (not num_replaced)
    cache.check_integrity([seq])


def test_the_integrity_check_detects_errors():
    cache = PrefixCache(10)
    seq = publish(cache, [1, 2, 3])
    cache.check_integrity([seq])
    cache.tree.num_cached += 1
    with pytest.raises(AssertionError):
        cache.check_integrity([seq])
    cache.tree.num_cached -= 1
    queue, cache.tree._eviction_queue = cache.tree._eviction_queue, EvictionQueue()
    with pytest.raises(AssertionError, match="not in the eviction queue"):
        cache.check_integrity([seq])
    cache.tree._eviction_queue = queue
    seq.pages.view()[0] = 9
    with pytest.raises(AssertionError):
        cache.check_integrity([seq])
