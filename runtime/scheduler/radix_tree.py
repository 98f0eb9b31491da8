"""The prefix cache: a radix tree over token ids whose edges carry KV pages.

    inserting "a b c d" and then "a b x" splits a node:

        root                       root
          └─ [a b c d] p0 p1 p2 p3   └─ [a b] p0 p1          (new upper node, same pages)
                                          ├─ [c d] p2 p3     (the old node, keeps its children, pins and id)
                                          └─ [x]   p4

A node that a running sequence stands on is locked, and so is every node above it. What is not locked is cache
and goes when pages are short: leaves first, least recently used first, those that an idle session still counts
on (its pin) last. Every tenant and cache salt has a root of its own.

The method is RadixAttention's (Zheng et al. 2024, arXiv 2312.07104). Knows: tokens, pages, locks, pins.
Must not know: sequences, requests, or where pages come from.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from plait.runtime.scheduler.page_pool import IntArray

Space = tuple[str, str]  # (tenant, cache salt)
EMPTY: IntArray = np.empty(0, dtype=np.int32)


class Pin(Protocol):
    """Whoever counts on a node without locking it. It is told when the node goes."""

    def on_evicted(self, num_tokens: int, parent: Node) -> None: ...


class Node:
    """One edge of the tree: `key[i]` is a token, `pages[i]` holds its KV. `lock_count` includes descendants' locks;
    `end` is the number of tokens from the root to its end, which no split changes."""

    __slots__ = ("children", "end", "key", "last_used", "lock_count", "pages", "parent", "pins", "space")

    def __init__(self, key: IntArray, pages: IntArray, parent: Node | None, space: Space) -> None:
        self.key = key
        self.pages = pages
        self.parent = parent
        self.space = space
        self.end: int = len(key) + (parent.end if parent is not None else 0)
        self.children: dict[int, Node] = {}
        self.lock_count = 0
        self.last_used = 0
        self.pins: set[Pin] = set()


class Match(NamedTuple):
    """Where the longest cached prefix ends: inside `node`, after `num_in_node` of its tokens.

    `pages` [length] are the pages of the matched tokens. Valid until the tree changes.
    """

    node: Node
    num_in_node: int
    pages: IntArray

    @property
    def length(self) -> int:
        return len(self.pages)


class RadixTree:
    """See the file's header. All token and page arrays are int32."""

    def __init__(self) -> None:
        self._roots: dict[Space, Node] = {}
        self._clock = 0
        self.num_cached = 0  # pages in unlocked nodes
        self.num_locked = 0  # pages in locked nodes

    # -- reading ----------------------------------------------------------------------------------

    def root(self, space: Space) -> Node:
        """The root of a tenant's tree, made on first use."""
        root = self._roots.get(space)
        if root is None:
            root = self._roots[space] = Node(EMPTY, EMPTY, None, space)
        return root

    def find_root(self, space: Space) -> Node | None:
        """The root, or None where nothing is cached. Changes nothing."""
        return self._roots.get(space)

    def match(self, start: Node, tokens: IntArray) -> Match:
        """The longest cached continuation of `start` along `tokens`. Changes nothing."""
        node, at, found = start, 0, [EMPTY]
        num_in_node = len(start.key)
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                break
            num_in_node = _common_length(child.key, tokens[at:])
            found.append(child.pages[:num_in_node])
            node, at = child, at + num_in_node
            if num_in_node < len(child.key):
                break
        return Match(node, num_in_node, np.concatenate(found))

    # -- locks and pins ---------------------------------------------------------------------------

    def lock(self, match: Match) -> Node:
        """Makes the match end at a node's end (splitting it if need be) and locks the path to the root."""
        node = match.node
        if 0 < match.num_in_node < len(node.key):
            node = self._split(node, match.num_in_node)
        self.lock_node(node)
        return node

    def ancestor(self, node: Node, num_tokens: int) -> Node:
        """The node that ends `num_tokens` before `node` does, made by a split if need be."""
        while num_tokens >= len(node.key) and node.parent is not None:
            num_tokens -= len(node.key)
            node = node.parent
        return self._split(node, len(node.key) - num_tokens) if num_tokens else node

    def lock_node(self, node: Node) -> None:
        self._clock += 1
        walk: Node | None = node
        while walk is not None:
            if walk.lock_count == 0:
                self.num_cached -= len(walk.key)
                self.num_locked += len(walk.key)
            walk.lock_count += 1
            walk.last_used = self._clock
            walk = walk.parent

    def unlock_node(self, node: Node) -> None:
        self._clock += 1
        walk: Node | None = node
        while walk is not None:
            assert walk.lock_count > 0
            walk.lock_count -= 1
            walk.last_used = self._clock
            if walk.lock_count == 0:
                self.num_cached += len(walk.key)
                self.num_locked -= len(walk.key)
            parent = walk.parent
            self.drop_if_empty(walk)
            walk = parent

    # -- growing and shrinking --------------------------------------------------------------------

    def insert(self, start: Node, tokens: IntArray, pages: IntArray) -> tuple[Node, IntArray]:
        """Adds `tokens` with their `pages` below `start`, which the caller has locked.

        Returns the node that now ends the text and the pages [len(tokens)] the tree has for it: where a token
        was cached already, the tree's page stays and the caller's is the caller's to free. The end node is not
        locked yet.
        """
        match = self.match(start, tokens)
        node = match.node
        if 0 < match.num_in_node < len(node.key) and node is not start:
            node = self._split(node, match.num_in_node)
        at = match.length
        if at < len(tokens):
            child = Node(tokens[at:].copy(), pages[at:].copy(), node, start.space)
            self._clock += 1
            child.last_used = self._clock
            node.children[int(tokens[at])] = child
            self.num_cached += len(child.key)
            node = child
        return node, np.concatenate([match.pages, pages[at:]])

    def evict(self, count: int) -> IntArray:
        """Drops unlocked leaves until `count` pages came free or none is left; returns the pages."""
        heap = [(bool(leaf.pins), leaf.last_used, id(leaf), leaf) for leaf in self.nodes() if self._is_evictable(leaf)]
        heapq.heapify(heap)
        freed, num_freed = [EMPTY], 0
        while heap and num_freed < count:
            leaf = heapq.heappop(heap)[3]
            parent = self._remove_leaf(leaf)
            freed.append(leaf.pages)
            num_freed += len(leaf.pages)
            if self._is_evictable(parent):
                heapq.heappush(heap, (bool(parent.pins), parent.last_used, id(parent), parent))
        return np.concatenate(freed)

    def remove_subtree(self, node: Node) -> IntArray:
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
    def _is_evictable(node: Node) -> bool:
        return not node.children and node.lock_count == 0 and node.parent is not None

    def _remove_leaf(self, leaf: Node) -> Node:
        parent = leaf.parent
        assert parent is not None
        del parent.children[int(leaf.key[0])]
        self.num_cached -= len(leaf.key)
        for pin in list(leaf.pins):
            parent.pins.add(pin)
            pin.on_evicted(len(leaf.key), parent)
        leaf.pins.clear()
        leaf.parent = None
        self.drop_if_empty(parent)
        return parent

    def _split(self, node: Node, at: int) -> Node:
        """Puts a new node with the first `at` tokens above `node`; `node` keeps the rest, its children and pins."""
        parent = node.parent
        assert parent is not None and 0 < at < len(node.key)
        upper = Node(node.key[:at], node.pages[:at], parent, node.space)
        upper.lock_count, upper.last_used = node.lock_count, node.last_used
        parent.children[int(upper.key[0])] = upper
        node.key, node.pages, node.parent = node.key[at:], node.pages[at:], upper
        upper.children[int(node.key[0])] = node
        return upper

    def drop_if_empty(self, node: Node) -> None:
        """Forgets a root that nothing is under, so that many tenants leave nothing behind."""
        if node.parent is None and not node.children and node.lock_count == 0 and not node.pins:
            self._roots.pop(node.space, None)

    # -- checking ---------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """Every node, the roots included."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def check_integrity(self) -> None:
        """Raises AssertionError unless links, keys, locks, counts and pages agree everywhere."""
        locked = cached = 0
        seen: set[int] = set()
        for node in self.nodes():
            assert len(node.key) == len(node.pages)
            assert (node.parent is None) == (len(node.key) == 0), "only a root has an empty key"
            assert node.end == len(node.key) + (node.parent.end if node.parent is not None else 0)
            assert node.lock_count >= sum(child.lock_count for child in node.children.values())
            for token, child in node.children.items():
                assert child.parent is node and child.space == node.space and int(child.key[0]) == token
            pages = set(node.pages.tolist())
            assert len(pages) == len(node.pages) and not pages & seen, "a page is in the tree twice"
            seen |= pages
            locked += len(node.key) if node.lock_count else 0
            cached += 0 if node.lock_count else len(node.key)
        assert (cached, locked) == (self.num_cached, self.num_locked)


def _common_length(a: IntArray, b: IntArray) -> int:
    """How many leading elements are equal."""
    size = min(len(a), len(b))
    differ = a[:size] != b[:size]
    first = int(differ.argmax()) if size else 0
    return first if size and differ[first] else size
