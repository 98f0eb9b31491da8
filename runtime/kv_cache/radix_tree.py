"""A radix tree over token ids whose edges carry KV pages.

    inserting "a b c d" and then "a b x" splits a node:

        root                       root
          └─ [a b c d] p0 p1 p2 p3   └─ [a b] p0 p1          (new upper node, same pages)
                                          ├─ [c d] p2 p3     (the old node, keeps its children, pins and identity)
                                          └─ [x]   p4

A node is locked while a running sequence ends in it, and so is every node above it. Unlocked nodes are cache. When
pages run out, unlocked leaves are evicted in the order of `eviction.eviction_key`. Every namespace (tenant, cache salt,
adapter) has its own root.

No code here loops over single tokens or calls a NumPy function that releases the GIL, because another thread may be
waiting for it. The method is RadixAttention (Zheng et al. 2024, arXiv 2312.07104).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from plait.runtime.arrays import IntArray, num_equal
from plait.runtime.kv_cache.eviction import EvictionQueue, eviction_key
from plait.runtime.kv_cache.radix_node import (
    EMPTY,
    MAX_EVICTED,
    CacheNamespace,
    Match,
    PinHolder,
    RadixNode,
    TreeListener,
)


class RadixTree:
    """Maps token prefixes to pages, with locks and pins. All token and page arrays are int32."""

    def __init__(self) -> None:
        self._roots: dict[CacheNamespace, RadixNode] = {}
        self._clock = 0
        self._eviction_queue = EvictionQueue()
        self._num_nodes = 0  # without roots
        self.num_cached = 0  # pages in unlocked nodes
        self.num_locked = 0  # pages in locked nodes
        self.listener: TreeListener | None = None

    # -- lookup -----------------------------------------------------------------------------------

    def root(self, namespace: CacheNamespace) -> RadixNode:
        """Returns the root of a namespace, creating it on first use."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = RadixNode(EMPTY, EMPTY, None, namespace)
        return root

    def find_root(self, namespace: CacheNamespace) -> RadixNode | None:
        """Returns the root of a namespace, or None if nothing is cached there. Changes nothing."""
        return self._roots.get(namespace)

    def match(self, start: RadixNode, tokens: IntArray) -> Match:
        """Finds the longest cached continuation of `start` along `tokens`. Changes nothing."""
        node, position, count = start, 0, len(tokens)
        num_in_node = len(start.key)
        while position < count and node.children:
            child = node.children.get(tokens.item(position))
            if child is None:
                break
            num_in_node = num_equal(child.key, tokens[position:] if position else tokens)
            node, position = child, position + num_in_node
            if num_in_node < len(child.key):
                break
        return Match(node, num_in_node, position)

    def split_at_match(self, match: Match) -> RadixNode:
        """Returns the node that ends where the match ends, splitting a node if necessary."""
        is_whole_node = match.num_in_node == len(match.node.key)
        return match.node if is_whole_node else self._split(match.node, match.num_in_node)

    def ancestor(self, node: RadixNode, num_tokens: int) -> RadixNode:
        """Returns the node that ends `num_tokens` before the end of `node`, splitting a node if necessary."""
        while num_tokens >= len(node.key) and node.parent is not None:
            num_tokens -= len(node.key)
            node = node.parent
        return self._split(node, len(node.key) - num_tokens) if num_tokens else node

    # -- locks and pins ---------------------------------------------------------------------------

    def lock_node(self, node: RadixNode) -> None:
        """Locks the path from the root to `node`. Locks are counted."""
        self._lock_up_to(node, None)

    def unlock_node(self, node: RadixNode) -> None:
        """Undoes one `lock_node`. Drops the root if the tree below it is empty."""
        self._unlock_up_to(node, None)
        root = node
        while root.parent is not None:
            root = root.parent
        self.drop_if_empty(root)

    def move_lock(self, old: RadixNode, new: RadixNode) -> None:
        """Does `lock_node(new)` and `unlock_node(old)`, where one is an ancestor of the other."""
        if new.end > old.end:
            self._lock_up_to(new, old)
        else:
            self._unlock_up_to(old, new)

    def _lock_up_to(self, node: RadixNode, end: RadixNode | None) -> None:
        """Adds a lock to `node` and its ancestors below `end`."""
        node_on_path: RadixNode | None = node
        while node_on_path is not end and node_on_path is not None:
            if not node_on_path.lock_count:
                self.num_cached -= len(node_on_path.key)
                self.num_locked += len(node_on_path.key)
            node_on_path.lock_count += 1
            node_on_path = node_on_path.parent

    def _unlock_up_to(self, node: RadixNode, end: RadixNode | None) -> None:
        """Removes a lock from `node` and its ancestors below `end`."""
        self._clock += 1
        node_on_path: RadixNode | None = node
        while node_on_path is not end and node_on_path is not None:
            assert node_on_path.lock_count > 0
            node_on_path.lock_count -= 1
            node_on_path.last_used = self._clock
            if not node_on_path.lock_count:
                self.num_cached += len(node_on_path.key)
                self.num_locked -= len(node_on_path.key)
                self._queue_if_evictable(node_on_path)
            node_on_path = node_on_path.parent

    def pin(self, node: RadixNode, holder: PinHolder) -> None:
        """Pins the node for `holder`: it is evicted after nodes without pins, and `holder.on_evicted` is called."""
        is_first = not node.pins
        node.pins.add(holder)
        if is_first:
            self._queue_if_evictable(node)

    def unpin(self, node: RadixNode, holder: PinHolder) -> None:
        """Removes the pin of `holder`, if it has one."""
        if holder in node.pins:
            node.pins.remove(holder)
            if not node.pins:
                self._queue_if_evictable(node)

    # -- insertion and eviction -------------------------------------------------------------------

    def insert(self, start: RadixNode, tokens: IntArray, pages: IntArray) -> tuple[RadixNode, IntArray]:
        """Adds `tokens` with their `pages` below `start`, which the caller has locked.

        Returns (node, kept): the node at which the text now ends, not locked yet, and the pages [len(tokens)] that the
        tree holds for it. For a token that was cached already, the tree keeps its own page and the caller frees the
        other. If no token was cached, `kept` is the array `pages` itself.
        """
        match = self.match(start, tokens)
        num_matched = match.length
        kept = np.concatenate([match.pages, pages[num_matched:]]) if num_matched else pages
        node = self.split_at_match(match)
        if num_matched < len(tokens):
            child = RadixNode(tokens[num_matched:].copy(), pages[num_matched:].copy(), node, start.namespace)
            self._clock += 1
            child.last_used = self._clock
            node.children[tokens.item(num_matched)] = child
            if node.evicted:
                node.evicted -= {tokens.item(num_matched)}
            self.num_cached += len(child.key)
            self._num_nodes += 1
            self._queue_if_evictable(child)
            if self.listener is not None:
                self.listener.on_insert(child)
            node = child
        return node, kept

    def evict(self, count: int) -> IntArray:
        """Evicts unlocked leaves until at least `count` pages are free or none is left; returns the freed pages."""
        freed = [EMPTY]
        while count > 0 and (leaf := self._eviction_queue.pop()) is not None:
            self._evict_leaf(leaf)
            freed.append(leaf.pages)
            count -= len(leaf.pages)
        return np.concatenate(freed)

    def evict_tenant(self, tenant: str) -> IntArray:
        """Evicts all unlocked nodes of a tenant, whatever the cache salt; returns the freed pages."""
        nodes, freed = [root for namespace, root in self._roots.items() if namespace.tenant == tenant], [EMPTY]
        for parent in nodes:  # parents before children
            nodes.extend(parent.children.values())
        for node in reversed(nodes):
            if node.is_evictable:
                self._evict_leaf(node)
                freed.append(node.pages)
        return np.concatenate(freed)

    def remove_subtree(self, node: RadixNode) -> IntArray:
        """Removes an unlocked node and its descendants, whose KV was never written; returns their pages."""
        subtree, freed = [node], [EMPTY]
        for parent in subtree:  # parents before children
            subtree.extend(parent.children.values())
        for descendant in reversed(subtree):
            assert descendant.lock_count == 0 and descendant.parent is not None
            self._remove_leaf(descendant)
            freed.append(descendant.pages)
        return np.concatenate(freed)

    def _queue_if_evictable(self, node: RadixNode) -> None:
        if node.is_evictable:
            self._eviction_queue.push(node)
            self._eviction_queue.compact(self._num_nodes, self.nodes)

    def _evict_leaf(self, leaf: RadixNode) -> None:
        """Removes a leaf whose KV was written; its parent remembers how it began."""
        parent = leaf.parent
        assert parent is not None
        if len(parent.evicted) < MAX_EVICTED:
            parent.evicted |= {leaf.key.item(0)}
        self._remove_leaf(leaf)

    def _remove_leaf(self, leaf: RadixNode) -> None:
        """Removes a leaf and moves its pins to its parent."""
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key.item(0)]
        self.num_cached -= len(leaf.key)
        self._num_nodes -= 1
        for holder in list(leaf.pins):
            parent.pins.add(holder)
            holder.on_evicted(len(leaf.key), parent)
        leaf.pins.clear()
        leaf.parent = None
        if self.listener is not None:
            self.listener.on_remove(leaf)
        self._queue_if_evictable(parent)
        self.drop_if_empty(parent)

    def _split(self, node: RadixNode, length: int) -> RadixNode:
        """Inserts a node with the first `length` tokens above `node`, which keeps the rest, its children and pins."""
        parent = node.parent
        assert parent is not None and 0 < length < len(node.key)
        eviction_key_before = eviction_key(node)
        upper = RadixNode(node.key[:length], node.pages[:length], parent, node.namespace)
        upper.lock_count, upper.last_used = node.lock_count, node.last_used
        self._num_nodes += 1
        parent.children[upper.key.item(0)] = upper
        node.key, node.pages, node.parent = node.key[length:], node.pages[length:], upper
        upper.children[node.key.item(0)] = node
        if self.listener is not None:
            self.listener.on_split(upper, node)
        if eviction_key(node) != eviction_key_before:  # a policy may look at the node's length
            self._queue_if_evictable(node)
        return upper

    def drop_if_empty(self, node: RadixNode) -> None:
        """Removes `node` if it is a root without children, locks and pins, so that inactive tenants cost no memory."""
        if node.parent is None and not node.children and node.lock_count == 0 and not node.pins:
            self._roots.pop(node.namespace, None)

    # -- integrity --------------------------------------------------------------------------------

    def nodes(self) -> Iterator[RadixNode]:
        """Yields every node, the roots included."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def check_integrity(self) -> None:
        """Raises AssertionError unless links, keys, locks, counts, pages and the eviction queue are consistent."""
        locked = cached = num_nodes = 0
        all_pages = [EMPTY]
        queued = self._eviction_queue.valid_nodes()
        for node in self.nodes():
            num_nodes += node.parent is not None
            assert not node.is_evictable or node in queued, "an evictable node is not in the eviction queue"
            assert len(node.key) == len(node.pages)
            assert (node.parent is None) == (len(node.key) == 0), "only a root has an empty key"
            assert node.end == len(node.key) + (node.parent.end if node.parent is not None else 0)
            assert node.lock_count >= sum(child.lock_count for child in node.children.values())
            for token, child in node.children.items():
                assert child.parent is node and child.namespace == node.namespace and int(child.key[0]) == token
            all_pages.append(node.pages)
            locked += len(node.key) if node.lock_count else 0
            cached += 0 if node.lock_count else len(node.key)
        ordered = np.sort(np.concatenate(all_pages))
        assert (ordered[1:] != ordered[:-1]).all(), "a page is in the tree twice"
        assert (cached, locked, num_nodes) == (self.num_cached, self.num_locked, self._num_nodes)
