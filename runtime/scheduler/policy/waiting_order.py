"""Orders the waiting requests: as `Fairness` ranks them, and with equal rank the longest cached prefix first."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from plait.constrained.tenant_shares import Order
from plait.runtime.batch.request import Request
from plait.runtime.scheduler.policy.fairness import Queue, Rank
from plait.runtime.scheduler.policy.rows import Rows

MAX_RANKED = 64  # waiting requests that are compared by cached prefix in one step
PREFIX_UNIT = 16  # cached prefixes are compared in units of so many tokens: less does not outweigh an earlier arrival


class WaitingOrder:
    """Ranks the waiting requests of `rows`, once a step."""

    def __init__(self, rows: Rows) -> None:
        self._rows, self._now = rows, 0.0
        self._ranked: list[Request] | None = None

    def begin_step(self, now: float) -> None:
        """Forgets the order of the last step."""
        self._ranked, self._now = None, now

    def best_first(self) -> list[Request]:
        """Returns the requests to admit next, best first: of each tenant those that its share allows."""
        rows, fairness = self._rows, self._rows.fairness
        if self._ranked is None:
            queues: dict[Queue, list[Request]] = {}
            for request in rows.waiting if rows.adapters is None else filter(rows.may_start, rows.waiting):
                queues.setdefault(fairness.queue(request), []).append(request)
            num_of_each = max(1, MAX_RANKED // max(1, len(queues)))
            ordered = [
                (queue[0], fairness.order_of(queue, self._now, position), request.arrival_index, request)
                for queue, requests in queues.items()
                for position, request in enumerate(self._ranked_queue(requests, num_of_each))
            ]
            self._ranked = [request for *_, request in sorted(ordered, key=lambda entry: entry[:3])]
        return [request for request in self._ranked if request in rows.waiting and rows.may_start(request)]

    def first(self, requests: Iterable[Request]) -> Request | None:
        """The first of some waiting requests, whatever they have cached."""
        fairness, best = self._rows.fairness, dict[Queue, tuple[Rank, int, Request]]()
        for request in requests:
            queue, entry = fairness.queue(request), (fairness.rank(request, self._now), request.arrival_index, request)
            if queue not in best or entry[:2] < best[queue][:2]:
                best[queue] = entry
        return min((request for *_, request in best.values()), key=self._key, default=None)

    def comes_before(self, request: Request, other: Request) -> bool:
        """Whether one waiting request comes before another one, whatever they have cached."""
        return self._key(request) < self._key(other)

    def _key(self, request: Request) -> tuple[bool, Order, Rank, int]:
        fairness, queue = self._rows.fairness, self._rows.fairness.queue(request)
        return queue[0], fairness.order_of(queue, self._now), fairness.rank(request, self._now), request.arrival_index

    def _ranked_queue(self, requests: list[Request], count: int) -> list[Request]:
        """Returns the first `count` requests of a queue, best first."""
        rank, now = self._rows.fairness.rank, self._now
        candidates = heapq.nsmallest(count, requests, key=lambda request: rank(request, now))
        if len(candidates) == 1:
            return candidates
        return sorted(
            candidates,
            key=lambda request: (
                rank(request, now),
                -(self.num_cached(request) // PREFIX_UNIT),
                request.arrival_index,
            ),
        )

    def num_cached(self, request: Request) -> int:
        """Returns how many tokens of a waiting request are cached."""
        return self._rows.cache.match_length(request.seq, request.logits_from)
