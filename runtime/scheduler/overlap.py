"""A step that is under way, and whether the next one is launched behind it before its tokens are known.

    host    next batch N+1 ─ launch ─ collect N ─ commit N ─ masks N+1 ─ sampler N+1 ─ next batch N+2 ─ launch …
    device  [ forward N ][ sampler N ][ forward N+1                     ][ sampler N+1 ][ forward N+2 …

Forward N+1 takes the tokens of step N where sampler N left them. A row that ends with step N has gone through forward
N+1 for nothing; so has one to which step N gave more tokens than the sampled one (forced ones), for its logits are
not those behind its last token. Their tokens of step N+1 are dropped.

Knows: batches, flights, lent pages. Must not know: what tokens mean, when a step is made.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from plait.runtime.batch.request import Batch, GenerationRequest, Request
from plait.runtime.executor.step import InFlightStep, StepExecutor
from plait.runtime.kv_cache.prefix_cache import PrefixCache
from plait.runtime.kv_cache.radix_tree import RadixNode

MAX_DISCARD_RATE = 1 / 8  # about what the host's work between two steps is of a step: more lost tokens do not pay
DISCARD_RATE_EWMA_WEIGHT = 1 / 16  # weight of the last step


class OverlappedStep:
    """One batch on its way: `launch`, `resolve_placeholders` once the step before is committed, `sample`, `collect`."""

    def __init__(self, batch: Batch, provisional_nodes: list[tuple[RadixNode, int]]) -> None:
        self.batch, self.provisional_nodes = batch, list(provisional_nodes)
        self.sampled_requests = batch.sampled_requests  # a row's place here is its slot
        self.in_flight: InFlightStep | None = None
        self.error: Exception | None = None
        self.is_finished = False
        self.discarded: set[Request] = set()  # rows whose tokens of this step are to be dropped
        self._placeholders = {each.request: each for each in batch.rows if each.placeholder is not None}
        self._unused_pages: list[int] = []  # lent pages that nobody will read, until nobody writes them either

    def launch(self, step_executor: StepExecutor, before: OverlappedStep | None) -> None:
        """Begins the forward; behind a step under way only if the device can go on by itself. What it raises is kept:
        the step before is to be settled first."""
        try:
            self.in_flight = (
                step_executor.launch(self.batch) if before is None else step_executor.launch_overlapped(self.batch)
            )
        except Exception as error:
            self.error = error

    def resolve_placeholders(self, cache: PrefixCache, running: Collection[Request]) -> None:
        """The step before is committed: rows that go on keep their lent pages, the others' are given back later."""
        for request, each in self._placeholders.items():
            assert each.placeholder is not None
            if request in running and request.seq.num_computed == each.start < len(request.seq):
                cache.commit_reserved(request.seq, each.placeholder.page)
                if each.is_still_next:
                    continue
            else:
                request.seq.pages.bump_version()
                self._unused_pages.append(each.placeholder.page)
            self.discarded.add(request)
        self._placeholders.clear()
        rows = [each for each in self.batch.rows if each.request not in self.discarded or each.request in running]
        if self.in_flight is None:  # it begins only now, knows its tokens, and need not compute what has ended
            rows = [replace(each, placeholder=None) for each in rows]
        self.batch.set_rows(rows)
        if self.in_flight is None:
            self.sampled_requests = self.batch.sampled_requests

    def ensure_launched(self, step_executor: StepExecutor) -> InFlightStep:
        """Its flight, which begins now if it could not before. Raises what launching raised."""
        if self.error is not None:
            raise self.error
        self.in_flight = self.in_flight or step_executor.launch(self.batch)
        return self.in_flight

    @property
    def is_complete(self) -> bool:
        """Whether its tokens are, and nothing could be launched behind them that would not know them."""
        return self.in_flight is not None and self.in_flight.is_done and not self.in_flight.can_overlap

    @property
    def is_empty(self) -> bool:
        """Whether all its rows have ended before anything was begun."""
        return not self.batch.rows and self.in_flight is None

    def mark_in_flight(self) -> None:
        """Its rows wait for their next tokens from now on."""
        for slot, (_, gen) in enumerate(self.sampled_requests):
            gen.in_flight_slot = slot if gen not in self.discarded else -1

    def continuing_requests(self, max_length: int) -> list[GenerationRequest]:
        """The rows that would go ahead of this step's tokens."""
        return [gen for _, gen in self.sampled_requests if gen.expects_more_tokens(max_length)]

    def finish(self, cache: PrefixCache) -> None:
        """It is done, or will never be: no row waits for it, and no page is written by it."""
        self.is_finished = True
        for _, gen in self.sampled_requests:
            gen.in_flight_slot = -1
        for page in [
            *self._unused_pages,
            *(each.placeholder.page for each in self._placeholders.values() if each.placeholder is not None),
        ]:
            cache.release_reserved(page)
        self._unused_pages.clear()
        self._placeholders.clear()


class OverlapController:
    """How many of the rows that could go ahead of their tokens would do so for nothing, lately."""

    def __init__(self) -> None:
        self.discard_rate = 0.0  # a share

    def record_outcome(self, num_expected: int, num_continued: int) -> None:
        """What a step has shown, whether or not the next one was launched ahead of it."""
        if num_expected:
            self.discard_rate += DISCARD_RATE_EWMA_WEIGHT * (1 - num_continued / num_expected - self.discard_rate)

    @property
    def is_worthwhile(self) -> bool:
        return self.discard_rate <= MAX_DISCARD_RATE
