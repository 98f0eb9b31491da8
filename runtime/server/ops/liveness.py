"""Whether the scheduler's loop beats: a question that only the loop can answer, asked when somebody wants to know.

Questions are shared: however many ask at once, the scheduler is asked once. An idle server asks nothing. A loop that is
in a long step answers after it; it counts as stuck when one question has been open for `stuck_after_s`.

Knows: clients, Status, time. Must not know: HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from plait.runtime.client.client import Client
from plait.runtime.errors import PlaitError
from plait.runtime.messages import Status

PROBE_TIMEOUT_S = 1.0  # how long one who asks is kept waiting


class LivenessProbe:
    """One per server. `client()` raises RuntimeGone while there is none."""

    def __init__(self, client: Callable[[], Client], stuck_after_s: float) -> None:
        self._client, self._stuck_after_s = client, stuck_after_s
        self._queried_client: Client | None = None
        self._query_start_time = 0.0
        self._status_task: asyncio.Task[Status] | None = None

    async def query_status(self, timeout_s: float = PROBE_TIMEOUT_S) -> Status | None:
        """The scheduler's counts now; None when it does not answer within `timeout_s`. Raises RuntimeGone."""
        client = self._client()
        question = self._status_task
        if question is None or question.done() or self._queried_client is not client:
            self._queried_client, self._query_start_time = client, time.monotonic()
            question = self._status_task = asyncio.create_task(client.astatus())
            question.add_done_callback(_retrieve_exception)
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(question), timeout_s)
        return None

    async def is_alive(self) -> bool:
        """False when the runtime is gone, or has owed an answer for `stuck_after_s`."""
        try:
            status = await self.query_status(min(PROBE_TIMEOUT_S, self._stuck_after_s))
        except PlaitError:
            return False
        return status is not None or time.monotonic() - self._query_start_time < self._stuck_after_s


def _retrieve_exception(question: asyncio.Task[Status]) -> None:
    """An answer that nobody waits for any more may well be an error."""
    if not question.cancelled():
        question.exception()
