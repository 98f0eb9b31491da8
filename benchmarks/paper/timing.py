"""Runs one workload from an empty cache and measures it: plait against an ideal cache, a peer by its own reports."""

from __future__ import annotations

import contextlib
import io
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from paper.ideal_cache import IdealCacheMeter
from paper.stateless_client import StatelessClient
from paper.workloads import Work


class Measurement(NamedTuple):
    """One run from an empty cache.

    `output_tokens`: the tokens of the answers, on which the time depends. `best`: the prompt tokens that a cache
    without limits would have served; None if unknown.
    """

    seconds: float
    prompt: int
    computed: int
    output_tokens: int
    best: int | None = None

    @property
    def cached(self) -> float:
        """The share of prompt tokens that were not computed."""
        return 1 - self.computed / self.prompt if self.prompt else 0.0

    @property
    def of_best(self) -> float | None:
        """The hits as a share of the best possible; None if no hit was possible."""
        return (self.prompt - self.computed) / self.best if self.best else None


class FailedRun(NamedTuple):
    """A workload that was not finished, and why."""

    why: str


def measure_plait(work: Work, client: Any, rounds: int) -> Measurement:
    """Returns the median of `rounds` runs by plait, after one run that compiles grammars and warms kernels."""

    def once() -> Measurement:
        client.flush_cache()
        sent = IdealCacheMeter(client)
        try:
            took = _timed(work, client)
        finally:
            sent.stop()
        return took._replace(best=sent.best_cached_tokens())

    return _median(once, rounds)


def measure_peer(work: Work, peer: StatelessClient, rounds: int) -> Measurement:
    """Returns the median of `rounds` runs as stateless requests to a peer."""

    def once() -> Measurement:
        peer.flush_cache()
        before = peer.reported_cached_tokens()
        took = _timed(work, peer)
        after = peer.reported_cached_tokens()
        return took if before is None or after is None else took._replace(computed=took.prompt - (after - before))

    return _median(once, rounds)


def _median(once: Callable[[], Measurement], rounds: int) -> Measurement:
    once()
    runs = [once() for _ in range(rounds)]
    middle = statistics.median_low(run.seconds for run in runs)
    return next(run for run in runs if run.seconds == middle)


def _timed(work: Work, backend: Any) -> Measurement:
    """Runs `work` once. Raises the first error of a program."""
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        states: Sequence[Any] = work(backend)
    wall = time.perf_counter() - start
    for state in states:
        if state.error() is not None:
            raise state.error()
    usages = [state.usage for state in states]
    prompt, computed = sum(u.prompt_tokens for u in usages), sum(u.computed_tokens for u in usages)
    return Measurement(wall, prompt, computed, sum(u.completion_tokens for u in usages))
