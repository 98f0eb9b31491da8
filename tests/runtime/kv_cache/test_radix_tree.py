"""The radix tree, compared with a dict of prefixes."""

from __future__ import annotations

from cached_sequences import NAMESPACE, ints, texts
from hypothesis import given
from hypothesis import strategies as st

from plait.runtime.kv_cache.radix_node import CacheNamespace
from plait.runtime.kv_cache.radix_tree import RadixTree


@given(st.lists(texts, min_size=1, max_size=20), texts)
def test_match_finds_the_longest_prefix_ever_inserted(inserted, query):
    tree, pages_of, next_page = RadixTree(), {}, 0
    for text in inserted:
        pages = list(range(next_page, next_page + len(text)))
        next_page += len(text)
        root = tree.root(NAMESPACE)
        tree.lock_node(root)
        _, tree_pages = tree.insert(root, ints(text), ints(pages))
        for i in range(len(text)):
            pages_of.setdefault(tuple(text[: i + 1]), pages[i])
        assert tree_pages.tolist() == [pages_of[tuple(text[: i + 1])] for i in range(len(text))]
        tree.unlock_node(root)
        tree.check_integrity()
    longest = max(n for n in range(len(query) + 1) if n == 0 or tuple(query[:n]) in pages_of)
    before = sorted((n.key.tolist(), n.last_used, n.lock_count) for n in tree.nodes())
    match = tree.match(tree.root(NAMESPACE), ints(query))
    assert match.length == longest
    assert match.pages.tolist() == [pages_of[tuple(query[: i + 1])] for i in range(longest)]
    assert before == sorted((n.key.tolist(), n.last_used, n.lock_count) for n in tree.nodes()), (
        "`match` changed the tree"
    )


def test_a_node_split_equals_the_drawing_in_the_docstring():
    tree = RadixTree()
    root = tree.root(NAMESPACE)
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


def test_namespaces_are_isolated():
    tree = RadixTree()
    for namespace in (CacheNamespace(*parts) for parts in (("a",), ("b",), ("a", "salt"), ("a", "", "c0ffee"))):
        root = tree.root(namespace)
        tree.lock_node(root)
        assert tree.match(root, ints([1, 2])).length == 0
        tree.insert(root, ints([1, 2]), ints([len(list(tree.nodes())) * 2, len(list(tree.nodes())) * 2 + 1]))
    tree.check_integrity()
