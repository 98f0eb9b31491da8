"""What is known of specs, the least recently used forgotten first, bounded in bytes.

Knows: what each thing kept is said to weigh. Must not know: how it was made.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

import msgspec

from plait.constrained.specs import Spec

Value = TypeVar("Value")


class SpecCache(Generic[Value]):
    """Holds things of at most `max_bytes` together, their specs included; one that is larger is not kept.

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
        """What is kept of `spec`, now the most recently used; None where nothing is."""
        found = self._entries.get(spec)
        if found is None:
            return None
        self._entries.move_to_end(spec)
        return found[0]

    def put(self, spec: Spec, value: Value, nbytes: int) -> None:
        """Keep `value`, which weighs `nbytes`, and forget what no longer fits."""
        cost = nbytes + 2 * len(msgspec.msgpack.encode(spec))
        self.drop(spec)
        if cost > self.max_bytes:
            return
        while self.nbytes + cost > self.max_bytes:
            self.drop(next(iter(self._entries)))
        self._entries[spec] = (value, cost)
        self.nbytes += cost

    def drop(self, spec: Spec) -> None:
        """Forget `spec`."""
        _, cost = self._entries.pop(spec, (None, 0))
        self.nbytes -= cost
