"""A step in flight, and the decision whether the next step is launched before its tokens are known.

    host    next batch N+1 ─ launch ─ collect N ─ commit N ─ masks N+1 ─ sampler N+1 ─ next batch N+2 ─ launch …
    device  [ forward N ][ sampler N ][ forward N+1                     ][ sampler N+1 ][ forward N+2 …

Forward N+1 reads the tokens of step N where sampler N left them on the device. If a request ends with step N, its part
of forward N+1 is wasted. The same holds if step N appends more tokens than the sampled one (forced tokens), because
forward N+1 then has not seen the last token. In both cases the request's result of step N+1 is discarded.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from plait.runtime.batch.batch import Batch
from plait.runtime.batch.request import GenerationRequest, Request
from plait.runtime.executor.step import InFlightStep, StepExecutor
from plait.runtime.kv_cache.prefix_cache import PrefixCache
from plait.runtime.kv_cache.radix_node import RadixNode
from plait.runtime.scheduler.policy.batching import BatchScheduler

MAX_DISCARD_RATE = 1 / 8  # above it, overlap costs more than it saves: the host's share of a step is about this
DISCARD_RATE_EWMA_WEIGHT = 1 / 16  # weight of the last step


class OverlappedStep:
    """One batch on its way through the executor.

    Call order: `launch`; `resolve_placeholders` once the previous step is committed; `ensure_launched`, sample and
    `mark_in_flight`; collect the tokens; `finish`.
    """

    def __init__(self, batch: Batch, inserted_nodes: list[tuple[RadixNode, int]]) -> None:
        self.batch, self.inserted_nodes = batch, list(inserted_nodes)
        self.sampled_requests = batch.sampled_requests  # the index of a request in this list is its slot
        self.in_flight: InFlightStep | None = None
        self.error: Exception | None = None
        self.is_finished = False
        self.discarded: set[Request] = set()  # requests whose result of this step is discarded
        self._placeholders = {
            scheduled.request: scheduled for scheduled in batch.rows if scheduled.placeholder is not None
        }
        self._unused_pages: list[int] = []  # reserved pages of discarded requests; the device may still write to them

    def launch(self, step_executor: StepExecutor, previous: OverlappedStep | None) -> None:
        """Starts the forward pass; behind an in-flight step only if the device can read that step's tokens itself.

        Stores an error in `error` instead of raising it, because the previous step must be committed first.
        """
        try:
            self.in_flight = (
                step_executor.launch(self.batch) if previous is None else step_executor.launch_overlapped(self.batch)
            )
        except Exception as error:
            self.error = error

    def resolve_placeholders(self, cache: PrefixCache, running: Collection[Request]) -> None:
        """Called once the previous step is committed.

        Commits the reserved pages of requests that continue with the sampled token. The other requests are discarded;
        their pages are released by `finish`.
        """
        for request, scheduled in self._placeholders.items():
            assert scheduled.placeholder is not None
            if request in running and request.seq.num_computed == scheduled.start < len(request.seq):
                cache.commit_reserved(request.seq, scheduled.placeholder.page)
                if scheduled.is_still_next:
                    continue
            else:
                request.seq.pages.bump_version()
                self._unused_pages.append(scheduled.placeholder.page)
            self.discarded.add(request)
        self._placeholders.clear()
        rows = [row for row in self.batch.rows if row.request not in self.discarded or row.request in running]
        if self.in_flight is None:  # not launched yet: the tokens are known now, and ended requests are dropped
            rows = [replace(row, placeholder=None) for row in rows]
        self.batch.set_rows(rows)
        if self.in_flight is None:
            self.sampled_requests = self.batch.sampled_requests

    def ensure_launched(self, step_executor: StepExecutor) -> InFlightStep:
        """Returns the launched step, launching it now if that was not possible before. Raises the error of `launch`."""
        if self.error is not None:
            raise self.error
        self.in_flight = self.in_flight or step_executor.launch(self.batch)
        return self.in_flight

    @property
    def is_complete(self) -> bool:
        """Whether its tokens are on the host and no step can be launched behind it before they are committed."""
        return self.in_flight is not None and self.in_flight.is_done and not self.in_flight.can_overlap

    @property
    def is_empty(self) -> bool:
        """Whether all its requests have ended before it was launched."""
        return not self.batch.rows and self.in_flight is None

    def mark_in_flight(self) -> None:
        """Sets `in_flight_slot` of the step's requests."""
        for slot, (_, request) in enumerate(self.sampled_requests):
            request.in_flight_slot = slot if request not in self.discarded else -1

    def continuing_requests(self, max_length: int) -> list[GenerationRequest]:
        """Returns the requests that could be scheduled in the next step before this step's tokens are known."""
        return [request for _, request in self.sampled_requests if request.expects_more_tokens(max_length)]

    def finish(self, cache: PrefixCache) -> None:
        """Ends the step, complete or not: no request waits for it, and the device no longer writes to its pages."""
        self.is_finished = True
        for _, request in self.sampled_requests:
            request.in_flight_slot = -1
        for page in self._unused_pages:
            cache.release_reserved(page)
        for scheduled in self._placeholders.values():
            assert scheduled.placeholder is not None
            cache.release_reserved(scheduled.placeholder.page)
        self._unused_pages.clear()
        self._placeholders.clear()


def discard_steps(steps: Sequence[OverlappedStep], batch_scheduler: BatchScheduler) -> list[Request]:
    """Drops the pages of steps that raised, the latest step first, and returns their requests.

    So pages without KV are never read, by requests or as cache.
    A request keeps the pages that earlier steps wrote. Nodes that the steps published early leave the tree, and a
    request whose pages lie in one of them, or below, keeps none.
    """
    cache = batch_scheduler.cache
    rows = [scheduled for step in steps for scheduled in step.batch.rows]
    for step in steps:
        step.finish(cache)
        step.batch.set_rows([])
    inserted = [cache.first_node_of_insert(*node) for step in steps for node in step.inserted_nodes]
    for scheduled in rows:
        scheduled.request.drop_draft()
        cache.discard(scheduled.request.seq, scheduled.start, inserted)
    requests = list(dict.fromkeys(scheduled.request for scheduled in rows))
    for request in [request for request in batch_scheduler.running if request not in requests]:
        batch_scheduler.retract(request)  # its node may be one of those removed below
    for node in inserted:
        cache.rollback_insert(node)
    return requests


class OverlapController:
    """Tracks the share of requests that overlap would schedule for nothing, as a moving average over steps."""

    def __init__(self) -> None:
        self.discard_rate = 0.0  # from 0 to 1

    def record_outcome(self, num_expected: int, num_continued: int) -> None:
        """Records a step: of `num_expected` requests expected to continue, `num_continued` did with one token.

        Called whether or not the next step was overlapped.
        """
        if num_expected:
            self.discard_rate += DISCARD_RATE_EWMA_WEIGHT * (1 - num_continued / num_expected - self.discard_rate)

    @property
    def is_worthwhile(self) -> bool:
        """Whether overlap is expected to save time."""
        return self.discard_rate <= MAX_DISCARD_RATE
