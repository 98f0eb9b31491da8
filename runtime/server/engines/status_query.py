"""Queries the scheduler's counters. Concurrent callers share one query; a loop in a long step answers after it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from plait.runtime.client.client import Client
from plait.runtime.messages import Status

QUERY_TIMEOUT_S = 1.0  # how long a caller waits


class StatusQuery:
    """The status queries of one server. `client()` returns the current client or raises RuntimeGone."""

    def __init__(self, client: Callable[[], Client]) -> None:
        self._client = client
        self._queried_client: Client | None = None
        self._status_task: asyncio.Task[Status] | None = None

    async def status(self, timeout_s: float = QUERY_TIMEOUT_S) -> Status | None:
        """Returns the scheduler's counters, or None after `timeout_s` seconds without an answer. Raises RuntimeGone."""
        client = self._client()
        query = self._status_task
        if query is None or query.done() or self._queried_client is not client:
            self._queried_client = client
            query = self._status_task = asyncio.create_task(client.astatus())
            query.add_done_callback(_retrieve_exception)
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(query), timeout_s)
        return None


def _retrieve_exception(query: asyncio.Task[Status]) -> None:
    """Keeps asyncio from warning about the error of a query that no caller awaits any more."""
    if not query.cancelled():
        query.exception()
