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

PATIENCE_S = 1.0  # how long one who asks is kept waiting


class Pulse:
    """One per server. `client()` raises RuntimeGone while there is none."""

    def __init__(self, client: Callable[[], Client], stuck_after_s: float) -> None:
        self._client, self._stuck_after_s = client, stuck_after_s
        self._asked_of: Client | None = None
        self._asked_at = 0.0
        self._question: asyncio.Task[Status] | None = None

    async def feel(self, patience_s: float = PATIENCE_S) -> Status | None:
        """The scheduler's counts now; None when it does not answer within `patience_s`. Raises RuntimeGone."""
        client = self._client()
        question = self._question
        if question is None or question.done() or self._asked_of is not client:
            self._asked_of, self._asked_at = client, time.monotonic()
            question = self._question = asyncio.create_task(client.astatus())
            question.add_done_callback(_take_notice)
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(question), patience_s)
        return None

    async def beats(self) -> bool:
        """False when the runtime is gone, or has owed an answer for `stuck_after_s`."""
        try:
            status = await self.feel(min(PATIENCE_S, self._stuck_after_s))
        except PlaitError:
            return False
        return status is not None or time.monotonic() - self._asked_at < self._stuck_after_s


def _take_notice(question: asyncio.Task[Status]) -> None:
    """An answer that nobody waits for any more may well be an error."""
    if not question.cancelled():
        question.exception()
