"""The free list of KV pages. A page holds the KV of one token in every layer.

Knows: which pages are free. Must not know: what is in a page, or who holds it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]


class PagePool:
    """A stack of free page numbers; pages come in ascending order where the stack allows, so runs stay together.

    >>> pool = PagePool(4)
    >>> pool.allocate(2).tolist(), pool.num_free
    ([0, 1], 2)
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = np.arange(total - 1, -1, -1, dtype=np.int32)  # the top of the stack is its end
        self.num_free = total

    def allocate(self, count: int) -> IntArray:
        """`count` free pages, int32, ascending. The caller makes sure that there are as many."""
        assert 0 <= count <= self.num_free, (count, self.num_free)
        self.num_free -= count
        pages = self._free[self.num_free : self.num_free + count][::-1]
        if (pages[1:] < pages[:-1]).any():  # only then: sorting lets go of the interpreter's lock
            return np.sort(pages)
        return pages.copy()

    def allocate_one(self) -> int:
        """One free page; the caller makes sure that there is one."""
        assert self.num_free
        self.num_free -= 1
        return int(self._free[self.num_free])

    def release(self, pages: IntArray) -> None:
        """Gives pages back."""
        count = len(pages)
        assert self.num_free + count <= self.total
        self._free[self.num_free : self.num_free + count] = pages[::-1]
        self.num_free += count

    def free_pages(self) -> IntArray:
        """The free pages, in no particular order (for checks)."""
        return self._free[: self.num_free]
