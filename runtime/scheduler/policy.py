"""Which rows run in the next step, and with how many tokens each.

Order among the waiting: the tenant served least so far (virtual token counter, Sheng et al. 2024,
arXiv 2401.00588), then priority, then the program served least (least attained service in doubling levels, as
Autellix does, arXiv 2502.13965), then the longest cached prefix, then arrival. A row that has waited long goes
first among its tenant's. When pages are short, the row admitted last gives its own back and waits again.

Knows: rows, the prefix cache, the token budget. Must not know: tensors, messages, sampling.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter

from plait.runtime.scheduler.prefix_cache import PrefixCache
from plait.runtime.scheduler.radix_tree import Node
from plait.runtime.scheduler.rows import Batch, Row

RANKED = 64  # how many of the waiting are compared by cached prefix in one step
DRAFT_TOKENS = 32  # running rows and guesses of one step together
STARVING_S = 10.0
MAX_AWAY = 4096  # tenants without rows whose service is remembered
MAX_LOGITS = 512  # positions of one step whose logits are kept: [MAX_LOGITS, V] float32 is 100 MB for 49,152 tokens
LEVEL_TOKENS = 256  # programs within one doubling of this much service count as equal
RESERVE_TOKENS = 8  # pages kept for each running row's next tokens when another is admitted


class Policy:
    """Waiting and running rows, and the choice between them."""

    def __init__(
        self, cache: PrefixCache, max_batch_tokens: int, max_batch_rows: int, max_length: int, draft: bool = True
    ) -> None:
        self.cache = cache
        self.max_batch_tokens = max_batch_tokens
        self.max_batch_rows = max_batch_rows
        self.max_logits = max(MAX_LOGITS, max_batch_rows)
        self.max_length, self.draft = max_length, draft
        self.waiting: dict[Row, None] = {}  # in order of arrival
        self.running: list[Row] = []  # in order of admission
        self.num_retractions = 0
        self.new_nodes: list[tuple[Node, int]] = []  # published early in this step, with their tokens: void if it fails
        self._tenant_rows: Counter[str] = Counter()
        self._tenant_served: dict[str, int] = {}  # of the tenants that have rows
        self._tenants_away: dict[str, int] = {}  # what those without rows were served, the longest away first
        self._program_served: dict[tuple[bytes, int], int] = {}
        self._arrivals = 0

    # -- coming and going -------------------------------------------------------------------------

    def add(self, row: Row) -> None:
        """The row waits to be admitted."""
        self._arrivals += 1
        row.arrival = self._arrivals
        tenant = row.session.opened.tenant
        if tenant not in self._tenant_rows:  # one that comes back has saved up nothing while it was away, and owes
            least = min(self._tenant_served.values(), default=0)
            self._tenant_served[tenant] = max(least, self._tenants_away.pop(tenant, 0))
        self._tenant_rows[tenant] += 1
        self.waiting[row] = None

    def remove(self, row: Row) -> None:
        """The row is done, failed or aborted. Its sequence is the caller's to release."""
        if row in self.waiting:
            del self.waiting[row]
        elif row in self.running:
            self.running.remove(row)
        else:
            return
        tenant = row.session.opened.tenant
        self._tenant_rows[tenant] -= 1
        if not self._tenant_rows[tenant]:
            del self._tenant_rows[tenant]
            self._tenants_away[tenant] = self._tenant_served.pop(tenant)
            if len(self._tenants_away) > MAX_AWAY:
                del self._tenants_away[next(iter(self._tenants_away))]

    def forget_program(self, program: tuple[bytes, int]) -> None:
        """The program's last session is gone."""
        self._program_served.pop(program, None)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    # -- one step ---------------------------------------------------------------------------------

    def next_batch(self) -> Batch | None:
        """Rows for the next forward, their pages allocated; None when there is nothing to run."""
        batch = Batch(self.max_batch_tokens, self.max_logits)
        self.new_nodes.clear()
        chosen: set[Row] = set()
        decodes_first = sorted(self.running, key=lambda row: row.num_pending > 1)
        for row in decodes_first:
            if batch.budget and row in self.running:  # an earlier one may have retracted it
                self._schedule(batch, row, chosen)
        self._admit(batch, chosen)
        return batch if batch.rows else None

    def _schedule(self, batch: Batch, row: Row, chosen: set[Row]) -> None:
        """Puts as many of the row's pending tokens into the batch as the budget and the pool allow."""
        if row.awaited >= 0 and not row.num_pending:
            self._run_ahead(batch, row, chosen)
            return
        self.cache.extend_from_cache(row.seq, row.logits_from)
        start = row.seq.num_computed
        row.meter.count_cached(start)
        if row.num_pending == 1:
            self._draft(batch, row)
        count = min(row.num_pending, batch.room_for(row, start))
        if count <= 0:
            return
        while not self.cache.allocate(row.seq, count):
            if row.num_draft:
                row.drop_draft()
                count = 1
                continue
            victim = next((r for r in reversed(self.running) if r not in chosen and r is not row), None)
            if victim is not None and victim.arrival > row.arrival:
                self.retract(victim)
            elif self.cache.num_available:
                count = self.cache.num_available
            else:
                if chosen or victim is not None:
                    self.retract(row)
                return
        if count > 1 and not row.num_draft and (node := self.cache.publish_early(row.seq)) is not None:
            self.new_nodes.append((node, len(node.key)))
        row.meter.count_computed(start, start + count - row.num_draft)
        self._charge(row, count)
        batch.add(row, start, count)
        chosen.add(row)

    def _run_ahead(self, batch: Batch, row: Row, chosen: set[Row]) -> None:
        """Lets the row go on with the token that the step under way samples for it, before that is known."""
        if not batch.room_for(row, len(row.seq)) or not row.expects_another(self.max_length):
            return
        page = self.cache.lend()
        if page is not None:
            self._charge(row, 1)
            batch.add_ahead(row, page)
            chosen.add(row)

    def _draft(self, batch: Batch, row: Row) -> None:
        """Lets the row guess ahead where the step has room: a few tokens more cost a small batch next to nothing."""
        room = min(DRAFT_TOKENS - len(self.running) - batch.num_drafts, batch.room_for(row, row.seq.num_computed) - 1)
        room = min(room, self.max_length - len(row.seq))
        if room > 0 and self.draft:
            row.draft(room)

    def retract(self, row: Row) -> None:
        """Takes the row's pages away; it waits again and what is lost meanwhile is computed again."""
        self.num_retractions += 1
        row.awaited = -1
        self.running.remove(row)
        self.cache.release(row.seq)
        self.waiting = {row: None, **self.waiting}

    def _admit(self, batch: Batch, chosen: set[Row]) -> None:
        if not self.waiting or not batch.budget or len(self.running) >= self.max_batch_rows:
            return
        for row in self._ranked():
            if not batch.budget or len(self.running) >= self.max_batch_rows or not self._fits(row):
                return
            del self.waiting[row]
            row.meter.admitted = row.meter.admitted or time.monotonic()
            self.cache.activate(row.seq, row.logits_from)
            self.running.append(row)
            self._schedule(batch, row, chosen)

    def _fits(self, row: Row) -> bool:
        """Room for all of the row's tokens now, and for the running ones' next few."""
        if not self.running:
            return True
        need = len(row.seq) - self.cache.num_shared(row.seq, row.logits_from)
        return need + RESERVE_TOKENS * (len(self.running) + 1) <= self.cache.num_available

    def _ranked(self) -> list[Row]:
        """The waiting rows to admit next, best first."""
        now = time.monotonic()
        first = heapq.nsmallest(RANKED, self.waiting, key=lambda row: self._fairness(row, now))
        return sorted(first, key=lambda row: (*self._fairness(row, now), -self._cached(row), row.arrival))

    def _fairness(self, row: Row, now: float) -> tuple[int, bool, int, int]:
        tenant = self._tenant_served[row.session.opened.tenant] // LEVEL_TOKENS
        if now - row.meter.arrived > STARVING_S:
            return (tenant, False, row.arrival, 0)
        served = self._program_served.get(row.session.program, 0)
        return (tenant, True, -row.session.opened.priority, (served // LEVEL_TOKENS).bit_length())

    def _cached(self, row: Row) -> int:
        return self.cache.peek(row.seq, row.logits_from)

    def _charge(self, row: Row, num_tokens: int) -> None:
        tenant, program = row.session.opened.tenant, row.session.program
        self._tenant_served[tenant] += num_tokens
        self._program_served[program] = self._program_served.get(program, 0) + num_tokens
