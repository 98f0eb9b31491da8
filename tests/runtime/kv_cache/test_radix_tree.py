"""The radix tree and the prefix cache, against a dict of prefixes and by their own integrity check."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.runtime.kv_cache import radix_tree
from plait.runtime.kv_cache.prefix_cache import PrefixCache
from plait.runtime.kv_cache.radix_tree import RadixTree
from plait.runtime.kv_cache.sequence import Sequence

SPACE = ("", "")
texts = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def ints(values):
    return np.array(values, dtype=np.int32)


@given(st.lists(texts, min_size=1, max_size=20), texts)
def test_match_finds_the_longest_prefix_ever_inserted(inserted, query):
    tree, pages_of, next_page = RadixTree(), {}, 0
    for text in inserted:
        pages = list(range(next_page, next_page + len(text)))
        next_page += len(text)
        root = tree.root(SPACE)
        tree.lock_node(root)
        _, kept = tree.insert(root, ints(text), ints(pages))
        for i in range(len(text)):
            pages_of.setdefault(tuple(text[: i + 1]), pages[i])
        assert kept.tolist() == [pages_of[tuple(text[: i + 1])] for i in range(len(text))]
        tree.unlock_node(root)
        tree.check_integrity()
    longest = max(n for n in range(len(query) + 1) if n == 0 or tuple(query[:n]) in pages_of)
    before = sorted((n.key.tolist(), n.last_used, n.lock_count) for n in tree.nodes())
    match = tree.match(tree.root(SPACE), ints(query))
    assert match.length == longest
    assert match.pages.tolist() == [pages_of[tuple(query[: i + 1])] for i in range(longest)]
    assert before == sorted((n.key.tolist(), n.last_used, n.lock_count) for n in tree.nodes()), "match changed it"


def test_a_split_is_drawn_as_the_header_says():
    tree = RadixTree()
    root = tree.root(SPACE)
    tree.lock_node(root)
    tree.insert(root, ints([1, 2, 3, 4]), ints([0, 1, 2, 3]))
    tree.insert(root, ints([1, 2, 9]), ints([5, 6, 7]))
    (upper,) = root.children.values()
    assert upper.key.tolist() == [1, 2]
    assert upper.pages.tolist() == [0, 1]
    assert {tuple(c.key.tolist()): c.pages.tolist() for c in upper.children.values()} == {
        (3, 4): [2, 3],
        (9,): [7],
    }


def test_tenants_and_salts_do_not_see_each_other():
    tree = RadixTree()
    for namespace in (("a", ""), ("b", ""), ("a", "salt")):
        root = tree.root(namespace)
        tree.lock_node(root)
        assert tree.match(root, ints([1, 2])).length == 0
        tree.insert(root, ints([1, 2]), ints([len(list(tree.nodes())) * 2, len(list(tree.nodes())) * 2 + 1]))
    tree.check_integrity()


def publish(cache, tokens, namespace=SPACE):
    seq = Sequence(namespace, tokens)
    cache.activate(seq, len(tokens))
    cache.extend_from_cache(seq, len(tokens))
    assert cache.allocate(seq, len(tokens) - seq.num_computed)
    cache.release(seq)
    return seq


def test_least_recently_used_goes_first_and_idle_sessions_last():
    cache = PrefixCache(100)
    idle = publish(cache, [1, 1, 1])  # keeps its pin
    old, fresh = publish(cache, [2, 2, 2]), publish(cache, [3, 3, 3])
    cache.free(old)
    cache.free(fresh)
    touch = Sequence(SPACE, [2, 2, 2])
    cache.activate(touch, 3)
    cache.extend_from_cache(touch, 3)
    cache.release(touch)
    cache.free(touch)  # now [3, 3, 3] is the oldest
    cache.pool.release(cache.tree.evict(1))
    assert [cache.match_length(Sequence(SPACE, t), 3) for t in ([1, 1, 1], [2, 2, 2], [3, 3, 3])] == [3, 3, 0]
    cache.pool.release(cache.tree.evict(1))
    assert [cache.match_length(Sequence(SPACE, t), 3) for t in ([1, 1, 1], [2, 2, 2])] == [3, 0]
    cache.pool.release(cache.tree.evict(1))
    assert idle.num_computed == 0, "the pin was told that its pages went"
    cache.check_integrity([idle])


def oldest(tree):
    """Whatever `evict` is to drop next, found by looking at every node: without a pin before with one, then by age."""
    leaves = [node for node in tree.nodes() if node.parent and not node.children and not node.lock_count]
    return min(leaves, key=lambda leaf: (bool(leaf.pins), leaf.last_used), default=None)


@pytest.mark.parametrize("slack", [0, 256])
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_eviction_drops_what_a_look_at_every_node_would_drop(slack, data):
    cache, alive = PrefixCache(300), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(radix_tree, "EVICTION_HEAP_SLACK", slack)  # 0: notes are made anew all the time
        for _ in range(data.draw(st.integers(1, 20))):
            action = data.draw(st.sampled_from(["new", "new", "again", "free", "evict"]))
            seq = data.draw(st.sampled_from(alive)) if alive else None
            if action == "new":
                alive.append(publish(cache, data.draw(texts)))
            elif action == "again" and seq is not None:
                cache.activate(seq, len(seq))
                cache.release(seq)
            elif action == "free" and seq is not None:
                cache.free(seq)
                alive.remove(seq)
            elif action == "evict" and (leaf := oldest(cache.tree)):
                expected, freed = leaf.pages.tolist(), cache.tree.evict(1)
                assert freed.tolist() == expected
                cache.pool.release(freed)
            cache.check_integrity(alive)


def test_roots_of_tenants_that_are_gone_leave_nothing():
    cache = PrefixCache(10)
    for tenant in range(50):
        cache.free(publish(cache, [1, 2, 3], (str(tenant), "")))
        cache.flush()
    assert list(cache.tree.nodes()) == []
    assert cache.counts() == (10, 0, 0)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_sequences_come_and_go_and_no_page_is_lost(data):
    """Random lives of sequences in a small pool, pages tagged with the text they hold."""
    cache, alive, content = PrefixCache(40), [], {}

    def check():
        cache.check_integrity(alive)
        for seq in alive:
            tokens = seq.tokens.view().tolist()
            for i, page in enumerate(seq.pages.view().tolist()):
                assert content[page] == tuple(tokens[: i + 1]), "a page holds another text"

    for _ in range(data.draw(st.integers(1, 25))):
        kinds = ["new"] + (["extend", "idle", "fork", "free", "cut", "reset"] if alive else [])
        action = data.draw(st.sampled_from(kinds))
        seq = alive[data.draw(st.integers(0, len(alive) - 1))] if alive else None
        if action == "new":
            alive.append(Sequence(SPACE, data.draw(texts)))
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
        elif action == "reset":
            cache.reset(seq)
        elif action == "free":
            cache.free(seq)
            alive.remove(seq)
        check()
    for seq in alive:
        cache.free(seq)
    cache.flush()
    assert cache.counts() == (40, 0, 0)


@pytest.mark.parametrize(
    ("others", "swapped"), [([], 0), ([1, 2], 0), ([1, 2, 9, 9], 0), ([1, 2, 3], 3), ([1, 2, 3, 4], 3)]
)
def test_own_pages_give_way_where_the_tree_has_all_of_the_same(others, swapped):
    """And what it lacks stays private: whether that was ever computed, the cache cannot know."""
    cache = PrefixCache(20)
    seq = Sequence(SPACE, [1, 2, 3, 4, 5])
    cache.activate(seq, 0)
    assert cache.allocate(seq, 3)
    mine = seq.pages.view().tolist()
    if others:
        publish(cache, others)
    free = cache.pool.num_free
    cache.extend_from_cache(seq, 4)
    assert cache.pool.num_free == free + swapped
    assert seq.num_computed == (max(3, len(others)) if swapped else 3)
    assert seq.num_in_tree == (seq.num_computed if swapped else 0)
    assert (seq.pages.view()[:3].tolist() == mine) == (not swapped)
    cache.check_integrity([seq])


def test_integrity_check_is_real():
    cache = PrefixCache(10)
    seq = publish(cache, [1, 2, 3])
    cache.check_integrity([seq])
    cache.tree.num_cached += 1
    with pytest.raises(AssertionError):
        cache.check_integrity([seq])
    cache.tree.num_cached -= 1
    notes, cache.tree._eviction_heap = cache.tree._eviction_heap, []
    with pytest.raises(AssertionError, match="nobody would ever evict it"):
        cache.check_integrity([seq])
    cache.tree._eviction_heap = notes
    seq.pages.view()[0] = 9
    with pytest.raises(AssertionError):
        cache.check_integrity([seq])
