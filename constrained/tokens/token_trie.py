r"""The tokens of a vocabulary as a prefix tree whose edges are classes of bytes, so that equal tokens share a node.

An automaton that treats all letters alike cannot tell "ab" from "xy". With the letters in one class both tokens end at
one node, and a tree of 100,000 nodes shrinks to a few dozen. `constrained/dfa/token_dfa.py` has the partitions.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import cached_property
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from plait.constrained.tokens.byte_trie import ByteTrie, Int32Array, expand_slices

NO_NODE = -1
DEAD_CLASS = 0  # of the bytes that no text contains; tokens with such a byte have no node
SINGLE_BYTES = b""  # the partition in which every byte is a class
MAX_TRIES = 16  # kept for one vocabulary; 0.6 MB each for 49,152 tokens, up to 2 MB with many classes


class TokenTrie:
    """The prefix tree of the tokens of `tokens` under `partition`, the class of each byte as 256 bytes.

    Nodes are numbered level by level, as in ByteTrie: `child_offsets` [N+1], `label` [N] (the class of the edge into a
    node). `node_of_token` [V] is the node at which each token ends, or -1; `has_tokens` [N] whether any token does.
    `byte` [N] is one byte of each node's class. `partition` SINGLE_BYTES: every byte is a class of its own.

    >>> tokens = ByteTrie([b"ab", b"xy", b"a", b"a1"])
    >>> letters = TokenTrie(tokens, bytes(97 <= byte <= 122 for byte in range(256)), width=4)
    >>> letters.child_offsets.tolist(), letters.node_of_token.tolist()
    ([1, 2, 3, 3], [2, 2, 1, -1])
    """

    def __init__(self, tokens: ByteTrie, partition: bytes, width: int) -> None:
        self.partition = partition
        self._tokens = tokens
        ends = np.full(width, NO_NODE, np.int32)
        ends[tokens.entry_ids] = np.repeat(np.arange(len(tokens), dtype=np.int32), np.diff(tokens.entry_offsets))
        if partition == SINGLE_BYTES:
            self.child_offsets: Int32Array = tokens.child_offsets
            self.label: NDArray[np.uint8] = tokens.byte
            self.byte: NDArray[np.uint8] = tokens.byte
            self.node_of_token: Int32Array = ends
        else:
            classes = np.frombuffer(partition, np.uint8)
            byte_of_class = np.zeros(256, np.uint8)
            byte_of_class[classes[::-1]] = np.arange(256, dtype=np.uint8)[::-1]
            self.child_offsets, self.label, merged = _merge_nodes(tokens, classes)
            self.byte = byte_of_class[self.label]
            self.node_of_token = np.where(ends >= 0, merged[ends], NO_NODE).astype(np.int32)
        self._index_of_token = self.node_of_token.astype(np.intp)  # indexing with it is three times as fast
        is_end = np.zeros(len(self.label) + 1, np.bool_)  # the last one is that of NO_NODE
        is_end[self.node_of_token] = True
        self.has_tokens: NDArray[np.bool_] = is_end[:-1]

    def __len__(self) -> int:
        return len(self.label)

    @property
    def nbytes(self) -> int:
        """Memory in bytes, with what is computed on demand; 0 if it is that of the vocabulary."""
        return 0 if self.partition == SINGLE_BYTES else 12 * len(self.node_of_token) + 19 * len(self) + 1000

    @property
    def has_entry_lists(self) -> bool:
        """Whether `tokens_at` costs as much as it returns; otherwise it looks at all tokens, as `members` does."""
        return self.partition == SINGLE_BYTES

    def tokens_at(self, nodes: Int32Array) -> Int32Array:
        """Returns the tokens that end at one of the distinct `nodes`, in no particular order."""
        if not self.has_entry_lists:
            return np.flatnonzero(self.members(nodes)).astype(np.int32)
        entries, _ = expand_slices(self._tokens.entry_offsets, nodes)
        return self._tokens.entry_ids[entries]

    def members(self, nodes: Int32Array) -> NDArray[np.bool_]:
        """Returns for each token whether it ends at one of `nodes`, bool [V]."""
        is_given = np.zeros(len(self) + 1, np.bool_)  # index -1 is that of no node
        is_given[nodes] = True
        return is_given[self._index_of_token]

    @cached_property
    def lowest_token(self) -> Int32Array:
        """The lowest id of the tokens that end at each node, int32 [N]; -1 where none does."""
        return self._last_assigned(np.sort(self._tokens.entry_ids)[::-1])

    @cached_property
    def first_token(self) -> Int32Array:
        """The first token in byte order that ends at each node, int32 [N]; -1 where none does."""
        return self._last_assigned(self._tokens.sorted_entry_ids[::-1])

    @cached_property
    def last_token(self) -> Int32Array:
        """The last token in byte order that ends at each node, int32 [N]; -1 where none does."""
        return self._last_assigned(self._tokens.sorted_entry_ids)

    def _last_assigned(self, tokens: Int32Array) -> Int32Array:
        """Returns the last of `tokens` that ends at each node."""
        found = np.full(len(self) + 1, -1, np.int32)
        found[self.node_of_token[tokens]] = tokens  # of several values for an index the last one remains
        return found[:-1]


def _merge_nodes(tokens: ByteTrie, classes: NDArray[np.uint8]) -> tuple[Int32Array, NDArray[np.uint8], Int32Array]:
    """Returns `child_offsets` and `label` of the merged tree, and the merged node of each node of `tokens`, or -1."""
    num_classes = int(classes.max()) + 1
    label_of_node = classes[tokens.byte]
    merged = np.full(len(tokens), NO_NODE, np.int32)
    merged[0] = 0
    first, last, begin, count = 0, 1, 0, 1  # a level of `tokens`, and its merged nodes
    labels, num_children = [np.zeros(1, np.uint8)], list[NDArray[np.int64]]()
    while count > begin:
        first, last = last, int(tokens.child_offsets[last])
        parent, label = merged[tokens.parent[first:last]], label_of_node[first:last]
        alive = np.flatnonzero((parent != NO_NODE) & (label != DEAD_CLASS))
        keys = (parent[alive] - begin).astype(np.int64) * num_classes + label[alive]
        distinct, numbers = _number(keys, (count - begin) * num_classes)
        num_children.append(np.bincount(distinct // num_classes, minlength=count - begin))
        labels.append((distinct % num_classes).astype(np.uint8))
        merged[first + alive] = count + numbers
        begin, count = count, count + len(distinct)
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(np.concatenate(num_children)))) + 1
    return offsets.astype(np.int32), np.concatenate(labels), merged


def _number(keys: NDArray[np.int64], end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the distinct `keys`, which lie in [0, end), in order, and the place of each key among them."""
    if end > 8 * len(keys) + 4096:
        distinct, numbers = np.unique(keys, return_inverse=True)
        return distinct, numbers
    is_key = np.zeros(end, np.bool_)  # faster than sorting
    is_key[keys] = True
    return np.flatnonzero(is_key), (np.cumsum(is_key) - 1)[keys]


class TokenTries:
    """The token tries of a vocabulary of `width` tokens by partition; the last 16 are kept. Thread-safe.

    >>> TokenTries(ByteTrie([b"a"]), 1).get(SINGLE_BYTES).node_of_token.tolist()
    [1]
    """

    def __init__(self, tokens: ByteTrie, width: int) -> None:
        self._tokens, self._width = tokens, width
        self._tries = OrderedDict[bytes, TokenTrie]()
        self._lock = Lock()

    def __contains__(self, partition: object) -> bool:
        return partition in self._tries

    def get(self, partition: bytes) -> TokenTrie:
        """Returns the trie of a partition; a new one takes a few ms for 49,152 tokens."""
        with self._lock:
            trie = self._tries.get(partition)
            if trie is None:
                trie = self._tries[partition] = TokenTrie(self._tokens, partition, self._width)
                if len(self._tries) > MAX_TRIES:
                    self._tries.popitem(last=False)
            self._tries.move_to_end(partition)
            return trie
