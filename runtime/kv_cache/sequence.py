"""A sequence: tokens, and the pages that hold the KV of the first of them.

    tokens  [0 ............................................. len)
    pages   [0 ........ num_in_tree ........ num_computed)
             in the tree, under `node`  |  private

Knows: its own arrays. Must not know: the pool or the tree beyond the node it stands on.
"""

from __future__ import annotations

import numpy as np

from plait.runtime.kv_cache.page_pool import IntArray
from plait.runtime.kv_cache.radix_tree import CacheNamespace, RadixNode


class IntBuffer:
    """A growing int32 array whose live part, `size` long, is a numpy view. `version` changes with all but growth."""

    __slots__ = ("_data", "size", "version")

    def __init__(self, values: IntArray | list[int] | None = None) -> None:
        self._data = np.array(values if values is not None else [], dtype=np.int32)
        self.size = len(self._data)
        self.version = 0

    def __len__(self) -> int:
        return self.size

    def view(self) -> IntArray:
        """[len] int32, valid until the next change."""
        return self._data[: self.size]

    def extend(self, values: IntArray | list[int]) -> None:
        need = self.size + len(values)
        if need > len(self._data):
            self._grow(need)
        self._data[self.size : need] = values
        self.size = need

    def append(self, value: int) -> None:
        """`extend` by one: a step does it twice for every row."""
        if self.size == len(self._data):
            self._grow(self.size + 1)
        self._data[self.size] = value
        self.size += 1

    def at(self, index: int) -> int:
        """The value at one place."""
        assert index < self.size
        return int(self._data[index])

    def _grow(self, need: int) -> None:
        grown = np.empty(max(need, 2 * len(self._data), 64), dtype=np.int32)
        grown[: self.size] = self.view()
        self._data = grown

    def truncate(self, size: int) -> None:
        assert 0 <= size <= self.size
        self.version += size < self.size
        self.size = size

    def bump_version(self) -> None:
        """Counts as a change: whoever keeps a copy that runs ahead of this one has to forget it."""
        self.version += 1

    def replace(self, start: int, values: IntArray) -> None:
        """Writes values over [start, start + len(values))."""
        end = start + len(values)
        assert 0 <= start <= end <= self.size
        self.version += not np.array_equal(self._data[start:end], values)
        self._data[start:end] = values


class Sequence:
    """See the file's header. Locked while it runs; between calls it only pins its node (`on_evicted` shortens it)."""

    __slots__ = ("is_locked", "node", "num_in_tree", "pages", "namespace", "tokens")

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
        return self.pages.size

    def on_evicted(self, num_tokens: int, parent: RadixNode) -> None:
        assert not self.is_locked
        self.num_in_tree -= num_tokens
        self.pages.truncate(self.num_in_tree)
        self.node = parent
