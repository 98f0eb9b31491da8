"""How many lines of batches run: a bounded number of calls over all batches, shared by their keys (`TenantShares`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from plait.constrained.tenant_shares import TenantQueue, TenantShares

POLL_S = 0.05  # while the server may start no line


class Slot:
    """One line that may run. `set_calls` says how many calls it makes; `release` ends it."""

    def __init__(self, slots: Slots, tenant: str) -> None:
        self._slots, self._tenant, self._num_calls = slots, tenant, 1
        self._waits_for_model = False
        self._changed = asyncio.Event()

    def set_calls(self, num_calls: int) -> None:
        """Counts the line as `num_calls` calls, such as the choices of its request. Then the next line may start.

        A line that waits for its model has 0 for that time: lines of other batches run, those of its own wait.
        """
        self._set(num_calls, waits_for_model=num_calls == 0)

    def release(self, *_: object) -> None:
        """Lets another line run. Idempotent."""
        self._set(0, waits_for_model=False)

    def _set(self, num_calls: int, waits_for_model: bool) -> None:
        self._slots.shares.take(self._tenant, num_calls - self._num_calls)
        self._slots.num_calls += num_calls - self._num_calls
        self._num_calls, self._waits_for_model = num_calls, waits_for_model
        self._changed.set()
        if self._slots.starting is self:
            self._slots.starting = None
        self._slots.wake()

    async def wait_for_model(self) -> None:
        """Waits until the line no longer waits for its model."""
        while self._waits_for_model:
            self._changed.clear()
            await self._changed.wait()


class Slots:
    """Grants slots while fewer than `max_calls` calls of batches run and `may_start()` is true.

    Lines start one after the other: the next one when the calls of the last one are known. So one line with several
    calls may exceed the limit, not many; each key that has no line may then start one. While a slot is waited for,
    `may_start` is asked again every 50 ms.

    weights: of keys.
    """

    def __init__(
        self,
        max_calls: int,
        may_start: Callable[[], bool],
        weights: Mapping[str, float],
    ) -> None:
        self.max_calls, self._may_start = max_calls, may_start
        self.shares = TenantShares(weights)
        self.num_calls = 0
        self.starting: Slot | None = None  # whose calls are not known yet
        self._waiting = TenantQueue[asyncio.Future[Slot]](self.shares)
        self._timer: asyncio.TimerHandle | None = None

    async def acquire(self, tenant: str) -> Slot:
        """Waits until a line of this key may run."""
        future: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiting.put(tenant, future)
        self.wake()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                future.result().release()
            self._waiting.discard(future)
            raise

    def wake(self) -> None:
        """Grants what can be granted now."""
        now = time.monotonic()
        while self._has_room and self._may_start():
            tenant, future = self._waiting.pop(now)
            if future.done():  # its batch has just been cancelled
                continue
            self.shares.take(tenant)
            self.shares.charge(tenant, 1, now)
            self.num_calls += 1
            self.starting = Slot(self, tenant)
            future.set_result(self.starting)
        if self._has_room and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(POLL_S, self._on_timer)

    @property
    def _has_room(self) -> bool:
        """Whether a line waits that may start as far as others are concerned."""
        tenant = self._waiting.next_tenant(time.monotonic())
        if tenant is None or self.starting is not None:
            return False
        is_exceeded = self.num_calls > self.max_calls  # by a line with many calls, for which no other key waits
        return self.num_calls < self.max_calls or (is_exceeded and not self.shares.held(tenant))

    def _on_timer(self) -> None:
        self._timer = None
        self.wake()
