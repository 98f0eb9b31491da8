"""Chooses the requests of the next step and the number of tokens of each.

Decoding requests come first, with one token each; then chunks of the prompts of running requests (chunked prefill), of
the tenant with the least service first; then waiting requests in the order of `Fairness`, and with equal rank the
longest cached prefix first. While there is no row or too few pages for a waiting request, others are paused as
`Fairness` says; their pages stay cached. A long prompt is interrupted by a shorter waiting one. If pages run out, the
request admitted last is retracted: it loses its pages and waits again.

Beside other requests that are not in the background, those that compute prefixes of whole values share
MAX_PREFIX_LOGITS positions of a step, in the order of `Fairness`, so that a step is not much longer than without them,
however many particles a call has.

Background requests come last in all of this: `background.py`.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Collection, Mapping

from plait.runtime.batch.batch import Batch
from plait.runtime.batch.request import Request
from plait.runtime.config import SchedulingOrder
from plait.runtime.kv_cache.prefix_cache import PrefixCache
from plait.runtime.kv_cache.radix_node import RadixNode
from plait.runtime.messages import CacheMiss
from plait.runtime.scheduler.background import BackgroundLimits
from plait.runtime.scheduler.fairness import Fairness, Queue

MAX_RANKED = 64  # waiting requests that are compared by cached prefix in one step
PREFIX_UNIT = 16  # cached prefixes are compared in units of so many tokens: less does not outweigh an earlier arrival
MAX_DRAFTING_TOKENS = 32  # sum of running requests and draft tokens in a step with drafts

# The cost of a draft token relative to a decode token, multiplied by sqrt(batch size): the larger the batch, the less
# another row gains from sharing the read of the weights. Measured: 0.1 with 1 request, 0.5 with 16.
DRAFT_TOKEN_COST = 0.12
MAX_DRAFT_TOKEN_COST = 0.5  # no drafts at this cost or above
MAX_PREFIX_LOGITS = 16  # positions of whole values (`exact`, `particles`) in a step that also computes other requests
MAX_LOGITS = 512  # positions of one step with logits: [MAX_LOGITS, V] float32 is 100 MB for 49,152 tokens
PAGES_PER_DECODING_REQUEST = 2  # available pages required to launch a step before the previous one is committed
RESERVE_TOKENS = 8  # pages kept free for the next tokens of each running request when another is admitted


class BatchScheduler:
    """Holds the waiting and the running requests and builds the batches."""

    def __init__(
        self,
        cache: PrefixCache,
        max_batch_tokens: int,
        max_batch_rows: int,
        max_length: int,
        draft: bool = True,
        order: SchedulingOrder = "fair",
        tenant_weights: Mapping[str, float] | None = None,
    ) -> None:
        self.cache = cache
        self.max_batch_tokens = max_batch_tokens
        self.max_batch_rows = max_batch_rows
        self.max_logits = max(MAX_LOGITS, max_batch_rows)
        self.max_length, self.draft = max_length, draft
        self.waiting: dict[Request, None] = {}  # in order of arrival
        self.running: dict[Request, None] = {}  # in order of admission
        self.isolated: dict[Request, None] = {}  # waiting or running requests that are computed alone, in turn
        self.fairness = Fairness(order, tenant_weights)
        self.background = BackgroundLimits(max_batch_tokens, max_batch_rows)
        self.num_retractions = self.num_pauses = 0
        self._ranked: list[Request] | None = None  # the waiting requests, best first; computed once a step
        # Nodes, with their lengths, that `publish_early` made in this step. They are removed if the step fails.
        self.provisional_nodes: list[tuple[RadixNode, int]] = []
        self._now = 0.0

    # -- queues -----------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Adds a new request to the waiting ones."""
        self.fairness.add(request)
        self.background.add(request)
        self.waiting[request] = None

    def remove(self, request: Request) -> None:
        """Removes a request that finished, failed or was aborted. The caller releases its sequence."""
        if request in self.waiting:
            del self.waiting[request]
        elif request in self.running:
            del self.running[request]
            self.fairness.hold_row(request, -1)
        else:
            return
        self.isolated.pop(request, None)
        self.fairness.remove(request)
        self.background.remove(request)

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting or self.running)

    def has_pages_for_next_batch(self) -> bool:
        """Whether the next batch is certain not to retract a running request for lack of pages.

        A decoding request needs one page, and another is kept free for it. A prompt needs a page for each token. If
        waiting requests could be admitted before the rest of a running prompt, there must be pages for a full batch.
        """
        num_available = self.cache.num_available
        if self.isolated:
            return False
        if num_available >= self.max_batch_tokens:
            return True
        num_prompt_tokens = sum(request.num_pending for request in self.running if request.num_pending > 1)
        if num_prompt_tokens and self.waiting:
            return False
        return num_available >= num_prompt_tokens + PAGES_PER_DECODING_REQUEST * len(self.running)

    # -- the next batch ---------------------------------------------------------------------------

    def next_batch(self) -> Batch | None:
        """Returns the next batch with all pages allocated, or None if there is nothing to run."""
        is_shared = not all(request.needs_probabilities or request.owner.is_background for request in self.running)
        batch = Batch(self.max_batch_tokens, self.max_logits, MAX_PREFIX_LOGITS if is_shared else self.max_logits)
        self.provisional_nodes.clear()
        self._now = now = time.monotonic()
        self._ranked = None
        self.background.begin_step()
        if self.isolated:
            return self._isolated_batch(batch)
        for request in self.background.to_pause(self.running):
            self.num_pauses += 1
            self._preempt(request)
        if self.waiting:
            self._preempt_for_waiting()
        decoding: list[Request] = []
        prefilling: list[Request] = []
        drawing: list[Request] = []
        for request in self.running:
            if is_shared and request.needs_probabilities and request.seq.pages.size >= request.logits_from:
                drawing.append(request)  # its prompt is computed
            else:
                (prefilling if request.num_pending > 1 else decoding).append(request)
        if self.background.num_requests:
            decoding.sort(key=lambda request: request.owner.is_background)
        may_draft = self.draft and self._draft_token_cost < MAX_DRAFT_TOKEN_COST
        for request in decoding:
            if not batch.token_budget:
                break
            if may_draft and request.may_draft():
                self._schedule(batch, request, may_draft=True)
            elif not self._schedule_decode(batch, request):
                self._schedule(batch, request)
        fairness = self.fairness
        for request in sorted(drawing, key=lambda r: (fairness.share_key(r, now), fairness.program_service(r))):
            if batch.token_budget:
                self._schedule(batch, request)
        for request in sorted(prefilling, key=lambda r: (fairness.share_key(r, now), fairness.tier(r, now))):
            if self.waiting:
                self._admit(batch, before=request)
            if batch.token_budget:
                self._schedule(batch, request)
        self._admit(batch)
        return batch if batch.rows else None

    def _schedule_decode(self, batch: Batch, request: Request) -> bool:
        """Fast path of `_schedule` for a decoding request: one pending token, and a free page for it.

        Returns False, having done nothing, for any other request.
        """
        seq = request.seq
        start = seq.pages.size
        has_one_private_token = seq.tokens.size - start == 1 and seq.num_in_tree < start
        wants_logits = request.logits_from <= start and not request.wants_states  # so it is computed even if cached
        if not has_one_private_token or not wants_logits or not self.cache.pool.num_free or batch.logits_budget <= 0:
            return False
        if request not in self.running:  # it was retracted for an earlier request of this batch
            return True
        self.cache.allocate(seq, 1)
        request.metrics.count_computed(start, start + 1)
        self.fairness.charge(request, 1, self._now)
        batch.add_decode(request, start)
        return True

    def _schedule(self, batch: Batch, request: Request, may_draft: bool = False) -> None:
        """Adds as many of the request's pending tokens to the batch as the budgets and the pool allow."""
        if request not in self.running:  # it was retracted for an earlier request of this batch
            return
        if request.in_flight_slot >= 0 and not request.num_pending:
            self._schedule_placeholder(batch, request)
            return
        self.cache.extend_from_cache(request.seq, request.logits_from)
        start = request.seq.num_computed
        request.metrics.count_cached(start)
        if request.metrics.cache_miss is None:
            request.metrics.cache_miss = CacheMiss(start, self.cache.miss_reason(request.seq, request.logits_from))
        if may_draft and request.num_pending == 1:
            self._add_draft(batch, request)
        count = min(request.num_pending, batch.tokens_within_budget(request, start))
        count = self._allocate(batch, request, self.background.within_budget(request, count))
        if not count:
            return
        if count > 1 and not request.num_draft_tokens and (node := self.cache.publish_early(request.seq)) is not None:
            self.provisional_nodes.append((node, len(node.key)))
        request.metrics.count_computed(start, start + count - request.num_draft_tokens)
        self.fairness.charge(request, count, self._now)
        batch.add(request, start, count)

    def _allocate(self, batch: Batch, request: Request, count: int) -> int:
        """Allocates pages for up to `count` tokens. Returns for how many; 0 if the request cannot run in this step.

        If there are too few pages, drops the draft, then retracts requests that arrived later and are not in the batch,
        then allocates the pages there are. If there is none, retracts the request itself, unless it is the only one.
        """
        if count <= 0:
            return 0
        while not self.cache.allocate(request.seq, count):
            if request.num_draft_tokens:
                request.drop_draft()
                count = 1
                continue
            in_batch = {scheduled.request for scheduled in batch.rows} | {request}
            victim = self._victim(request, in_batch)
            if victim is not None and self._may_retract(victim, request):
                self.retract(victim)
            elif self.cache.num_available:
                count = self.cache.num_available
            else:
                if batch.rows or victim is not None:
                    self.retract(request)
                return 0
        return count

    def _victim(self, request: Request, kept: Collection[Request]) -> Request | None:
        """Returns the running request that gives its pages to `request` first: one in the background, or the latest."""
        others = [other for other in reversed(self.running) if other not in kept]
        return next((other for other in others if other.owner.is_background), others[0] if others else None)

    @staticmethod
    def _may_retract(victim: Request, request: Request) -> bool:
        if victim.owner.is_background != request.owner.is_background:
            return victim.owner.is_background
        return victim.arrival_index > request.arrival_index

    def _schedule_placeholder(self, batch: Batch, request: Request) -> None:
        """Schedules the request's next token, which the step in flight samples, before its id is known."""
        if not batch.tokens_within_budget(request, len(request.seq)):
            return
        if not request.expects_more_tokens(self.max_length):
            return
        page = self.cache.reserve_page()
        if page is not None:
            self.fairness.charge(request, 1, self._now)
            batch.add_placeholder(request, page)

    @property
    def _draft_token_cost(self) -> float:
        return DRAFT_TOKEN_COST * math.sqrt(len(self.running))

    def _add_draft(self, batch: Batch, request: Request) -> None:
        """Appends draft tokens to the request: as many as fit the step and are expected to save time."""
        num_running, token_cost = len(self.running), self._draft_token_cost
        num_free = MAX_DRAFTING_TOKENS - num_running - batch.num_draft_tokens
        num_unscheduled = num_running - len(batch.rows)
        max_draft = min(
            -(-num_free // max(1, num_unscheduled)),
            batch.tokens_within_budget(request, request.seq.num_computed) - 1,
            self.max_length - len(request.seq),
        )
        if max_draft > 0:
            # The first draft token of a step costs as much as two or three further ones.
            first_token_cost = 0.0 if batch.num_draft_tokens else token_cost * (2 - 1 / num_running)
            # With this cooldown about two requests search for a match in each step.
            request.draft(max_draft, token_cost, first_token_cost, cooldown_steps=num_running // 2)

    # -- preemption -------------------------------------------------------------------------------

    def retract(self, request: Request) -> None:
        """Releases the pages of a running request because too few are free, and returns it to the waiting ones.

        Its KV stays cached until it is evicted; evicted tokens are computed again.
        """
        self.num_retractions += 1
        self._preempt(request)

    def _preempt(self, request: Request) -> None:
        request.in_flight_slot = -1
        del self.running[request]
        self.fairness.hold_row(request, -1)
        self.cache.release(request.seq)
        self.waiting = {request: None, **self.waiting}

    def _preempt_for_waiting(self) -> None:
        """Starts waiting requests for which there is no row or too few pages, in place of running ones.

        As many as have a step of pending tokens together: each must compute something before the next step.
        """
        rows: dict[Queue, list[Request]] = {}
        for request in self.running:
            rows.setdefault(self.fairness.queue(request), []).append(request)
        if (len(self.running) >= self.max_batch_rows or self.background.is_limited) and not self._may_preempt(rows):
            return
        num_tokens, without_victims = 0, set[Queue]()
        for request in self._ranked_waiting():
            queue = self.fairness.queue(request)
            if queue in without_victims:
                continue
            is_row_free = self._is_row_free(request)
            if num_tokens >= self.max_batch_tokens or (is_row_free and self._has_room_for(request)):
                return
            victims = self._victims(request, rows)
            if not victims:
                if is_row_free:
                    return  # others must not take its pages
                without_victims.add(queue)
                continue
            for victim in victims:
                self.num_pauses += 1
                self._preempt(victim)
            self._start(request)
            rows.setdefault(queue, []).append(request)
            num_tokens += request.num_pending

    def _may_preempt(self, rows: Mapping[Queue, list[Request]]) -> bool:
        """Whether a waiting request may take a row while none is free; a cheap check before they are ranked."""
        fairness, now = self.fairness, self._now
        for queue in {fairness.queue(request) for request in self.waiting}:
            if any(fairness.tier(request, now) for request in rows.get(queue, ())):
                return True
            if fairness.giver(queue, rows, now) is not None:
                return True
        return False

    def _victims(self, waiting: Request, rows: dict[Queue, list[Request]]) -> list[Request]:
        """Returns the running requests whose rows and pages `waiting` gets, and removes them from `rows`.

        [] if they are not enough for it to start, or if it may not have them.
        """
        fairness, queue, victims = self.fairness, self.fairness.queue(waiting), list[Request]()
        num_pages, is_enough = 0, False
        while not is_enough:
            victim = fairness.giver(queue, rows, self._now) or fairness.longer(waiting, rows.get(queue, ()), self._now)
            if victim is None:
                break
            victims.append(victim)
            num_pages += self.cache.num_releasable(victim.seq)
            rows[fairness.queue(victim)].remove(victim)
            fairness.hold_row(victim, -1)  # until the victims are known
            is_row_free = self._is_row_free(waiting, len(victims))
            is_enough = is_row_free and self._has_room_for(waiting, len(victims), num_pages)
        for victim in reversed(victims):
            fairness.hold_row(victim, 1)
            if not is_enough:
                rows[fairness.queue(victim)].append(victim)
        return victims if is_enough else []

    def _is_row_free(self, waiting: Request, num_victims: int = 0) -> bool:
        """Whether a waiting request may have a row, once so many running requests have given up theirs."""
        num_running = len(self.running) - num_victims
        return num_running < self.max_batch_rows and self.background.may_admit(waiting, self.running, num_victims)

    # -- isolation --------------------------------------------------------------------------------

    def isolate(self, request: Request) -> None:
        """Releases the pages of a running request, which is then computed again, alone, before any other request.

        Used for the requests of a step that failed, so that only the one that caused the failure fails.
        """
        self._preempt(request)
        self.isolated = {request: None, **self.isolated}

    def end_isolation(self, request: Request) -> None:
        """Ends the isolation of a request if at most one of its tokens is pending. Called after each isolated step.

        The request then waits until no request is isolated.
        """
        if request in self.isolated and request in self.running and request.num_pending <= 1:
            del self.isolated[request]
            if self.isolated:
                self._preempt(request)

    def _isolated_batch(self, batch: Batch) -> Batch | None:
        request = next(iter(self.isolated))
        if request in self.waiting:
            self._start(request)
        self._schedule(batch, request)
        return batch if batch.rows else None

    # -- admission --------------------------------------------------------------------------------

    def _admit(self, batch: Batch, before: Request | None = None) -> None:
        """Admits waiting requests in rank order, as far as they fit.

        `before`: a running request with a prompt. Only requests that may interrupt it, and need fewer tokens than are
        left of its prompt, are admitted.
        """
        if not self.waiting or not batch.token_budget or len(self.running) >= self.max_batch_rows:
            return
        for request in self._ranked_waiting():
            if not batch.token_budget or len(self.running) >= self.max_batch_rows:
                return
            if not self._has_room_for(request) or not self.background.may_admit(request, self.running):
                return
            if before is not None and not self._may_interrupt_prefill(request, before):
                continue
            self._start(request)
            self._schedule(batch, request)

    def _start(self, request: Request) -> None:
        """Moves a waiting request to the running ones."""
        del self.waiting[request]
        request.metrics.admission_time = request.metrics.admission_time or time.monotonic()
        self.cache.activate(request.seq, request.logits_from)
        self.running[request] = None
        self.fairness.begin_turn(request)

    def _may_interrupt_prefill(self, waiting: Request, running: Request) -> bool:
        if not self.fairness.may_interrupt(waiting, running, self._now):
            return False
        is_of_other_queue = self.fairness.queue(waiting) != self.fairness.queue(running)
        return is_of_other_queue or len(waiting.seq) - self._num_cached(waiting) < running.num_pending

    def _has_room_for(self, request: Request, num_victims: int = 0, num_pages: int = 0) -> bool:
        """Returns whether there are pages for all tokens of the request and the next few of the running requests.

        num_victims: running requests that give up `num_pages` pages.
        """
        num_running = len(self.running) - num_victims
        if not num_running:
            return True
        num_needed = len(request.seq) - self.cache.num_locked_match(request.seq, request.logits_from)
        return num_needed + RESERVE_TOKENS * (num_running + 1) <= self.cache.num_available + num_pages

    def _ranked_waiting(self) -> list[Request]:
        """Returns the waiting requests to admit next, best first: of each tenant those that its share allows."""
        if self._ranked is None:
            queues: dict[Queue, list[Request]] = {}
            for request in self.waiting:
                queues.setdefault(self.fairness.queue(request), []).append(request)
            num_of_each = max(1, MAX_RANKED // max(1, len(queues)))
            ordered = [
                (queue[0], self.fairness.order_of(queue, self._now, position), request.arrival_index, request)
                for queue, requests in queues.items()
                for position, request in enumerate(self._ranked_queue(requests, num_of_each))
            ]
            self._ranked = [request for *_, request in sorted(ordered, key=lambda entry: entry[:3])]
        return [request for request in self._ranked if request in self.waiting]

    def _ranked_queue(self, requests: list[Request], count: int) -> list[Request]:
        """Returns the first `count` requests of a queue, best first."""
        rank, now = self.fairness.rank, self._now
        candidates = heapq.nsmallest(count, requests, key=lambda request: rank(request, now))
        if len(candidates) == 1:
            return candidates
        return sorted(
            candidates,
            key=lambda request: (
                rank(request, now),
                -(self._num_cached(request) // PREFIX_UNIT),
                request.arrival_index,
            ),
        )

    def _num_cached(self, request: Request) -> int:
        return self.cache.match_length(request.seq, request.logits_from)
