"""Random messages, steps and events for the scheduler, compared with a slow reference after each step."""

from __future__ import annotations

import time
from collections.abc import Iterator

from faults.figures import Figure, Scale
from scheduler_model import run_random


def inflict(scale: Scale) -> Iterator[Figure]:
    num_actions = scale.count(scale.scheduler_steps, 600)
    start = time.perf_counter()
    totals = run_random(num_actions, 0)
    measured = f"equal after {time.perf_counter() - start:.0f} s: {totals['engine_steps']:,} steps, "
    measured += f"{totals['retractions']:,} retractions, {totals['disconnect']:,} disconnects"
    fault = f"{num_actions:,} random actions on the scheduler: pages, locks and answers"
    yield Figure(fault, "those of a reference", measured, True)
