"""What the prefix cache costs where it finds nothing: its seconds beside those of all steps, in one process.

Knows: that a scheduler has steps and a cache. Must not know: programs, peers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from paper.workloads import Work

import plait

NOT_COUNTED = ("check_integrity", "counts", "flush")


class Clock:
    """Adds up the seconds inside the functions that it wraps; of nested ones the outermost counts."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*arguments: Any, **named: Any) -> Any:
            self._depth += 1
            start = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self._depth -= 1
                self.seconds += 0.0 if self._depth else time.perf_counter() - start

        return clocked


def cost_of_sharing_nothing(work: Work, rounds: int = 5) -> float:
    """The share of the scheduler's working time that the cache takes; the median of some runs. Pages are part of it,
    which a runtime without a cache would have to hand out as well."""
    caching, stepping, waiting = Clock(), Clock(), Clock()
    with plait.Engine() as engine:
        work(engine)
        scheduler, cache = engine.scheduler, engine.scheduler.cache
        for name, method in vars(type(cache)).items():
            if callable(method) and not name.startswith("_") and name not in NOT_COUNTED:
                setattr(cache, name, caching.wrap(getattr(cache, name)))
        for name, clock in (("step", stepping), ("receive", waiting)):
            setattr(scheduler, name, clock.wrap(getattr(scheduler, name)))
        shares = []
        for _ in range(rounds):
            engine.client.flush_cache()
            before = caching.seconds, stepping.seconds - waiting.seconds
            work(engine)
            spent, worked = caching.seconds - before[0], stepping.seconds - waiting.seconds - before[1]
            shares.append(spent / worked)
    return statistics.median(shares)
