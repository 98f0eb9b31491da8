"""How many replicas: the decision as a pure function, by property, and what a replica reports."""

from __future__ import annotations

import math
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from plait.runtime.messages import Status
from plait.runtime.server.deployment.engine_replica import (
    KV_DEMAND,
    SLACK,
    KvTokensPolicy,
    desired_replicas,
    kv_demand,
)

DEMANDS = st.lists(st.floats(0, 4), min_size=1, max_size=12)
TARGETS = st.floats(0.05, 1.0)


def decide(demands: list[float], target: float, current: int | None = None, low: int = 1, high: int = 1000) -> int:
    return desired_replicas(len(demands) if current is None else current, len(demands), demands, low, high, target)


@given(DEMANDS, TARGETS)
def test_the_mean_demand_comes_to_the_target_at_most_with_as_few_replicas_as_that_takes(demands, target):
    desired, total = decide(demands, target), sum(demands)
    assert total / desired <= target + 1e-6
    if desired > len(demands):
        assert total / (desired - 1) > target - 1e-6  # one fewer would not do
    elif 1 < desired < len(demands):
        assert total / (desired - 1) > target * (1 - SLACK) - 1e-6


@given(DEMANDS, TARGETS)
def test_the_next_decision_at_the_same_demand_changes_nothing(demands, target):
    desired, total = decide(demands, target), sum(demands)
    assert decide([total / desired] * desired, target) == desired


@given(DEMANDS, TARGETS, st.integers(1, 20), st.integers(0, 20))
def test_the_bounds_hold(demands, target, low, more):
    assert low <= decide(demands, target, low=low, high=low + more) <= low + more


@given(DEMANDS, TARGETS, st.floats(0, 4))
def test_more_demand_never_means_fewer_replicas(demands, target, extra):
    assert decide([demands[0] + extra, *demands[1:]], target) >= decide(demands, target)


@given(DEMANDS, TARGETS, st.integers(1, 8))
def test_replicas_that_start_are_not_counted_as_demand(demands, target, starting):
    needed = math.ceil(sum(demands) / target - 1e-9)
    current = len(demands) + starting
    assert decide(demands, target, current=current) <= max(current, needed)


def test_nothing_known_changes_nothing():
    assert desired_replicas(3, 3, [], 1, 8, 0.5) == 3
    assert desired_replicas(3, 3, [math.nan], 1, 8, 0.5) == 3
    assert desired_replicas(0, 0, [], 2, 8, 0.5) == 2


def test_a_running_replica_that_did_not_report_counts_as_the_others():
    assert desired_replicas(3, 3, [0.8, 0.8], 1, 8, 0.5) == math.ceil(3 * 0.8 / 0.5)


def test_the_policy_reads_the_context_of_ray_serve():
    context = SimpleNamespace(
        aggregated_metrics={KV_DEMAND: {"a": 0.9, "b": 0.9, "gone": 4.0}},
        running_replicas=["a", "b"],
        target_num_replicas=2,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=8,
        policy_state={"kept": 1},
    )
    assert KvTokensPolicy(0.6)(context) == (3, {"kept": 1})
    context.aggregated_metrics = None
    assert KvTokensPolicy(0.6)(context) == (2, {"kept": 1})


def status(held: int, running: int = 0, waiting: int = 0, total: int = 1000) -> Status:
    return Status(0, 0, 0, running, waiting, total - held, 0, held, total, 0, 0, 0, 0)


def test_the_demand_counts_held_tokens_and_those_that_wait():
    assert kv_demand(status(0)) == 0
    assert kv_demand(status(500, running=5)) == 0.5
    assert kv_demand(status(900, running=9, waiting=9)) == 1.8  # beyond 1: they do not fit
    assert kv_demand(status(0, waiting=64)) == 1.0
    assert kv_demand(status(0, total=0)) == 0
