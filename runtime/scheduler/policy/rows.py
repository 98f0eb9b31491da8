"""The waiting and the running requests of a scheduler, and what a waiting one needs to run: a row, and pages."""

from __future__ import annotations

from plait.runtime.batch.request import Request
from plait.runtime.config import EngineConfig
from plait.runtime.executor.runner import Runner
from plait.runtime.kv_cache.planned_release import PlannedRelease
from plait.runtime.kv_cache.prefix_cache import PrefixCache
from plait.runtime.scheduler.policy.background import BackgroundLimits
from plait.runtime.scheduler.policy.fairness import Fairness

RESERVE_TOKENS = 8  # pages kept free for the next tokens of each running request when another is admitted


class Rows:
    """Moves requests between the waiting and the running ones."""

    def __init__(self, cache: PrefixCache, config: EngineConfig, runner: Runner, max_batch_rows: int) -> None:
        self.cache, self.adapters = cache, runner.adapter_pool
        self.max_batch_tokens, self.max_batch_rows = runner.max_batch_tokens, max_batch_rows
        self.held_back = ""  # the adapter with which no further request starts
        self.waiting: dict[Request, None] = {}  # in order of arrival
        self.running: dict[Request, None] = {}  # in order of admission
        self.isolated: dict[Request, None] = {}  # waiting or running requests that are computed alone, in turn
        self.fairness = Fairness(config.order, config.tenant_weights)
        self.background = BackgroundLimits(self.fairness, self.max_batch_tokens, max_batch_rows)
        self.num_retractions = self.num_pauses = 0

    def add(self, request: Request) -> None:
        """Adds a new request to the waiting ones."""
        self.fairness.add(request)
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

    @property
    def has_work(self) -> bool:
        """Whether any request runs, or waits for nothing but its turn."""
        return bool(self.running) or any(map(self.may_start, self.waiting))

    def is_resident(self, request: Request) -> bool:
        """Whether a step can compute the request's adapter, or it has none."""
        adapter = request.seq.namespace.adapter
        return not adapter or (self.adapters is not None and adapter in self.adapters.slots)

    def may_start(self, request: Request) -> bool:
        """Whether a waiting request waits for nothing but its turn: a row, and pages."""
        return self.is_resident(request) and request.seq.namespace.adapter != (self.held_back or None)

    def start(self, request: Request, now: float) -> None:
        """Moves a waiting request to the running ones."""
        del self.waiting[request]
        request.metrics.admission_time = request.metrics.admission_time or now
        self.cache.activate(request.seq, request.logits_from)
        self.running[request] = None
        self.fairness.begin_turn(request)

    def preempt(self, request: Request) -> None:
        """Moves a running request to the waiting ones. Its pages stay cached until they are evicted."""
        request.in_flight_slot = -1
        del self.running[request]
        self.fairness.hold_row(request, -1)
        self.cache.release(request.seq)
        self.waiting = {request: None, **self.waiting}

    def pause(self, request: Request) -> None:
        """Preempts a running request for another one that may run before it."""
        self.num_pauses += 1
        self.preempt(request)

    def retract(self, request: Request) -> None:
        """Releases the pages of a running request because too few are free, and returns it to the waiting ones.

        Its KV stays cached until it is evicted; evicted tokens are computed again.
        """
        self.num_retractions += 1
        self.preempt(request)

    # -- isolation --------------------------------------------------------------------------------

    def isolate(self, request: Request) -> None:
        """Releases the pages of a running request, which is then computed again, alone, before any other request.

        Used for the requests of a step that failed, so that only the one that caused the failure fails.
        """
        self.preempt(request)
        self.isolated = {request: None, **self.isolated}

    def end_isolation(self, request: Request) -> None:
        """Ends the isolation of a request if at most one of its tokens is pending. Called after each isolated step.

        The request then waits until no request is isolated.
        """
        if request in self.isolated and request in self.running and request.num_pending <= 1:
            del self.isolated[request]
            if self.isolated:
                self.preempt(request)

    # -- room for a waiting request ----------------------------------------------------------------

    def is_row_free(self, waiting: Request, num_victims: int = 0) -> bool:
        """Whether a waiting request may have a row, once so many running requests have given up theirs."""
        num_running = len(self.running) - num_victims
        return num_running < self.max_batch_rows and self.background.may_admit(waiting, self.running, num_victims)

    def has_room_for(self, request: Request, num_victims: int = 0, released: PlannedRelease | None = None) -> bool:
        """Returns whether there are pages for all tokens of the request and the next few of the running requests.

        num_victims: running requests that give up what is in `released`.
        """
        released = released or PlannedRelease()
        num_running = len(self.running) - num_victims
        if not num_running:
            return True
        num_needed = len(request.seq) - self.cache.num_locked_match(request.seq, request.logits_from, released)
        return num_needed + RESERVE_TOKENS * (num_running + 1) <= self.cache.num_available + released.num_pages
