"""How many replicas a deployment should have, from the KV tokens in use. Knows nothing of Ray."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from plait.runtime.messages import Status

KV_DEMAND = "kv_demand"  # the name of the metric that replicas report to Ray Serve
SLACK = 0.2  # replicas are removed only where the others then stay this share below the target


def kv_demand(status: Status) -> float:
    """The share of a replica's KV tokens that its running and waiting requests need; above 1 where they do not fit.

    A waiting call is taken to need as many tokens as a running one; without any, a 64th of all.
    """
    total = max(1, status.total_pages)
    per_call = status.used_pages / status.running_calls if status.running_calls else total / 64
    return (status.used_pages + status.waiting_calls * per_call) / total


def desired_replicas(
    current: int, num_running: int, demands: Iterable[float], minimum: int, maximum: int, target: float
) -> int:
    """Returns the number of replicas that brings the mean demand to `target` at most.

    current: the number decided before, of which `num_running` run and the others start. demands: those of running
    replicas that reported; the other running ones count as their mean. A number below `current` leaves the mean SLACK
    of the target free, so that the next decision does not undo it.
    """
    known = [max(0.0, demand) for demand in demands if math.isfinite(demand)]
    if not known:
        return min(max(current, minimum), maximum)
    total = sum(known) / len(known) * max(num_running, len(known))
    needed, with_slack = _ceil(total / target), _ceil(total / (target * (1 - SLACK)))
    desired = needed if needed > current else min(current, with_slack)
    return min(max(desired, minimum), maximum)


def _ceil(value: float) -> int:
    return math.ceil(value - 1e-9)


class KvTokensPolicy:
    """A policy of Ray Serve's autoscaling: `desired_replicas` of the demands that replicas report.

    Called by Ray Serve's controller, which adds the delays of its `AutoscalingConfig`.
    """

    def __init__(self, target: float) -> None:
        self.target = target

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        demands = (context.aggregated_metrics or {}).get(KV_DEMAND) or {}
        running = {replica: demands[replica] for replica in context.running_replicas if replica in demands}
        desired = desired_replicas(
            context.target_num_replicas,
            len(context.running_replicas),
            running.values(),
            context.capacity_adjusted_min_replicas,
            context.capacity_adjusted_max_replicas,
            self.target,
        )
        return desired, context.policy_state
