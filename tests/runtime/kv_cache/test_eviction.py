"""Eviction order: pinned nodes last, otherwise least recently used first."""

from __future__ import annotations

import pytest
from cached_sequences import NAMESPACE, publish, texts
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.runtime.kv_cache import eviction
from plait.runtime.kv_cache.prefix_cache import PrefixCache
from plait.runtime.kv_cache.sequence import Sequence


def test_unpinned_nodes_are_evicted_before_pinned_ones_least_recently_used_first():
    cache = PrefixCache(100)
    idle = publish(cache, [1, 1, 1])  # keeps its pin
    old, fresh = publish(cache, [2, 2, 2]), publish(cache, [3, 3, 3])
    cache.free(old)
    cache.free(fresh)
    touch = Sequence(NAMESPACE, [2, 2, 2])
    cache.activate(touch, 3)
    cache.extend_from_cache(touch, 3)
    cache.release(touch)
    cache.free(touch)  # now [3, 3, 3] is the oldest
    cache.pool.release(cache.tree.evict(1))
    assert [cache.match_length(Sequence(NAMESPACE, t), 3) for t in ([1, 1, 1], [2, 2, 2], [3, 3, 3])] == [3, 3, 0]
    cache.pool.release(cache.tree.evict(1))
    assert [cache.match_length(Sequence(NAMESPACE, t), 3) for t in ([1, 1, 1], [2, 2, 2])] == [3, 0]
    cache.pool.release(cache.tree.evict(1))
    assert idle.num_computed == 0, "the sequence that holds the pin must be informed of the eviction"
    cache.check_integrity([idle])


def next_victim(tree):
    """The node that `evict` must evict next, found by a search over all nodes."""
    leaves = [node for node in tree.nodes() if node.parent and not node.children and not node.lock_count]
    return min(leaves, key=lambda leaf: (bool(leaf.pins), leaf.last_used), default=None)


@pytest.mark.parametrize("heap_slack", [0, 256])
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_evict_removes_the_leaf_with_the_smallest_key(heap_slack, data):
    cache, alive = PrefixCache(300), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eviction, "EVICTION_HEAP_SLACK", heap_slack)  # 0: the heap is rebuilt all the time
        for _ in range(data.draw(st.integers(1, 20))):
            action = data.draw(st.sampled_from(["new", "new", "again", "fork", "free", "evict"]))
            seq = data.draw(st.sampled_from(alive)) if alive else None
            if action == "new":
                alive.append(publish(cache, data.draw(texts)))
            elif action == "again" and seq is not None:
                cache.activate(seq, len(seq))
                cache.release(seq)
            elif action == "fork" and seq is not None:  # pins, and so changes the key of, a node that may be queued
                alive.append(cache.fork(seq))
            elif action == "free" and seq is not None:
                cache.free(seq)
                alive.remove(seq)
            elif action == "evict" and (leaf := next_victim(cache.tree)):
                expected, freed = leaf.pages.tolist(), cache.tree.evict(1)
                assert freed.tolist() == expected
                cache.pool.release(freed)
            cache.check_integrity(alive)
