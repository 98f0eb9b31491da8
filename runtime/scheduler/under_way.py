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

from plait.runtime.flight import Flight, Launcher
from plait.runtime.scheduler.prefix_cache import PrefixCache
from plait.runtime.scheduler.radix_tree import Node
from plait.runtime.scheduler.rows import Batch, Generation, Row

MOST_WASTE = 1 / 8  # about what the host's work between two steps is of a step: more lost tokens do not pay
MEMORY = 1 / 16  # weight of the last step


class UnderWay:
    """One batch on its way: `launch`, `resolve` once the step before is committed, `sample`, `collect`."""

    def __init__(self, batch: Batch, new_nodes: list[tuple[Node, int]]) -> None:
        self.batch, self.new_nodes = batch, list(new_nodes)
        self.sampled = batch.sampled  # a row's place here is its slot
        self.flight: Flight | None = None
        self.error: Exception | None = None
        self.is_over = False
        self.passed_over: set[Row] = set()  # rows whose tokens of this step are to be dropped
        self._lent = {each.row: each for each in batch.rows if each.ahead is not None}
        self._unused: list[int] = []  # lent pages that nobody will read, until nobody writes them either

    def launch(self, launcher: Launcher, before: UnderWay | None) -> None:
        """Begins the forward; behind a step under way only if the device can go on by itself. What it raises is kept:
        the step before is to be settled first."""
        try:
            self.flight = launcher.launch(self.batch) if before is None else launcher.follow(self.batch)
        except Exception as error:
            self.error = error

    def resolve(self, cache: PrefixCache, running: Collection[Row]) -> None:
        """The step before is committed: rows that go on keep their lent pages, the others' are given back later."""
        for row, each in self._lent.items():
            assert each.ahead is not None
            if row in running and row.seq.num_computed == each.start < len(row.seq):
                cache.keep(row.seq, each.ahead.page)
                if each.is_current:
                    continue
            else:
                row.seq.pages.touch()
                self._unused.append(each.ahead.page)
            self.passed_over.add(row)
        self._lent.clear()
        rows = [each for each in self.batch.rows if each.row not in self.passed_over or each.row in running]
        if self.flight is None:  # it begins only now, knows its tokens, and need not compute what has ended
            rows = [replace(each, ahead=None) for each in rows]
        self.batch.keep(rows)
        if self.flight is None:
            self.sampled = self.batch.sampled

    def begun(self, launcher: Launcher) -> Flight:
        """Its flight, which begins now if it could not before. Raises what launching raised."""
        if self.error is not None:
            raise self.error
        self.flight = self.flight or launcher.launch(self.batch)
        return self.flight

    @property
    def is_here(self) -> bool:
        """Whether its tokens are, and nothing could be launched behind them that would not know them."""
        return self.flight is not None and self.flight.is_done and not self.flight.can_be_followed

    @property
    def is_pointless(self) -> bool:
        """Whether all its rows have ended before anything was begun."""
        return not self.batch.rows and self.flight is None

    def await_tokens(self) -> None:
        """Its rows wait for their next tokens from now on."""
        for slot, (_, gen) in enumerate(self.sampled):
            gen.awaited = slot if gen not in self.passed_over else -1

    def expecting(self, max_length: int) -> list[Generation]:
        """The rows that would go ahead of this step's tokens."""
        return [gen for _, gen in self.sampled if gen.expects_another(max_length)]

    def end(self, cache: PrefixCache) -> None:
        """It is done, or will never be: no row waits for it, and no page is written by it."""
        self.is_over = True
        for _, gen in self.sampled:
            gen.awaited = -1
        for page in [*self._unused, *(each.ahead.page for each in self._lent.values() if each.ahead is not None)]:
            cache.give_back(page)
        self._unused.clear()
        self._lent.clear()


class Foresight:
    """How many of the rows that could go ahead of their tokens would do so for nothing, lately."""

    def __init__(self) -> None:
        self.waste = 0.0  # a share

    def learn(self, num_expecting: int, num_right: int) -> None:
        """What a step has shown, whether or not the next one was launched ahead of it."""
        if num_expecting:
            self.waste += MEMORY * (1 - num_right / num_expecting - self.waste)

    @property
    def pays(self) -> bool:
        return self.waste <= MOST_WASTE
