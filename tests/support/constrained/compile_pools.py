"""Results of a compile pool, polled as a scheduler does."""

from __future__ import annotations

import select
from collections.abc import Collection
from time import monotonic

from plait.constrained import CompilePool, Grammar, GrammarError

PATIENCE_S = 60.0


def results_of(pool: CompilePool, tickets: Collection[int]) -> dict[int, Grammar | GrammarError]:
    """Polls until all tickets have results. Each ticket has one."""
    answers: dict[int, Grammar | GrammarError] = {}
    give_up = monotonic() + PATIENCE_S
    while not answers.keys() >= set(tickets):
        assert monotonic() < give_up
        poller = select.poll()
        for fileno in pool.filenos():
            poller.register(fileno, select.POLLIN)
        until = pool.next_deadline()
        poller.poll(100 if until is None else max(0.0, min(100, (until - monotonic()) * 1000 + 1)))
        for ticket, answer in pool.collect():
            assert ticket not in answers
            answers[ticket] = answer
    return answers
