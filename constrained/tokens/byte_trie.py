r"""A prefix tree of byte strings in flat arrays, so that one numpy call advances many nodes.

      0           nodes are numbered level by level, and within a level in byte order,
   a/   \b        so the children of a node are neighbours:
   1     2            parent        = [-1, 0, 0, 1, 1]
a/   \c              byte          = [ 0, a, b, a, c]
3     4               child_offsets = [ 1, 3, 5, 5, 5, 5]   children of n: child_offsets[n] .. child_offsets[n + 1]
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
NO_CHILD = -1
_BLOCK = 1 << 15  # strings that are measured without a look at other threads, for about a millisecond
_WORD = 8  # bytes that are compared at once


class ByteTrie:
    """The prefix tree of `strings`, whose entries are their positions; strings may occur twice.

    Empty strings and the positions in `without` are no entries. No part of the work keeps other threads of the
    interpreter waiting for more than some milliseconds.

    `child_offsets` [N+1] bounds each node's children, `byte` [N] labels the edge into a node, and `entry_offsets` [N+1]
    bounds each node's slice of `entry_ids`, the entries that end at the node, in order. `parent` [N] is -1 for the
    root. `sorted_entry_ids` has all entries in byte order. `num_by_first_byte` [256] counts the entries.

    >>> trie = ByteTrie([b"", b"aa", b"ac", b"b"])
    >>> len(trie), trie.child_offsets.tolist(), trie.entry_ids.tolist()
    (5, [1, 3, 5, 5, 5, 5], [3, 1, 2])
    """

    def __init__(self, strings: Sequence[bytes], without: Collection[int] = ()) -> None:
        text, offsets, lengths = flatten(strings)
        is_entry = lengths > 0
        is_entry[list(without)] = False
        ordered = _byte_order(text, offsets, lengths, np.flatnonzero(is_entry))
        offsets, lengths = offsets[ordered], lengths[ordered]
        node, alive = np.zeros(len(ordered), np.int64), np.arange(len(ordered))
        parents, labels, count, depth = [np.array([-1])], [np.zeros(1, np.uint8)], 1, 0
        while len(alive):
            parent, label = node[alive], text[offsets[alive] + depth]
            is_new = np.ones(len(alive), np.bool_)
            is_new[1:] = (parent[1:] != parent[:-1]) | (label[1:] != label[:-1])
            node[alive] = count - 1 + np.cumsum(is_new)
            parents.append(parent[is_new])
            labels.append(label[is_new])
            count, depth = count + len(parents[-1]), depth + 1
            alive = alive[lengths[alive] > depth]
        parent = np.concatenate(parents)
        self.parent: Int32Array = parent.astype(np.int32)
        self.byte: NDArray[np.uint8] = np.concatenate(labels)
        bounds = np.arange(count + 1)
        self.child_offsets: Int32Array = np.searchsorted(parent, bounds).astype(np.int32)
        by_node = np.argsort(node, kind="stable")
        self.sorted_entry_ids: Int32Array = ordered.astype(np.int32)
        self.entry_ids: Int32Array = self.sorted_entry_ids[by_node]
        self.entry_offsets: Int32Array = np.searchsorted(node[by_node], bounds).astype(np.int32)
        self.num_by_first_byte: Int32Array = np.bincount(text[offsets], minlength=256).astype(np.int32)
        self._keys: Int64Array = parent * 256 + self.byte

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

    def find(self, text: bytes) -> int:
        """Returns the node of a text; NO_CHILD (-1) if no string begins with it.

        >>> ByteTrie([b"aa", b"ac"]).find(b"a"), ByteTrie([b"aa", b"ac"]).find(b"ab")
        (1, -1)
        """
        node = 0
        for label in text:
            begin, end = self.child_offsets[node], self.child_offsets[node + 1]
            node = int(begin + np.searchsorted(self.byte[begin:end], label))
            if node == end or self.byte[node] != label:
                return NO_CHILD
        return node


def flatten(strings: Sequence[bytes]) -> tuple[NDArray[np.uint8], Int64Array, Int64Array]:
    """Returns the bytes of all strings, where each begins, and the length of each.

    >>> [part.tolist() for part in flatten([b"ab", b"", b"c"])]
    [[97, 98, 99], [0, 2, 2], [2, 0, 1]]
    """
    blocks = (strings[begin : begin + _BLOCK] for begin in range(0, len(strings), _BLOCK))
    lengths = np.concatenate([np.zeros(0, np.int64), *(np.fromiter(map(len, block), np.int64) for block in blocks)])
    return np.frombuffer(b"".join(strings), np.uint8), np.cumsum(lengths) - lengths, lengths


def _byte_order(text: NDArray[np.uint8], offsets: Int64Array, lengths: Int64Array, chosen: Int64Array) -> Int64Array:
    """Returns `chosen`, the positions of some strings, in byte order; equal strings in order of position.

    It sorts by the last word of eight bytes first, as a radix sort does. Sorting numbers releases the interpreter's
    lock, which sorting a list of bytes does not.
    """
    order = np.zeros(0, np.int64)  # the strings that are longer than the word at hand, sorted by what follows it
    num_words = -(-lengths[chosen] // _WORD)
    columns = np.arange(_WORD)
    for word in range(int(num_words.max(initial=0)) - 1, -1, -1):
        last = chosen[num_words == word + 1]  # its words before this one are looked at later
        last = last[np.argsort(lengths[last], kind="stable")]  # a text before the same text with zeros behind it
        order = np.concatenate((last, order))
        rest = np.minimum(lengths[order] - word * _WORD, _WORD)
        places = np.minimum(offsets[order, None] + (word * _WORD + columns), len(text) - 1)
        letters = np.where(columns < rest[:, None], text[places], 0)
        order = order[np.argsort(np.ascontiguousarray(letters).view(">u8")[:, 0].astype(np.uint64), kind="stable")]
    return order


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
