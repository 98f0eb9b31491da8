"""The free list of KV pages. A page holds the KV of one token in every layer."""

from __future__ import annotations

import numpy as np

from plait.runtime.arrays import IntArray


class PagePool:
    """A stack of free page numbers.

    Pages are handed out in ascending order where the stack allows it, so that consecutive tokens get consecutive pages.

    >>> pool = PagePool(4)
    >>> pool.allocate(2).tolist(), pool.num_free
    ([0, 1], 2)
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = np.arange(total - 1, -1, -1, dtype=np.int32)  # the top of the stack is the end of the array
        self.num_free = total

    def allocate(self, count: int) -> IntArray:
        """Returns `count` free pages [count] int32, ascending. The caller checks `num_free` first."""
        assert 0 <= count <= self.num_free, (count, self.num_free)
        self.num_free -= count
        pages = self._free[self.num_free : self.num_free + count][::-1]
        if (pages[1:] < pages[:-1]).any():  # sort only if needed: sorting releases the GIL
            return np.sort(pages)
        return pages.copy()

    def allocate_one(self) -> int:
        """Returns one free page. The caller checks `num_free` first."""
        assert self.num_free
        self.num_free -= 1
        return int(self._free[self.num_free])

    def release(self, pages: IntArray) -> None:
        """Returns pages to the free list."""
        count = len(pages)
        assert self.num_free + count <= self.total
        self._free[self.num_free : self.num_free + count] = pages[::-1]
        self.num_free += count

    def free_pages(self) -> IntArray:
        """The free pages in no particular order, for integrity checks."""
        return self._free[: self.num_free]
