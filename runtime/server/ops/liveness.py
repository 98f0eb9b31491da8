"""Checks that the scheduler's loop is running, by a status query that only the loop can answer.

Concurrent callers share one query; without callers no query is sent. A loop in a long step answers after it; it counts
as stuck once a query has been open for `stuck_after_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from plait.runtime.client.client import Client
from plait.runtime.errors import PlaitError
from plait.runtime.messages import Status

PROBE_TIMEOUT_S = 1.0  # how long a caller waits


class LivenessProbe:
    """The liveness probe of one server. `client()` returns the current client or raises RuntimeGone."""

    def __init__(self, client: Callable[[], Client], stuck_after_s: float) -> None:
        self._client, self._stuck_after_s = client, stuck_after_s
        self._queried_client: Client | None = None
        self._query_start_time = 0.0
        self._status_task: asyncio.Task[Status] | None = None

    async def query_status(self, timeout_s: float = PROBE_TIMEOUT_S) -> Status | None:
        """Returns the scheduler's counters, or None after `timeout_s` seconds without an answer. Raises RuntimeGone."""
        client = self._client()
        query = self._status_task
        if query is None or query.done() or self._queried_client is not client:
            self._queried_client, self._query_start_time = client, time.monotonic()
            query = self._status_task = asyncio.create_task(client.astatus())
            query.add_done_callback(_retrieve_exception)
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(query), timeout_s)
        return None

    async def is_alive(self) -> bool:
        """Returns False if the runtime is gone, or has not answered a query for `stuck_after_s`."""
        try:
            status = await self.query_status(min(PROBE_TIMEOUT_S, self._stuck_after_s))
        except PlaitError:
            return False
        return status is not None or time.monotonic() - self._query_start_time < self._stuck_after_s


def _retrieve_exception(query: asyncio.Task[Status]) -> None:
    """Keeps asyncio from warning about the error of a query that no caller awaits any more."""
    if not query.cancelled():
        query.exception()
