"""Starts waiting requests in place of running ones, which are paused. `Fairness` says which ones."""

from __future__ import annotations

from collections.abc import Mapping

from plait.runtime.batch.request import Request
from plait.runtime.kv_cache.planned_release import PlannedRelease
from plait.runtime.scheduler.policy.fairness import Queue
from plait.runtime.scheduler.policy.rows import Rows
from plait.runtime.scheduler.policy.waiting_order import WaitingOrder


class Preemption:
    """Preempts requests of `rows` for waiting ones, in the order of `order`."""

    def __init__(self, rows: Rows, order: WaitingOrder) -> None:
        self._rows, self._order, self._now = rows, order, 0.0

    def preempt_for_waiting(self, now: float) -> None:
        """Starts waiting requests for which there is no row or too few pages, in place of running ones.

        As many as have a step of pending tokens together: each must compute something before the next step.
        """
        self._now, rows = now, dict[Queue, list[Request]]()
        for request in self._rows.running:
            rows.setdefault(self._rows.fairness.queue(request), []).append(request)
        is_row_missing = len(self._rows.running) >= self._rows.max_batch_rows or self._rows.background.is_limited
        if is_row_missing and not self._may_preempt(rows):
            return
        num_tokens, without_victims = 0, set[Queue]()
        for request in self._order.best_first():
            queue = self._rows.fairness.queue(request)
            if queue in without_victims:
                continue
            is_row_free = self._rows.is_row_free(request)
            if num_tokens >= self._rows.max_batch_tokens or (is_row_free and self._rows.has_room_for(request)):
                return
            victims = self._victims(request, rows)
            if not victims:
                if is_row_free:
                    return  # others must not take its pages
                without_victims.add(queue)
                continue
            for victim in victims:
                self._rows.pause(victim)
            self._rows.start(request, now)
            rows.setdefault(queue, []).append(request)
            num_tokens += request.num_pending

    def _may_preempt(self, rows: Mapping[Queue, list[Request]]) -> bool:
        """Whether a waiting request may take a row while none is free; a cheap check before they are ranked."""
        fairness, now = self._rows.fairness, self._now
        for queue in {fairness.queue(request) for request in self._rows.waiting}:
            if any(fairness.tier(request, now) for request in rows.get(queue, ())):
                return True
            if fairness.giver(queue, rows, now) is not None:
                return True
        return False

    def _victims(self, waiting: Request, rows: dict[Queue, list[Request]]) -> list[Request]:
        """Returns the running requests whose rows and pages `waiting` gets, and removes them from `rows`.

        [] if they are not enough for it to start, or if it may not have them.
        """
        fairness, queue, victims = self._rows.fairness, self._rows.fairness.queue(waiting), list[Request]()
        released, is_enough = PlannedRelease(), False
        while not is_enough:
            victim = fairness.giver(queue, rows, self._now) or fairness.longer(waiting, rows.get(queue, ()), self._now)
            if victim is None:
                break
            victims.append(victim)
            released.add(victim.seq)
            rows[fairness.queue(victim)].remove(victim)
            fairness.hold_row(victim, -1)  # until the victims are known
            is_row_free = self._rows.is_row_free(waiting, len(victims))
            is_enough = is_row_free and self._rows.has_room_for(waiting, len(victims), released)
        for victim in reversed(victims):
            fairness.hold_row(victim, 1)
            if not is_enough:
                rows[fairness.queue(victim)].append(victim)
        return victims if is_enough else []
