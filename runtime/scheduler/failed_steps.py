"""Discards the results of failed steps, so that pages without KV are never read, by requests or as cache."""

from __future__ import annotations

from collections.abc import Sequence

from plait.runtime.batch.request import Request
from plait.runtime.kv_cache.prefix_cache import PrefixCache
from plait.runtime.scheduler.overlap import OverlappedStep
from plait.runtime.scheduler.policy.batching import BatchScheduler


def discard_steps(
    steps: Sequence[OverlappedStep], cache: PrefixCache, batch_scheduler: BatchScheduler
) -> list[Request]:
    """Drops the pages of steps that raised, the latest step first, and returns their requests.

    A request keeps the pages that earlier steps wrote. Nodes that the steps published early leave the tree, and a
    request whose pages lie in one of them, or below, keeps none.
    """
    rows = [scheduled for step in steps for scheduled in step.batch.rows]
    for step in steps:
        step.finish(cache)
        step.batch.set_rows([])
    inserted = [cache.first_node_of_insert(*node) for step in steps for node in step.inserted_nodes]
    for scheduled in rows:
        scheduled.request.drop_draft()
        cache.discard(scheduled.request.seq, scheduled.start, inserted)
    requests = list(dict.fromkeys(scheduled.request for scheduled in rows))
    for request in [request for request in batch_scheduler.running if request not in requests]:
        batch_scheduler.retract(request)  # its node may be one of those removed below
    for node in inserted:
        cache.rollback_insert(node)
    return requests
