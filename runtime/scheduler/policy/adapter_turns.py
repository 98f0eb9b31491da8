"""Waiting requests whose adapter is not resident: which adapter is read next, and who gets a slot.

A request waits until its adapter is resident, while others run. Adapters are read in the order of the requests, by
`WaitingOrder`, also while no slot is free. The first one that is read gets
- a free slot, or that of the adapter used longest ago that no running request has, nor a waiting one that comes first;
  those that only idle sessions have, because their name is another one's by now, come last;
- else, where it comes before all that could start, the slot with the fewest running requests once they have ended: no
  further request starts with that adapter;
- at once that of a tenant which must give up a row to the tenant of the request by the rules of `Fairness`, as long as
  no other tenant has requests with that adapter. They are paused.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.runtime.adapters.adapter_pool import AdapterPool
from plait.runtime.batch.request import Request
from plait.runtime.scheduler.policy.fairness import Queue
from plait.runtime.scheduler.policy.rows import Rows
from plait.runtime.scheduler.policy.waiting_order import WaitingOrder


class AdapterTurns:
    """Decides for the requests of `rows`, once a step."""

    def __init__(self, rows: Rows, order: WaitingOrder, pool: AdapterPool) -> None:
        self._rows, self._order, self._pool = rows, order, pool

    def begin_step(self, now: float) -> None:
        """Places adapters that are read and may have a slot, and begins to read another one if one is needed."""
        rows, pool = self._rows, self._pool
        rows.held_back = ""
        users: dict[str, list[Request]] = {}  # of each resident adapter
        for request in (*rows.isolated, *rows.running):
            adapter = request.seq.namespace.adapter
            if adapter in pool.slots:
                users.setdefault(adapter, []).append(request)
        for adapter in users:
            pool.touch(adapter)
        if pool.is_complete:
            return
        absent = [request for request in rows.waiting if not rows.is_resident(request)]
        pool.wanted = frozenset(request.seq.namespace.adapter for request in absent)
        while (first := self._order.first(r for r in absent if r.seq.namespace.adapter in pool.kept)) is not None:
            if not self._has_slot_for(first, users, now):
                break
            pool.place(first.seq.namespace.adapter)
            self._order.begin_step(now)  # more requests may start
            absent = [request for request in absent if not rows.is_resident(request)]
            if not users.keys() <= pool.slots.keys():
                break  # requests were paused: once a step
        if not pool.is_reading:
            self._read_next(absent)

    def _read_next(self, absent: Sequence[Request]) -> None:
        """Begins to read the adapter of the first request whose adapter is not kept. For one that comes before all
        others, those are dropped that have no room."""
        pool = self._pool
        first = self._order.first(request for request in absent if request.seq.namespace.adapter not in pool.kept)
        if first is None:
            return
        adapter = first.seq.namespace.adapter
        if pool.hangs(adapter) or pool.has_room or first is self._order.first(absent):
            pool.begin_load(adapter)

    def _has_slot_for(self, first: Request, users: dict[str, list[Request]], now: float) -> bool:
        """Frees a slot for a request's adapter if that is possible."""
        pool = self._pool
        if pool.has_free_slot:
            return True
        startable = self._order.best_first()
        earlier = {r.seq.namespace.adapter for r in startable if self._order.comes_before(r, first)}
        unused = [adapter for adapter in pool.slots if adapter not in users and adapter not in earlier]
        victim = next(iter(sorted(unused, key=pool.has_name, reverse=True)), None)
        if victim is None and not self._rows.isolated:
            victim = self._pause_users(first, users, now)
        if victim is not None:
            pool.evict(victim)
            return True
        if all(self._order.comes_before(first, request) for request in startable):
            self._rows.held_back = min(users, key=lambda adapter: len(users[adapter]), default="")
        return False

    def _pause_users(self, first: Request, users: dict[str, list[Request]], now: float) -> str | None:
        """Pauses the requests with an adapter of a tenant that gives up a row to that of `first`; None if there is
        none."""
        fairness, rows = self._rows.fairness, dict[Queue, list[Request]]()
        for adapter, requests in users.items():
            queues = {fairness.queue(request) for request in requests}
            if len(queues) == 1 and self._pool.has_name(adapter):
                rows.setdefault(queues.pop(), []).extend(requests)
        giver = fairness.giver(fairness.queue(first), rows, now)
        if giver is None:
            return None
        adapter = giver.seq.namespace.adapter
        for request in users[adapter]:
            self._rows.pause(request)
        return adapter
