r"""A prefix tree of byte strings in flat arrays, so that one numpy call advances many nodes.

      0           nodes are numbered level by level, and within a level in byte order,
   a/   \b        so the children of a node are neighbours:
   1     2            parent        = [-1, 0, 0, 1, 1]
a/   \c              byte          = [ 0, a, b, a, c]
3     4               child_offsets = [ 1, 3, 5, 5, 5, 5]   children of n: child_offsets[n] .. child_offsets[n + 1]
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
NO_CHILD = -1


class ByteTrie:
    """The prefix tree of `entries`, pairs of (number, non-empty byte string); strings may occur twice.

    `child_offsets` [N+1] bounds each node's children, `byte` [N] labels the edge into a node, and `entry_offsets` [N+1]
    bounds each node's slice of `entry_ids`, the entries that end at the node. `parent` [N] is -1 for the root.
    `num_by_first_byte` [256] counts the entries.

    >>> trie = ByteTrie([(7, b"aa"), (8, b"ac"), (9, b"b")])
    >>> len(trie), trie.child_offsets.tolist(), trie.entry_ids.tolist()
    (5, [1, 3, 5, 5, 5, 5], [9, 7, 8])
    """

    def __init__(self, entries: Iterable[tuple[int, bytes]]) -> None:
        ordered = sorted(entries, key=lambda entry: entry[1])
        text = np.frombuffer(b"".join(string for _, string in ordered), np.uint8)
        lengths = np.array([len(string) for _, string in ordered], np.int64)
        offsets = np.cumsum(lengths) - lengths
        node = np.zeros(len(ordered), np.int64)
        parents, labels, count = [np.array([-1])], [np.zeros(1, np.uint8)], 1
        for depth in range(int(lengths.max(initial=0))):
            alive = np.flatnonzero(lengths > depth)
            parent, label = node[alive], text[offsets[alive] + depth]
            is_new = np.ones(len(alive), np.bool_)
            is_new[1:] = (parent[1:] != parent[:-1]) | (label[1:] != label[:-1])
            node[alive] = count - 1 + np.cumsum(is_new)
            parents.append(parent[is_new])
            labels.append(label[is_new])
            count += int(is_new.sum())
        parent = np.concatenate(parents)
        self.parent: Int32Array = parent.astype(np.int32)
        self.byte: NDArray[np.uint8] = np.concatenate(labels)
        bounds = np.arange(count + 1)
        self.child_offsets: Int32Array = np.searchsorted(parent, bounds).astype(np.int32)
        by_node = np.argsort(node, kind="stable")
        entry_ids = np.array([number for number, _ in ordered], np.int32)
        self.entry_ids: Int32Array = entry_ids[by_node]
        self.entry_offsets: Int32Array = np.searchsorted(node[by_node], bounds).astype(np.int32)
        self.sorted_entry_ids: Int32Array = entry_ids
        self.num_by_first_byte: Int32Array = np.bincount(text[offsets], minlength=256).astype(np.int32)
        self._keys: NDArray[np.int64] = parent * 256 + self.byte

    def __len__(self) -> int:
        return len(self.byte)

    @property
    def is_terminal(self) -> NDArray[np.bool_]:
        """Whether an entry ends at each node, bool [N]."""
        return np.diff(self.entry_offsets) > 0

    def step(self, nodes: Int32Array, labels: NDArray[np.uint8]) -> Int32Array:
        """Returns the child of each node along each label, int32 [n]; NO_CHILD (-1) where there is none."""
        keys = nodes.astype(np.int64) * 256 + labels
        children = np.searchsorted(self._keys, keys)
        children[children == len(self._keys)] = 0
        return np.where(self._keys[children] == keys, children, NO_CHILD).astype(np.int32)


def expand_slices(offsets: Int32Array, rows: Int32Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns every index in the slices offsets[r]..offsets[r+1] for r in `rows`, and the position in `rows` of each.

    >>> [part.tolist() for part in expand_slices(np.array([0, 2, 5], np.int32), np.array([1, 0], np.int32))]
    [[2, 3, 4, 0, 1], [0, 0, 0, 1, 1]]
    """
    begin = offsets[rows]
    counts = (offsets[rows + 1] - begin).astype(np.int64)
    origin = np.repeat(np.arange(len(rows)), counts)
    ends = np.cumsum(counts)
    return np.arange(len(origin)) - np.repeat(ends - counts - begin, counts), origin
