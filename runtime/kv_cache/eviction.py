"""The eviction policy: `eviction_key` orders the evictable nodes, `EvictionQueue` keeps them in that order.

To change the policy, change `eviction_key`. Whatever changes a key must push the node again: `RadixTree` does so when
a node is unlocked, loses its last child, is split, or gains its first or loses its last pin. End a key that has ties
with `last_used`.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable

from plait.runtime.kv_cache.radix_node import RadixNode

EVICTION_HEAP_SLACK = 256  # heap entries allowed beyond two for each node
EvictionKey = tuple[int, ...]


def eviction_key(node: RadixNode) -> EvictionKey:
    """The sort key of an evictable node; the smallest is evicted first.

    Nodes without pins come before nodes on which an idle session counts, and among these the least recently used first.
    """
    return int(bool(node.pins)), node.last_used


class EvictionQueue:
    """A heap of evictable nodes with lazy deletion.

    An entry is valid while its node is evictable and still has the entry's key. Other entries are skipped when they
    reach the top, and are all dropped once they are the majority.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[EvictionKey, int, RadixNode]] = []
        self._serials = itertools.count()  # breaks ties, so that nodes are never compared

    def push(self, node: RadixNode) -> None:
        """Adds an evictable node, or adds it again after its key changed."""
        heapq.heappush(self._heap, (eviction_key(node), next(self._serials), node))

    def pop(self) -> RadixNode | None:
        """Removes and returns the node to evict next; None if nothing is evictable."""
        while self._heap:
            key, _, node = heapq.heappop(self._heap)
            if node.is_evictable and key == eviction_key(node):
                return node
        return None

    def compact(self, num_nodes: int, all_nodes: Callable[[], Iterable[RadixNode]]) -> None:
        """Rebuilds the heap from `all_nodes()` if most entries must be stale. `num_nodes`: nodes in the tree."""
        if len(self._heap) > 2 * num_nodes + EVICTION_HEAP_SLACK:
            self._heap = [(eviction_key(node), next(self._serials), node) for node in all_nodes() if node.is_evictable]
            heapq.heapify(self._heap)

    def valid_nodes(self) -> set[RadixNode]:
        """The nodes that `pop` can return, for integrity checks."""
        return {node for key, _, node in self._heap if node.is_evictable and key == eviction_key(node)}
