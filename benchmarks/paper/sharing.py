"""What the prefix cache costs where it finds nothing: its seconds beside those of the forward passes, in one process.

Knows: that a scheduler has a cache and a model runner. Must not know: programs, peers.
"""

from __future__ import annotations

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


def cost_of_sharing_nothing(work: Work) -> float:
    """The share of the scheduler's working time (cache and forward passes) that the cache takes."""
    caching, computing = Clock(), Clock()
    with plait.Engine() as engine:
        work(engine)
        engine.client.flush_cache()
        cache, runner = engine.scheduler.cache, engine.scheduler.model_runner
        for name, method in vars(type(cache)).items():
            if callable(method) and not name.startswith("_") and name not in NOT_COUNTED:
                setattr(cache, name, caching.wrap(getattr(cache, name)))
        runner.forward = computing.wrap(runner.forward)
        work(engine)
    return caching.seconds / (computing.seconds + caching.seconds)
