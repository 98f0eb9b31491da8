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

from plait.runtime.config import Order
from plait.runtime.scheduler.fairness import Fairness
from plait.runtime.scheduler.prefix_cache import PrefixCache
from plait.runtime.scheduler.radix_tree import Node
from plait.runtime.scheduler.rows import Batch, Row

RANKED = 64  # how many of the waiting are compared by cached prefix in one step
DRAFT_TOKENS = 32  # running rows and guesses of one step together
GUESS_PRICE = 0.12  # of one more row, in what each running row's token costs, times the root of their number: the more
#                     of them share the weights' reading, the less there is to share; measured 0.1 at 1, 0.5 at 16
TOO_DEAR = 0.5  # a price from which on no row is asked for guesses
MAX_LOGITS = 512  # positions of one step whose logits are kept: [MAX_LOGITS, V] float32 is 100 MB for 49,152 tokens
RESERVE_TOKENS = 8  # pages kept for each running row's next tokens when another is admitted


class Policy:
    """Waiting and running rows, and the choice between them."""

    def __init__(
        self,
        cache: PrefixCache,
        max_batch_tokens: int,
        max_batch_rows: int,
        max_length: int,
        draft: bool = True,
        order: Order = "fair",
    ) -> None:
        self.cache = cache
        self.max_batch_tokens = max_batch_tokens
        self.max_batch_rows = max_batch_rows
        self.max_logits = max(MAX_LOGITS, max_batch_rows)
        self.max_length, self.draft = max_length, draft
        self.waiting: dict[Row, None] = {}  # in order of arrival
        self.running: dict[Row, None] = {}  # in order of admission
        self.fairness = Fairness(order)
        self.num_retractions = self.num_pauses = 0
        self.new_nodes: list[tuple[Node, int]] = []  # published early in this step, with their tokens: void if it fails
        self._now = 0.0

    # -- coming and going -------------------------------------------------------------------------

    def add(self, row: Row) -> None:
        """The row waits to be admitted."""
        self.fairness.add(row)
        self.waiting[row] = None

    def remove(self, row: Row) -> None:
        """The row is done, failed or aborted. Its sequence is the caller's to release."""
        if row in self.waiting:
            del self.waiting[row]
        elif row in self.running:
            del self.running[row]
        else:
            return
        self.fairness.remove(row)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    # -- one step ---------------------------------------------------------------------------------

    def next_batch(self) -> Batch | None:
        """Rows for the next forward, their pages allocated; None when there is nothing to run."""
        batch = Batch(self.max_batch_tokens, self.max_logits)
        self.new_nodes.clear()
        self._now = time.monotonic()
        self._make_way()
        decoding: list[Row] = []
        prompts: list[Row] = []
        for row in self.running:
            (prompts if row.num_pending > 1 else decoding).append(row)
        may_draft = self.draft and self._guess_price < TOO_DEAR
        for row in decoding:
            if not batch.budget:
                break
            if may_draft and row.may_draft():
                self._schedule(batch, row, may_draft=True)
            elif not self._go_on(batch, row):
                self._schedule(batch, row)
        for row in sorted(prompts, key=self._tier) if prompts else ():
            if self._tier(row):
                self._admit(batch, before=row)
            if batch.budget:
                self._schedule(batch, row)
        self._admit(batch)
        return batch if batch.rows else None

    def _go_on(self, batch: Batch, row: Row) -> bool:
        """`_schedule` for a row in the midst of its output, with one token to compute and a page for it, as nearly all
        are; False, and nothing done, for the others."""
        seq = row.seq
        start = seq.pages.size
        is_alone = seq.tokens.size - start == 1 and seq.num_in_tree < start
        wants_logits = row.logits_from <= start and not row.wants_states  # then nothing is taken from the tree
        if not is_alone or not wants_logits or not self.cache.pool.num_free or batch.logits_budget <= 0:
            return False
        if row not in self.running:  # retracted by an earlier one
            return True
        self.cache.allocate(seq, 1)
        row.meter.count_computed(start, start + 1)
        self.fairness.charge(row, 1, self._now)
        batch.add_next(row, start)
        return True

    def _schedule(self, batch: Batch, row: Row, may_draft: bool = False) -> None:
        """Puts as many of the row's pending tokens into the batch as the budget and the pool allow."""
        if row not in self.running:  # retracted by an earlier one
            return
        if row.awaited >= 0 and not row.num_pending:
            self._run_ahead(batch, row)
            return
        self.cache.extend_from_cache(row.seq, row.logits_from)
        start = row.seq.num_computed
        row.meter.count_cached(start)
        if may_draft and row.num_pending == 1:
            self._draft(batch, row)
        count = min(row.num_pending, batch.room_for(row, start))
        if count <= 0:
            return
        while not self.cache.allocate(row.seq, count):
            if row.num_draft:
                row.drop_draft()
                count = 1
                continue
            chosen = {each.row for each in batch.rows} | {row}
            victim = next((other for other in reversed(self.running) if other not in chosen), None)
            if victim is not None and victim.arrival > row.arrival:
                self.retract(victim)
            elif self.cache.num_available:
                count = self.cache.num_available
            else:
                if batch.rows or victim is not None:
                    self.retract(row)
                return
        if count > 1 and not row.num_draft and (node := self.cache.publish_early(row.seq)) is not None:
            self.new_nodes.append((node, len(node.key)))
        row.meter.count_computed(start, start + count - row.num_draft)
        self.fairness.charge(row, count, self._now)
        batch.add(row, start, count)

    def _run_ahead(self, batch: Batch, row: Row) -> None:
        """Lets the row go on with the token that the step under way samples for it, before that is known."""
        if not batch.room_for(row, len(row.seq)) or not row.expects_another(self.max_length):
            return
        page = self.cache.lend()
        if page is not None:
            self.fairness.charge(row, 1, self._now)
            batch.add_ahead(row, page)

    @property
    def _guess_price(self) -> float:
        return GUESS_PRICE * math.sqrt(len(self.running))

    def _draft(self, batch: Batch, row: Row) -> None:
        """Lets the row guess ahead, as far as guesses may pay and the step has room."""
        num_rows, price = len(self.running), self._guess_price
        free, rows_left = DRAFT_TOKENS - num_rows - batch.num_drafts, num_rows - len(batch.rows)
        room = min(-(-free // max(1, rows_left)), batch.room_for(row, row.seq.num_computed) - 1)
        room = min(room, self.max_length - len(row.seq))
        if room > 0:
            entry = 0.0 if batch.num_drafts else price * (2 - 1 / num_rows)  # a step's first is as dear as two or three
            row.draft(room, price, entry, pause=num_rows // 2)  # about two rows look in a step

    def retract(self, row: Row) -> None:
        """Takes the row's pages away; it waits again and what is lost meanwhile is computed again."""
        self.num_retractions += 1
        self._set_aside(row)

    def _set_aside(self, row: Row) -> None:
        row.awaited = -1
        del self.running[row]
        self.cache.release(row.seq)
        self.waiting = {row: None, **self.waiting}

    def _make_way(self) -> None:
        """Pauses rows for waiting ones that may interrupt them, where all rows are taken."""
        if not self.waiting or len(self.running) < self.max_batch_rows:
            return
        now, weight = self._now, self.fairness.weight
        pausable = sorted((row for row in self.running if self._tier(row)), key=lambda row: weight(row, now))
        for row in self._ranked() if pausable else ():
            if not pausable or not self.fairness.may_interrupt(row, pausable[-1], now):
                return
            self.num_pauses += 1
            self._set_aside(pausable.pop())

    def _admit(self, batch: Batch, before: Row | None = None) -> None:
        """Lets waiting rows run, best first, as far as they fit; with `before` those that may interrupt its prompt,
        which must be longer than what they need."""
        if not self.waiting or not batch.budget or len(self.running) >= self.max_batch_rows:
            return
        for row in self._ranked():
            if not batch.budget or len(self.running) >= self.max_batch_rows or not self._fits(row):
                return
            if before is not None and not self._goes_before(row, before):
                continue
            del self.waiting[row]
            row.meter.admitted = row.meter.admitted or time.monotonic()
            self.cache.activate(row.seq, row.logits_from)
            self.running[row] = None
            self._schedule(batch, row)

    def _goes_before(self, waiting: Row, running: Row) -> bool:
        need = len(waiting.seq) - self._cached(waiting)
        return need < running.num_pending and self.fairness.may_interrupt(waiting, running, self._now)

    def _fits(self, row: Row) -> bool:
        """Room for all of the row's tokens now, and for the running ones' next few."""
        if not self.running:
            return True
        need = len(row.seq) - self.cache.num_shared(row.seq, row.logits_from)
        return need + RESERVE_TOKENS * (len(self.running) + 1) <= self.cache.num_available

    def _ranked(self) -> list[Row]:
        """The waiting rows to admit next, best first."""
        rank, now = self.fairness.rank, self._now
        first = heapq.nsmallest(RANKED, self.waiting, key=lambda row: rank(row, now))
        return sorted(first, key=lambda row: (*rank(row, now), -self._cached(row), row.arrival))

    def _tier(self, row: Row) -> int:
        return self.fairness.tier(row, self._now)

    def _cached(self, row: Row) -> int:
        return self.cache.peek(row.seq, row.logits_from)
