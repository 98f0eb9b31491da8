"""The deadlines of all calls with a timeout."""

from __future__ import annotations

import heapq
import time
from typing import NamedTuple

from plait.runtime.sampling_params import MAX_TIMEOUT_S
from plait.runtime.scheduler.sessions.session import SessionKey


class Deadline(NamedTuple):
    """The deadline of one call. `at`: monotonic seconds."""

    at: float
    key: SessionKey
    call_id: int
    timeout_s: float


class Deadlines:
    """A heap of deadlines with lazy deletion.

    Deadlines of ended calls are skipped, and dropped when they are the majority.
    """

    def __init__(self) -> None:
        self._heap: list[Deadline] = []
        self._active: dict[tuple[SessionKey, int], Deadline] = {}

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, key: SessionKey, call_id: int, timeout_s: float | None) -> None:
        """Adds a deadline `timeout_s` seconds from now. Ignores an invalid timeout: its call will be rejected."""
        if timeout_s is not None and 0 < timeout_s <= MAX_TIMEOUT_S:
            deadline = self._active[key, call_id] = Deadline(time.monotonic() + timeout_s, key, call_id, timeout_s)
            heapq.heappush(self._heap, deadline)

    def drop(self, key: SessionKey, call_id: int) -> None:
        """Removes the deadline of a call that has ended."""
        self._active.pop((key, call_id), None)
        if len(self._heap) > 2 * len(self._active) + 64:
            self._heap = sorted(self._active.values())

    def next(self) -> float | None:
        """Returns the earliest deadline in monotonic seconds, or None."""
        self._skip_inactive()
        return self._heap[0].at if self._heap else None

    def pop_expired(self) -> list[Deadline]:
        """Removes and returns the deadlines that have passed."""
        expired, now = [], time.monotonic()
        self._skip_inactive()
        while self._heap and self._heap[0].at <= now:
            deadline = heapq.heappop(self._heap)
            del self._active[deadline.key, deadline.call_id]
            expired.append(deadline)
            self._skip_inactive()
        return expired

    def _skip_inactive(self) -> None:
        while self._heap and self._active.get((self._heap[0].key, self._heap[0].call_id)) is not self._heap[0]:
            heapq.heappop(self._heap)
