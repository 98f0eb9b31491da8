"""Calls that must end by a certain time.

Knows: times and keys. Must not know: what happens when one is late.
"""

from __future__ import annotations

import heapq
import time
from typing import NamedTuple

from plait.runtime.scheduler.session import SessionKey

MAX_S = 7 * 24 * 3600.0


class Due(NamedTuple):
    """One deadline: monotonic seconds, and the call it is for."""

    at: float
    key: SessionKey
    call_id: int
    timeout_s: float


class Deadlines:
    """A heap of deadlines. Calls that end earlier are simply not found when their time comes."""

    def __init__(self) -> None:
        self._heap: list[Due] = []

    def add(self, key: SessionKey, call_id: int, timeout_s: float | None) -> None:
        """`timeout_s` from now; one that is no positive number is refused with its call and not kept here."""
        if timeout_s is not None and 0 < timeout_s <= MAX_S:
            heapq.heappush(self._heap, Due(time.monotonic() + timeout_s, key, call_id, timeout_s))

    def next(self) -> float | None:
        """Monotonic seconds of the earliest deadline."""
        return self._heap[0].at if self._heap else None

    def pop_late(self) -> list[Due]:
        """The deadlines that have passed."""
        late, now = [], time.monotonic()
        while self._heap and self._heap[0].at <= now:
            late.append(heapq.heappop(self._heap))
        return late
