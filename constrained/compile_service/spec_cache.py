"""An LRU cache keyed by spec and bounded in bytes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

import msgspec

from plait.constrained.specs import Spec

Value = TypeVar("Value")


class SpecCache(Generic[Value]):
    """Holds values of at most `max_bytes` in all, specs included. A larger value is not stored.

    >>> cache = SpecCache[Grammar](64 << 20)                              # doctest: +SKIP
    >>> cache.get(Regex("a")) is None                                     # doctest: +SKIP
    True
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._entries: OrderedDict[Spec, tuple[Value, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, spec: Spec) -> Value | None:
        """Returns the value of `spec` and marks it as most recently used; None if there is none."""
        entry = self._entries.get(spec)
        if entry is None:
            return None
        self._entries.move_to_end(spec)
        return entry[0]

    def put(self, spec: Spec, value: Value, nbytes: int) -> None:
        """Stores `value` of `nbytes` and evicts the least recently used entries until it fits."""
        cost = nbytes + 2 * len(msgspec.msgpack.encode(spec))
        self.drop(spec)
        if cost > self.max_bytes:
            return
        while self.nbytes + cost > self.max_bytes:
            self.drop(next(iter(self._entries)))
        self._entries[spec] = (value, cost)
        self.nbytes += cost

    def drop(self, spec: Spec) -> None:
        """Removes the entry of `spec`, if any."""
        _, cost = self._entries.pop(spec, (None, 0))
        self.nbytes -= cost
