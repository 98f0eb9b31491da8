"""The prefix cache: a radix tree over token ids whose edges carry KV pages.

    inserting "a b c d" and then "a b x" splits a node:

        root                       root
          └─ [a b c d] p0 p1 p2 p3   └─ [a b] p0 p1          (new upper node, same pages)
                                          ├─ [c d] p2 p3     (the old node, keeps its children, pins and id)
                                          └─ [x]   p4

A node that a running sequence stands on is locked, and so is every node above it. What is not locked is cache
and goes when pages are short: leaves first, least recently used first, those that an idle session still counts
on (its pin) last. Every tenant and cache salt has a root of its own. Nothing here looks at tokens one by one, and no
numpy function is called that lets go of the interpreter's lock, for which another thread may be waiting.

The method is RadixAttention's (Zheng et al. 2024, arXiv 2312.07104). Knows: tokens, pages, locks, pins.
Must not know: sequences, requests, or where pages come from.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from plait.runtime.kv_cache.page_pool import IntArray

CacheNamespace = tuple[str, str]  # (tenant, cache salt)
EVICTION_HEAP_SLACK = 256  # notes of nodes that can go, beyond two for each node
EMPTY: IntArray = np.empty(0, dtype=np.int32)


class PinHolder(Protocol):
    """Whoever counts on a node without locking it. It is told when the node goes."""

    def on_evicted(self, num_tokens: int, parent: RadixNode) -> None: ...


class RadixNode:
    """One edge of the tree: `key[i]` is a token, `pages[i]` holds its KV. `lock_count` includes descendants' locks;
    `end` is the number of tokens from the root to its end, which no split changes."""

    __slots__ = ("children", "end", "key", "last_used", "lock_count", "pages", "parent", "pins", "namespace")

    def __init__(self, key: IntArray, pages: IntArray, parent: RadixNode | None, namespace: CacheNamespace) -> None:
        self.key = key
        self.pages = pages
        self.parent = parent
        self.namespace = namespace
        self.end: int = len(key) + (parent.end if parent is not None else 0)
        self.children: dict[int, RadixNode] = {}
        self.lock_count = 0
        self.last_used = 0
        self.pins: set[PinHolder] = set()


class Match(NamedTuple):
    """Where the longest cached prefix ends: inside `node`, after `num_in_node` of its tokens.

    `length` tokens are matched. Valid until the tree changes.
    """

    node: RadixNode
    num_in_node: int
    length: int

    @property
    def pages(self) -> IntArray:
        """[length], the pages of the matched tokens; put together when asked for."""
        if not self.length:
            return EMPTY
        node, parts = self.node, [self.node.pages[: self.num_in_node]]
        left = self.length - self.num_in_node
        while left:
            assert node.parent is not None
            node = node.parent
            parts.append(node.pages)
            left -= len(node.pages)
        return parts[0] if len(parts) == 1 else np.concatenate(parts[::-1])


EvictionEntry = tuple[int, int, RadixNode]  # last_used and id, to be ordered by, and a leaf that was unlocked then


class RadixTree:
    """See the file's header. All token and page arrays are int32."""

    def __init__(self) -> None:
        self._roots: dict[CacheNamespace, RadixNode] = {}
        self._clock = 0
        self._eviction_heap: list[EvictionEntry] = []  # a heap; see `_mark_evictable`
        self._num_nodes = 0  # without roots
        self.num_cached = 0  # pages in unlocked nodes
        self.num_locked = 0  # pages in locked nodes

    # -- reading ----------------------------------------------------------------------------------

    def root(self, namespace: CacheNamespace) -> RadixNode:
        """The root of a tenant's tree, made on first use."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = RadixNode(EMPTY, EMPTY, None, namespace)
        return root

    def find_root(self, namespace: CacheNamespace) -> RadixNode | None:
        """The root, or None where nothing is cached. Changes nothing."""
        return self._roots.get(namespace)

    def match(self, start: RadixNode, tokens: IntArray) -> Match:
        """The longest cached continuation of `start` along `tokens`. Changes nothing."""
        node, at, count = start, 0, len(tokens)
        num_in_node = len(start.key)
        while at < count and node.children:
            child = node.children.get(tokens.item(at))
            if child is None:
                break
            num_in_node = _common_length(child.key, tokens[at:] if at else tokens)
            node, at = child, at + num_in_node
            if num_in_node < len(child.key):
                break
        return Match(node, num_in_node, at)

    # -- locks and pins ---------------------------------------------------------------------------

    def split_at_match(self, match: Match) -> RadixNode:
        """The node that ends where the match does, made by a split if need be."""
        whole = match.num_in_node == len(match.node.key)
        return match.node if whole else self._split(match.node, match.num_in_node)

    def ancestor(self, node: RadixNode, num_tokens: int) -> RadixNode:
        """The node that ends `num_tokens` before `node` does, made by a split if need be."""
        while num_tokens >= len(node.key) and node.parent is not None:
            num_tokens -= len(node.key)
            node = node.parent
        return self._split(node, len(node.key) - num_tokens) if num_tokens else node

    def lock_node(self, node: RadixNode) -> None:
        self._lock_up_to(node, None)

    def unlock_node(self, node: RadixNode) -> None:
        self._unlock_up_to(node, None)
        root = node
        while root.parent is not None:
            root = root.parent
        self.drop_if_empty(root)

    def move_lock(self, old: RadixNode, new: RadixNode) -> None:
        """`lock_node(new)` and `unlock_node(old)`, of which one is on the other's way to the root."""
        if new.end > old.end:
            self._lock_up_to(new, old)
        else:
            self._unlock_up_to(old, new)

    def _lock_up_to(self, node: RadixNode, end: RadixNode | None) -> None:
        """One lock more on `node` and on those above it, `end` not included."""
        node_on_path: RadixNode | None = node
        while node_on_path is not end and node_on_path is not None:
            if not node_on_path.lock_count:
                self.num_cached -= len(node_on_path.key)
                self.num_locked += len(node_on_path.key)
            node_on_path.lock_count += 1
            node_on_path = node_on_path.parent

    def _unlock_up_to(self, node: RadixNode, end: RadixNode | None) -> None:
        self._clock += 1
        node_on_path: RadixNode | None = node
        while node_on_path is not end and node_on_path is not None:
            assert node_on_path.lock_count > 0
            node_on_path.lock_count -= 1
            node_on_path.last_used = self._clock
            if not node_on_path.lock_count:
                self.num_cached += len(node_on_path.key)
                self.num_locked -= len(node_on_path.key)
                self._mark_evictable(node_on_path)
            node_on_path = node_on_path.parent

    # -- growing and shrinking --------------------------------------------------------------------

    def insert(self, start: RadixNode, tokens: IntArray, pages: IntArray) -> tuple[RadixNode, IntArray]:
        """Adds `tokens` with their `pages` below `start`, which the caller has locked.

        Returns the node that now ends the text and the pages [len(tokens)] the tree has for it: where a token
        was cached already, the tree's page stays and the caller's is the caller's to free; where none was, they are
        the array that was given. The end node is not locked yet.
        """
        match = self.match(start, tokens)
        at = match.length
        kept = np.concatenate([match.pages, pages[at:]]) if at else pages
        node = self.split_at_match(match)
        if at < len(tokens):
            child = RadixNode(tokens[at:].copy(), pages[at:].copy(), node, start.namespace)
            self._clock += 1
            child.last_used = self._clock
            node.children[tokens.item(at)] = child
            self.num_cached += len(child.key)
            self._num_nodes += 1
            self._mark_evictable(child)
            node = child
        return node, kept

    def evict(self, count: int) -> IntArray:
        """Drops unlocked leaves until `count` pages came free or none is left; returns the pages."""
        freed, pinned = [EMPTY], list[EvictionEntry]()
        missing = self._evict_lru(count, freed, pinned)
        if missing > 0:
            self._eviction_heap, pinned = pinned, []  # nothing else is left
            heapq.heapify(self._eviction_heap)
            self._evict_lru(missing, freed, None)
        for entry in pinned:
            heapq.heappush(self._eviction_heap, entry)
        return np.concatenate(freed)

    def _evict_lru(self, count: int, freed: list[IntArray], pinned: list[EvictionEntry] | None) -> int:
        """Drops idle leaves, the oldest first, until `count` pages came free; with `pinned` only those without pins,
        and the others are put there. Returns how many pages are missing."""
        while self._eviction_heap and count > 0:
            entry = heapq.heappop(self._eviction_heap)
            leaf = entry[2]
            if entry[0] != leaf.last_used or not self._is_evictable(leaf):
                continue  # it has been used, or gone, since
            if pinned is not None and leaf.pins:
                pinned.append(entry)
                continue
            self._remove_leaf(leaf)
            freed.append(leaf.pages)
            count -= len(leaf.pages)
        return count

    def _mark_evictable(self, node: RadixNode) -> None:
        """Notes a node that has become evictable; notes that are out of date are dropped when they come up, or when
        they are most of all."""
        if node.children or node.parent is None:
            return
        if len(self._eviction_heap) > 2 * self._num_nodes + EVICTION_HEAP_SLACK:
            self._eviction_heap = [
                (each.last_used, id(each), each) for each in self.nodes() if self._is_evictable(each)
            ]
            heapq.heapify(self._eviction_heap)
        else:
            heapq.heappush(self._eviction_heap, (node.last_used, id(node), node))

    def remove_subtree(self, node: RadixNode) -> IntArray:
        """Drops an unlocked node and all below it at once (its KV was never written); returns the pages."""
        order, freed = [node], [EMPTY]
        for each in order:  # parents before children
            order.extend(each.children.values())
        for each in reversed(order):
            assert each.lock_count == 0 and each.parent is not None
            self._remove_leaf(each)
            freed.append(each.pages)
        return np.concatenate(freed)

    @staticmethod
    def _is_evictable(node: RadixNode) -> bool:
        return not node.children and node.lock_count == 0 and node.parent is not None

    def _remove_leaf(self, leaf: RadixNode) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key.item(0)]
        self.num_cached -= len(leaf.key)
        self._num_nodes -= 1
        for pin in list(leaf.pins):
            parent.pins.add(pin)
            pin.on_evicted(len(leaf.key), parent)
        leaf.pins.clear()
        leaf.parent = None
        if not parent.lock_count:
            self._mark_evictable(parent)
        self.drop_if_empty(parent)

    def _split(self, node: RadixNode, at: int) -> RadixNode:
        """Puts a new node with the first `at` tokens above `node`; `node` keeps the rest, its children and pins."""
        parent = node.parent
        assert parent is not None and 0 < at < len(node.key)
        upper = RadixNode(node.key[:at], node.pages[:at], parent, node.namespace)
        upper.lock_count, upper.last_used = node.lock_count, node.last_used
        self._num_nodes += 1
        parent.children[upper.key.item(0)] = upper
        node.key, node.pages, node.parent = node.key[at:], node.pages[at:], upper
        upper.children[node.key.item(0)] = node
        return upper

    def drop_if_empty(self, node: RadixNode) -> None:
        """Forgets a root that nothing is under, so that many tenants leave nothing behind."""
        if node.parent is None and not node.children and node.lock_count == 0 and not node.pins:
            self._roots.pop(node.namespace, None)

    # -- checking ---------------------------------------------------------------------------------

    def nodes(self) -> Iterator[RadixNode]:
        """Every node, the roots included."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def check_integrity(self) -> None:
        """Raises AssertionError unless links, keys, locks, counts and pages agree everywhere."""
        locked = cached = num_nodes = 0
        seen: set[int] = set()
        noted = {(stamp, node) for stamp, _, node in self._eviction_heap}
        for node in self.nodes():
            num_nodes += node.parent is not None
            assert not self._is_evictable(node) or (node.last_used, node) in noted, "nobody would ever evict it"
            assert len(node.key) == len(node.pages)
            assert (node.parent is None) == (len(node.key) == 0), "only a root has an empty key"
            assert node.end == len(node.key) + (node.parent.end if node.parent is not None else 0)
            assert node.lock_count >= sum(child.lock_count for child in node.children.values())
            for token, child in node.children.items():
                assert child.parent is node and child.namespace == node.namespace and int(child.key[0]) == token
            pages = set(node.pages.tolist())
            assert len(pages) == len(node.pages) and not pages & seen, "a page is in the tree twice"
            seen |= pages
            locked += len(node.key) if node.lock_count else 0
            cached += 0 if node.lock_count else len(node.key)
        assert (cached, locked, num_nodes) == (self.num_cached, self.num_locked, self._num_nodes)


def _common_length(a: IntArray, b: IntArray) -> int:
    """How many leading elements are equal."""
    size = min(len(a), len(b))
    first = (a[:size] != b[:size]).tobytes().find(1)
    return size if first < 0 else first
