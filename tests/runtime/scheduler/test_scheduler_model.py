"""Random messages and events against a slow reference model, with sessions, pages, locks and pins checked each time.

PLAIT_SCHEDULER_STEPS sets the number of actions of the first test, PLAIT_SCHEDULER_SEED its first seed.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_model import SchedulerModel, run_random


def test_random_actions_agree_with_the_reference():
    num_actions = int(os.environ.get("PLAIT_SCHEDULER_STEPS", "3000"))
    totals = run_random(num_actions, seed=int(os.environ.get("PLAIT_SCHEDULER_SEED", "1")))
    assert totals["finished"] > num_actions // 30


class HypothesisDraw:
    """Draws that hypothesis can shrink."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def integer(self, low: int, high: int) -> int:
        return self._data.draw(st.integers(low, high))

    def choice(self, options):
        return options[self.integer(0, len(options) - 1)]


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_short_sequences_agree_with_the_reference(data):
    model = SchedulerModel(HypothesisDraw(data))
    try:
        for _ in range(data.draw(st.integers(1, 25))):
            model.act()
        model.act_drain()
        model.check()
    finally:
        model.close()
