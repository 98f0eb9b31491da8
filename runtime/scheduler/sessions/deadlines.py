"""Calls that must end by a certain time.

Knows: times and keys. Must not know: what happens when one is late.
"""

from __future__ import annotations

import heapq
import time
from typing import NamedTuple

from plait.runtime.scheduler.sessions.session import SessionKey

MAX_TIMEOUT_S = 7 * 24 * 3600.0


class Deadline(NamedTuple):
    """One deadline: monotonic seconds, and the call it is for."""

    at: float
    key: SessionKey
    call_id: int
    timeout_s: float


class Deadlines:
    """A heap of deadlines. Those of calls that ended earlier are skipped, and swept out when they are the most."""

    def __init__(self) -> None:
        self._heap: list[Deadline] = []
        self._live: dict[tuple[SessionKey, int], Deadline] = {}

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, key: SessionKey, call_id: int, timeout_s: float | None) -> None:
        """`timeout_s` from now; one that is no positive number is refused with its call and not kept here."""
        if timeout_s is not None and 0 < timeout_s <= MAX_TIMEOUT_S:
            due = self._live[key, call_id] = Deadline(time.monotonic() + timeout_s, key, call_id, timeout_s)
            heapq.heappush(self._heap, due)

    def drop(self, key: SessionKey, call_id: int) -> None:
        """The call is over."""
        self._live.pop((key, call_id), None)
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = sorted(self._live.values())

    def next(self) -> float | None:
        """Monotonic seconds of the earliest deadline."""
        self._skip_dead()
        return self._heap[0].at if self._heap else None

    def pop_expired(self) -> list[Deadline]:
        """The deadlines that have passed."""
        late, now = [], time.monotonic()
        self._skip_dead()
        while self._heap and self._heap[0].at <= now:
            due = heapq.heappop(self._heap)
            del self._live[due.key, due.call_id]
            late.append(due)
            self._skip_dead()
        return late

    def _skip_dead(self) -> None:
        while self._heap and self._live.get((self._heap[0].key, self._heap[0].call_id)) is not self._heap[0]:
            heapq.heappop(self._heap)
