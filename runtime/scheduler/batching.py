"""Which rows run in the next step, and with how many tokens each.

Decoding rows come first, one token each, then chunks of prompts, then those that wait, as `Fairness` ranks them and
among equals the longest cached prefix first. A row whose program was served far more than another's is paused for it
when there are no more rows to be had, and its prompt goes on after the other's; its pages stay cached. When pages are
short, the row admitted last gives its own back and waits again.

Knows: rows, the prefix cache, the token budget. Must not know: tensors, messages, sampling.
"""

from __future__ import annotations

import heapq
import math
import time

from plait.runtime.batch.request import Batch, Request
from plait.runtime.config import SchedulingOrder
from plait.runtime.kv_cache.prefix_cache import PrefixCache
from plait.runtime.kv_cache.radix_tree import RadixNode
from plait.runtime.scheduler.fairness import Fairness

MAX_RANKED = 64  # how many of the waiting are compared by cached prefix in one step
MAX_DRAFTING_TOKENS = 32  # running rows and guesses of one step together
DRAFT_TOKEN_COST = (
    0.12  # of one more row, in what each running row's token costs, times the root of their number: the more
)
#                     of them share the weights' reading, the less there is to share; measured 0.1 at 1, 0.5 at 16
MAX_DRAFT_TOKEN_COST = 0.5  # a price from which on no row is asked for guesses
MAX_LOGITS = 512  # positions of one step whose logits are kept: [MAX_LOGITS, V] float32 is 100 MB for 49,152 tokens
RESERVE_TOKENS = 8  # pages kept for each running row's next tokens when another is admitted


