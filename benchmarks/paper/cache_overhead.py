"""The overhead of the prefix cache where it finds nothing: its share of the time of all steps, in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from paper.workloads import Work

import plait

NOT_COUNTED = ("check_integrity", "counts", "flush")


class Stopwatch:
    """Counts the seconds inside the wrapped functions (nested calls once) and between them."""

    def __init__(self) -> None:
        self.inside = self.between = 0.0
        self._depth, self._ended = 0, time.perf_counter()

    def wrap(self, owner: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def clocked(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            self.between += 0.0 if self._depth else began - self._ended
            self._depth += 1
            try:
                return function(*arguments, **named)
            finally:
                self._depth -= 1
                self._ended = time.perf_counter()
                self.inside += 0.0 if self._depth else self._ended - began

        setattr(owner, name, clocked)


class Cost(NamedTuple):
    """Shares of the scheduler's working time: `sharing`, looking up and storing prefixes; `pages`, allocating pages,
    which a runtime without a cache does too."""

    sharing: float
    pages: float


def cache_overhead(work: Work, rounds: int = 5) -> Cost:
    """Returns the median cost of the cache's methods over `rounds` runs of `work`, whose texts share no prefix."""
    caching, paging, receiving = Stopwatch(), Stopwatch(), Stopwatch()
    with plait.Engine() as engine:
        work(engine)
        engine_loop, cache = engine.engine_loop, engine.engine_loop.cache
        for clock, owner in ((caching, cache), (paging, cache.pool)):
            for name, method in vars(type(owner)).items():
                if callable(method) and not name.startswith("_") and name not in NOT_COUNTED:
                    clock.wrap(owner, name)
        receiving.wrap(engine_loop, "receive")
        costs = []
        for _ in range(rounds):
            engine.client.flush_cache()
            before = caching.inside, paging.inside, receiving.between
            work(engine)
            spent, paged, worked = (
                now - then for now, then in zip((caching.inside, paging.inside, receiving.between), before, strict=True)
            )
            costs.append(Cost((spent - paged) / worked, paged / worked))
    return sorted(costs)[rounds // 2]
