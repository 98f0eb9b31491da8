"""A sequence: tokens, and the pages that hold the KV of the first of them.

tokens  [0 ............................................. len)
pages   [0 ........ num_in_tree ........ num_computed)
         in the tree, under `node`  |  private
"""

from __future__ import annotations

import numpy as np

from plait.runtime.arrays import IntArray
from plait.runtime.kv_cache.radix_node import CacheNamespace, RadixNode


class IntBuffer:
    """A growable int32 array of `size` values. `version` changes with every change except growth."""

    __slots__ = ("_data", "size", "version")

    def __init__(self, values: IntArray | list[int] | None = None) -> None:
        self._data = np.array(values if values is not None else [], dtype=np.int32)
        self.size = len(self._data)
        self.version = 0

    def __len__(self) -> int:
        return self.size

    def view(self) -> IntArray:
        """A view [size] int32 of the values, valid until the next change."""
        return self._data[: self.size]

    def extend(self, values: IntArray | list[int]) -> None:
        new_size = self.size + len(values)
        if new_size > len(self._data):
            self._grow(new_size)
        self._data[self.size : new_size] = values
        self.size = new_size

    def append(self, value: int) -> None:
        """Appends one value. Faster than `extend`; every step does it twice for each request."""
        if self.size == len(self._data):
            self._grow(self.size + 1)
        self._data[self.size] = value
        self.size += 1

    def at(self, index: int) -> int:
        """Returns one value as an int."""
        assert index < self.size
        return int(self._data[index])

    def _grow(self, capacity: int) -> None:
        grown = np.empty(max(capacity, 2 * len(self._data), 64), dtype=np.int32)
        grown[: self.size] = self.view()
        self._data = grown

    def truncate(self, size: int) -> None:
        assert 0 <= size <= self.size
        self.version += size < self.size
        self.size = size

    def bump_version(self) -> None:
        """Invalidates copies that run ahead of this array, as a change of values would."""
        self.version += 1

    def replace(self, start: int, values: IntArray) -> None:
        """Overwrites [start, start + len(values))."""
        end = start + len(values)
        assert 0 <= start <= end <= self.size
        self.version += not np.array_equal(self._data[start:end], values)
        self._data[start:end] = values


class Sequence:
    """Tokens and pages, as drawn in the file's header.

    A running sequence locks its node in the tree. Between calls it only pins the node, so that eviction may shorten it.
    """

    __slots__ = ("is_locked", "namespace", "node", "num_in_tree", "pages", "tokens")

    def __init__(self, namespace: CacheNamespace, tokens: IntArray | list[int] | None = None) -> None:
        self.namespace = namespace
        self.tokens = IntBuffer(tokens)
        self.pages = IntBuffer()
        self.num_in_tree = 0
        self.node: RadixNode | None = None
        self.is_locked = False

    def __len__(self) -> int:
        return self.tokens.size

    @property
    def num_computed(self) -> int:
        """Tokens that have a page: their KV is computed, or is written by the current step."""
        return self.pages.size

    def on_evicted(self, num_tokens: int, parent: RadixNode) -> None:
        """See `PinHolder`."""
        assert not self.is_locked
        self.num_in_tree -= num_tokens
        self.pages.truncate(self.num_in_tree)
        self.node = parent