class BatchScheduler:
    """Waiting and running rows, and the choice between them."""

    def __init__(
        self,
        cache: PrefixCache,
        max_batch_tokens: int,
        max_batch_rows: int,
        max_length: int,
        draft: bool = True,
        order: SchedulingOrder = "fair",
    ) -> None:
        self.cache = cache
        self.max_batch_tokens = max_batch_tokens
        self.max_batch_rows = max_batch_rows
        self.max_logits = max(MAX_LOGITS, max_batch_rows)
        self.max_length, self.draft = max_length, draft
        self.waiting: dict[Request, None] = {}  # in order of arrival
        self.running: dict[Request, None] = {}  # in order of admission
        self.fairness = Fairness(order)
        self.num_retractions = self.num_pauses = 0
        self.provisional_nodes: list[
            tuple[RadixNode, int]
        ] = []  # published early in this step, with their tokens: void if it fails
        self._now = 0.0

    # -- coming and going -------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """The row waits to be admitted."""
        self.fairness.add(request)
        self.waiting[request] = None

    def remove(self, request: Request) -> None:
        """The row is done, failed or aborted. Its sequence is the caller's to release."""
        if request in self.waiting:
            del self.waiting[request]
        elif request in self.running:
            del self.running[request]
        else:
            return
        self.fairness.remove(request)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    # -- one step ---------------------------------------------------------------------------------

    def next_batch(self) -> Batch | None:
        """Rows for the next forward, their pages allocated; None when there is nothing to run."""
        batch = Batch(self.max_batch_tokens, self.max_logits)
        self.provisional_nodes.clear()
        self._now = time.monotonic()
        self._preempt_for_waiting()
        decoding: list[Request] = []
        prompts: list[Request] = []
        for request in self.running:
            (prompts if request.num_pending > 1 else decoding).append(request)
        may_draft = self.draft and self._draft_token_cost < MAX_DRAFT_TOKEN_COST
        for request in decoding:
            if not batch.token_budget:
                break
            if may_draft and request.may_draft():
                self._schedule(batch, request, may_draft=True)
            elif not self._schedule_decode(batch, request):
                self._schedule(batch, request)
        for request in sorted(prompts, key=self._tier) if prompts else ():
            if self._tier(request):
                self._admit(batch, before=request)
            if batch.token_budget:
                self._schedule(batch, request)
        self._admit(batch)
        return batch if batch.rows else None

    def _schedule_decode(self, batch: Batch, request: Request) -> bool:
        """`_schedule` for a row in the midst of its output, with one token to compute and a page for it, as nearly all
        are; False, and nothing done, for the others."""
        seq = request.seq
        start = seq.pages.size
        is_alone = seq.tokens.size - start == 1 and seq.num_in_tree < start
        wants_logits = request.logits_from <= start and not request.wants_states  # then nothing is taken from the tree
        if not is_alone or not wants_logits or not self.cache.pool.num_free or batch.logits_budget <= 0:
            return False
        if request not in self.running:  # retracted by an earlier one
            return True
        self.cache.allocate(seq, 1)
        request.metrics.count_computed(start, start + 1)
        self.fairness.charge(request, 1, self._now)
        batch.add_decode(request, start)
        return True

    def _schedule(self, batch: Batch, request: Request, may_draft: bool = False) -> None:
        """Puts as many of the row's pending tokens into the batch as the budget and the pool allow."""
        if request not in self.running:  # retracted by an earlier one
            return
        if request.in_flight_slot >= 0 and not request.num_pending:
            self._schedule_placeholder(batch, request)
            return
        self.cache.extend_from_cache(request.seq, request.logits_from)
        start = request.seq.num_computed
        request.metrics.count_cached(start)
        if may_draft and request.num_pending == 1:
            self._add_draft(batch, request)
        count = min(request.num_pending, batch.tokens_within_budget(request, start))
        if count <= 0:
            return
        while not self.cache.allocate(request.seq, count):
            if request.num_draft_tokens:
                request.drop_draft()
                count = 1
                continue
            chosen = {each.request for each in batch.rows} | {request}
            victim = next((other for other in reversed(self.running) if other not in chosen), None)
            if victim is not None and victim.arrival_index > request.arrival_index:
                self.retract(victim)
            elif self.cache.num_available:
                count = self.cache.num_available
            else:
                if batch.rows or victim is not None:
                    self.retract(request)
                return
        if count > 1 and not request.num_draft_tokens and (node := self.cache.publish_early(request.seq)) is not None:
            self.provisional_nodes.append((node, len(node.key)))
        request.metrics.count_computed(start, start + count - request.num_draft_tokens)
        self.fairness.charge(request, count, self._now)
        batch.add(request, start, count)

    def _schedule_placeholder(self, batch: Batch, request: Request) -> None:
        """Lets the row go on with the token that the step under way samples for it, before that is known."""
        if not batch.tokens_within_budget(request, len(request.seq)) or not request.expects_more_tokens(
            self.max_length
        ):
            return
        page = self.cache.reserve_page()
        if page is not None:
            self.fairness.charge(request, 1, self._now)
            batch.add_placeholder(request, page)

    @property
    def _draft_token_cost(self) -> float:
        return DRAFT_TOKEN_COST * math.sqrt(len(self.running))

    def _add_draft(self, batch: Batch, request: Request) -> None:
        """Lets the row guess ahead, as far as guesses may pay and the step has room."""
        num_rows, token_cost = len(self.running), self._draft_token_cost
        free, rows_left = MAX_DRAFTING_TOKENS - num_rows - batch.num_draft_tokens, num_rows - len(batch.rows)
        room = min(-(-free // max(1, rows_left)), batch.tokens_within_budget(request, request.seq.num_computed) - 1)
        room = min(room, self.max_length - len(request.seq))
        if room > 0:
            first_token_cost = (
                0.0 if batch.num_draft_tokens else token_cost * (2 - 1 / num_rows)
            )  # a step's first is as dear as two or three
            request.draft(
                room, token_cost, first_token_cost, cooldown_steps=num_rows // 2
            )  # about two rows look in a step

    def retract(self, request: Request) -> None:
        """Takes the row's pages away; it waits again and what is lost meanwhile is computed again."""
        self.num_retractions += 1
        self._preempt(request)

    def _preempt(self, request: Request) -> None:
        request.in_flight_slot = -1
        del self.running[request]
        self.cache.release(request.seq)
        self.waiting = {request: None, **self.waiting}

    def _preempt_for_waiting(self) -> None:
        """Pauses rows for waiting ones that may interrupt them, where all rows are taken."""
        if not self.waiting or len(self.running) < self.max_batch_rows:
            return
        now, preemption_key = self._now, self.fairness.preemption_key
        preemptible = sorted(
            (request for request in self.running if self._tier(request)),
            key=lambda request: preemption_key(request, now),
        )
        for request in self._ranked_waiting() if preemptible else ():
            if not preemptible or not self.fairness.may_interrupt(request, preemptible[-1], now):
                return
            self.num_pauses += 1
            self._preempt(preemptible.pop())

    def _admit(self, batch: Batch, before: Request | None = None) -> None:
        """Lets waiting rows run, best first, as far as they fit; with `before` those that may interrupt its prompt,
        which must be longer than what they need."""
        if not self.waiting or not batch.token_budget or len(self.running) >= self.max_batch_rows:
            return
        for request in self._ranked_waiting():
            if not batch.token_budget or len(self.running) >= self.max_batch_rows or not self._has_room_for(request):
                return
            if before is not None and not self._may_interrupt_prefill(request, before):
                continue
            del self.waiting[request]
            request.metrics.admission_time = request.metrics.admission_time or time.monotonic()
            self.cache.activate(request.seq, request.logits_from)
            self.running[request] = None
            self._schedule(batch, request)

    def _may_interrupt_prefill(self, waiting: Request, running: Request) -> bool:
        need = len(waiting.seq) - self._num_cached(waiting)
        return need < running.num_pending and self.fairness.may_interrupt(waiting, running, self._now)

    def _has_room_for(self, request: Request) -> bool:
        """Room for all of the row's tokens now, and for the running ones' next few."""
        if not self.running:
            return True
        need = len(request.seq) - self.cache.num_locked_match(request.seq, request.logits_from)
        return need + RESERVE_TOKENS * (len(self.running) + 1) <= self.cache.num_available

    def _ranked_waiting(self) -> list[Request]:
        """The waiting rows to admit next, best first."""
        rank, now = self.fairness.rank, self._now
        first = heapq.nsmallest(MAX_RANKED, self.waiting, key=lambda request: rank(request, now))
        return sorted(
            first, key=lambda request: (*rank(request, now), -self._num_cached(request), request.arrival_index)
        )

    def _tier(self, request: Request) -> int:
        return self.fairness.tier(request, self._now)

    def _num_cached(self, request: Request) -> int:
        return self.cache.match_length(request.seq, request.logits_from)
