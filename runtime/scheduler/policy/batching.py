"""Chooses the requests of the next step and the number of tokens of each.

Decoding requests come first, with one token each; then chunks of the prompts of running requests (chunked prefill), of
the tenant with the least service first; then waiting requests in the order of `Fairness`, and with equal rank the
longest cached prefix first. While there is no row or too few pages for a waiting request, others are paused as
`Fairness` says; their pages stay cached. A long prompt is interrupted by a shorter waiting one. If pages run out, the
request admitted last is retracted: it loses its pages and waits again. Tenants with few of the rows also decode in
extra steps of their own: `light_tenants.py`.

Beside other requests that are not in the background, those that compute prefixes of whole values share
MAX_PREFIX_LOGITS positions of a step, in the order of `Fairness`, so that a step is not much longer than without them,
however many particles a call has.

Background requests come last in all of this: `background.py`. Requests whose adapter is not resident wait for it:
`adapter_turns.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from plait.runtime.batch.batch import MAX_LOGITS, Batch
from plait.runtime.batch.request import GenerationRequest, Request
from plait.runtime.call_reports import CacheMiss
from plait.runtime.config import EngineConfig
from plait.runtime.executor.runner import Runner
from plait.runtime.kv_cache.prefix_cache import PrefixCache
from plait.runtime.kv_cache.radix_node import RadixNode
from plait.runtime.scheduler.policy.adapter_turns import AdapterTurns
from plait.runtime.scheduler.policy.drafts import Drafter, may_draft
from plait.runtime.scheduler.policy.light_tenants import LightTenants
from plait.runtime.scheduler.policy.preemption import Preemption
from plait.runtime.scheduler.policy.rows import Rows
from plait.runtime.scheduler.policy.waiting_order import WaitingOrder

MAX_PREFIX_LOGITS = 16  # positions of whole values (`exact`, `particles`) in a step that also computes other requests
PAGES_PER_DECODING_REQUEST = 2  # available pages required to launch a step before the previous one is committed


@dataclass
class Step:
    """A step that is built: its batch, and the running requests by what they need of it.

    is_shared: other requests than those for probabilities, and in the foreground, run too. has_drafts: drafts may save
    time. decoding: need their next token. drawing: probabilities of whole values, once their prompt is computed.
    prefilling: the rest of their prompt, or several tokens that a constraint forced.
    """

    batch: Batch
    is_shared: bool
    has_drafts: bool
    decoding: list[Request] = field(default_factory=list)
    drawing: list[Request] = field(default_factory=list)
    prefilling: list[Request] = field(default_factory=list)


class BatchScheduler(Rows):
    """Builds the batches of its waiting and running requests."""

    def __init__(
        self,
        cache: PrefixCache,
        config: EngineConfig,
        runner: Runner,
        max_batch_rows: int,
        max_length: int,
        drafter: Drafter,
        has_extra_steps: bool,
    ) -> None:
        super().__init__(cache, config, runner, max_batch_rows)
        self.max_logits = max(MAX_LOGITS, max_batch_rows)
        self.max_length, self.drafter = max_length, drafter
        self._order = WaitingOrder(self)
        self._preemption = Preemption(self, self._order)
        self._adapter_turns = None if self.adapters is None else AdapterTurns(self, self._order, self.adapters)
        self._light_tenants = LightTenants(self.fairness) if has_extra_steps else None
        # Nodes, with their lengths, that `publish_early` made in this step. They are removed if the step fails.
        self.inserted_nodes: list[tuple[RadixNode, int]] = []
        self._now = 0.0

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
        step = self._begin_step()
        for stage in self._stages(step):
            stage(step)
        return step.batch if step.batch.rows else None

    def _stages(self, step: Step) -> tuple[Callable[[Step], None], ...]:
        """The stages of a step: of a request that is computed alone, of light tenants, or of all requests."""
        if self._light_tenants is not None:
            step.decoding += self._light_tenants.next_step(() if self.isolated else self.running, self._now)
        if self.isolated:
            return (self._schedule_isolated,)
        if step.decoding:
            return (self._schedule_decoding,)
        return (
            self._pause_background,
            self._preempt_for_waiting,
            self._sort_running,
            self._schedule_decoding,
            self._schedule_drawing,
            self._schedule_prefilling,
            self._admit_waiting,
        )

    def _begin_step(self) -> Step:
        is_shared = not all(request.needs_probabilities or request.owner.is_background for request in self.running)
        self.inserted_nodes.clear()
        self._now = time.monotonic()
        self._order.begin_step(self._now)
        if self._adapter_turns is not None:
            self._adapter_turns.begin_step(self._now)
        self.background.begin_step()
        max_prefix_logits = MAX_PREFIX_LOGITS if is_shared else self.max_logits
        batch = Batch(self.max_batch_tokens, self.max_logits, max_prefix_logits)
        return Step(batch, is_shared, may_draft(len(self.running)))

    def _schedule_isolated(self, step: Step) -> None:
        request = next(iter(self.isolated))
        if request in self.waiting:
            if not self.is_resident(request):
                return
            self.start(request, self._now)
        self._schedule(step.batch, request)

    def _pause_background(self, step: Step) -> None:
        for request in self.background.to_pause(self.running):
            self.pause(request)

    def _preempt_for_waiting(self, step: Step) -> None:
        if self.waiting:
            self._preemption.preempt_for_waiting(self._now)

    def _sort_running(self, step: Step) -> None:
        for request in self.running:
            if step.is_shared and request.needs_probabilities and request.seq.pages.size >= request.logits_from:
                step.drawing.append(request)
            else:
                (step.prefilling if request.num_pending > 1 else step.decoding).append(request)
        if self.background.is_limited:
            step.decoding.sort(key=lambda request: request.owner.is_background)

    def _schedule_decoding(self, step: Step) -> None:
        drafting = [request for request in step.decoding if request.may_draft()] if step.has_drafts else []
        generations = [request for request in drafting if isinstance(request, GenerationRequest)]
        self.drafter.plan(step.batch, generations, len(self.running))
        for request in step.decoding:
            if not step.batch.token_budget:
                return
            if request in drafting:
                self._schedule(step.batch, request, may_draft=True)
            elif not self._schedule_decode(step.batch, request):
                self._schedule(step.batch, request)

    def _schedule_drawing(self, step: Step) -> None:
        fairness, now = self.fairness, self._now
        for request in sorted(step.drawing, key=lambda r: (fairness.share_key(r, now), fairness.program_service(r))):
            if step.batch.token_budget:
                self._schedule(step.batch, request)

    def _schedule_prefilling(self, step: Step) -> None:
        """Schedules chunks of prompts. Each may be interrupted by shorter waiting ones."""
        fairness, now = self.fairness, self._now
        for request in sorted(step.prefilling, key=lambda r: (fairness.share_key(r, now), fairness.tier(r, now))):
            if self.waiting:
                self._admit(step.batch, before=request)
            if step.batch.token_budget:
                self._schedule(step.batch, request, may_draft=step.has_drafts and request.may_draft())

    def _admit_waiting(self, step: Step) -> None:
        self._admit(step.batch)

    # -- one request ------------------------------------------------------------------------------

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
        if may_draft and isinstance(request, GenerationRequest):
            self.drafter.add_draft(batch, request, len(self.running))
        count = min(request.num_pending, batch.tokens_within_budget(request, start))
        count = self._allocate(batch, request, self.background.within_budget(request, count))
        if not count:
            return
        if count > 1 and not request.num_draft_tokens and (node := self.cache.publish_early(request.seq)) is not None:
            self.inserted_nodes.append((node, len(node.key)))
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
                count = request.num_pending
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

    # -- admission --------------------------------------------------------------------------------

    def _admit(self, batch: Batch, before: Request | None = None) -> None:
        """Admits waiting requests in rank order, as far as they fit.

        `before`: a running request with a prompt. Only requests that may interrupt it, and need fewer tokens than are
        left of its prompt, are admitted.
        """
        if not self.waiting or not batch.token_budget or len(self.running) >= self.max_batch_rows:
            return
        for request in self._order.best_first():
            if not batch.token_budget or len(self.running) >= self.max_batch_rows:
                return
            if not self.has_room_for(request) or not self.background.may_admit(request, self.running):
                return
            if before is not None and not self._may_interrupt_prefill(request, before):
                continue
            self.start(request, self._now)
            self._schedule(batch, request)

    def _may_interrupt_prefill(self, waiting: Request, running: Request) -> bool:
        if not self.fairness.may_interrupt(waiting, running, self._now):
            return False
        is_of_other_queue = self.fairness.queue(waiting) != self.fairness.queue(running)
        return is_of_other_queue or len(waiting.seq) - self._order.num_cached(waiting) < running.num_pending
