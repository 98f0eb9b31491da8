"""Counts what would be available if some running sequences were released, without releasing them."""

from __future__ import annotations

from collections import Counter

from plait.runtime.kv_cache.radix_node import RadixNode
from plait.runtime.kv_cache.sequence import Sequence


class PlannedRelease:
    """The sequences that would be released. It holds for as long as the cache does not change.

    num_pages: that would be available then. A page that several of the sequences share counts once, and one that
    another running sequence uses does not count.
    """

    def __init__(self) -> None:
        self.num_pages = 0
        self._num_locks = Counter[RadixNode]()  # of these sequences

    def add(self, seq: Sequence) -> None:
        """Adds a running sequence."""
        self.num_pages += seq.num_computed - seq.num_in_tree
        node = seq.node
        while node is not None:
            self._num_locks[node] += 1
            if self._num_locks[node] == node.lock_count:
                self.num_pages += len(node.key)
            node = node.parent

    def leaves_locked(self, node: RadixNode) -> bool:
        """Whether a running sequence that is not released uses the node."""
        return node.lock_count > self._num_locks[node]
