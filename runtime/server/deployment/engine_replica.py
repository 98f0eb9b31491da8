"""`EngineReplica`: one replica of a deployment in Ray Serve: a runtime process that is restarted when it ends.

Ray Serve places it, watches it and ends it. Requests do not come through Ray: an ingress connects to the runtime
itself, by its Unix sockets or, from another machine, by a tunnel to them that opens when it is first asked for.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import ssl
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from plait.runtime.errors import PlaitError
from plait.runtime.messages import Status
from plait.runtime.server.deployment.deploy_config import DeployConfig
from plait.runtime.server.deployment.replica_address import ReplicaAddress
from plait.runtime.server.engines.restarting_runtime import RestartingRuntime
from plait.runtime.server.engines.status_query import StatusQuery
from plait.runtime.server.ops.request_log import set_up_log
from plait.runtime.transport.tunnel import SECRET_BYTES, TunnelServer

LEAVE_AFTER_S = 0.5  # at least; until then an ingress has heard that this replica takes no more requests
DRAIN_POLL_S = 0.1

log = logging.getLogger("plait.server")


@dataclass(frozen=True)
class ReplicaPlace:
    """Which replica this is, for Ray Serve, and on which node of Ray. host: the node's address. tls: a context for
    connections from other nodes, if Ray itself uses TLS."""

    replica_id: str
    node_id: str
    host: str
    tls: ssl.SSLContext | None = None


class EngineReplica:
    """Starts the runtime in the constructor, which raises what `Runtime` raises.

    config: a `DeployConfig` as JSON. find_place: called in the process of the replica.
    """

    _is_leaving = False

    def __init__(self, config: bytes, find_place: Callable[[], ReplicaPlace]) -> None:
        set_up_log("json")
        settings = msgspec.json.decode(config, type=DeployConfig)
        self._place, self._drain_timeout_s = find_place(), settings.server.drain_timeout_s
        self._tunnel: TunnelServer | None = None
        self._remote_address = asyncio.Lock()  # guards the next
        self._tunnel_at: ReplicaAddress | None = None
        self._runtime = RestartingRuntime(
            settings.model,
            stuck_after_s=settings.server.stuck_after_s,
            max_restarts=settings.server.max_restarts,
            name="the replica",
            **settings.engine,
        )
        self._status = StatusQuery(lambda: self._runtime.client)

    # -- called by Ray Serve --------------------------------------------------------------------------

    async def check_health(self) -> None:
        """Raises NotRestarted if the runtime has ended and will not be restarted, so that the replica is replaced."""
        _ = self._runtime.client

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The share of the KV tokens that running and waiting requests need, for `KvTokensPolicy`."""
        try:
            status = await self._status.status()
        except PlaitError:
            status = None
        return {} if status is None else {KV_DEMAND: kv_demand(status)}

    def __del__(self) -> Coroutine[Any, Any, None] | None:
        """Called, and awaited, by Ray Serve when the replica leaves. Python calls it once more when it frees the
        object, where there is nothing left to do."""
        if self._is_leaving or not hasattr(self, "_runtime"):  # the constructor failed
            return None
        self._is_leaving = True
        return self._drain()

    async def _drain(self) -> None:
        """Waits until the requests have ended, then ends the runtime. Ray Serve has told the ingress to send no more,
        and kills this process some seconds after the drain timeout."""
        await self._wait_until_idle()
        if self._tunnel is not None:
            await self._tunnel.close()
        await asyncio.to_thread(self._runtime.shutdown)

    async def _wait_until_idle(self) -> None:
        began = time.monotonic()
        is_idle = False
        while not is_idle and time.monotonic() < began + self._drain_timeout_s:
            await asyncio.sleep(DRAIN_POLL_S if time.monotonic() > began + LEAVE_AFTER_S else LEAVE_AFTER_S)
            try:
                status = await self._status.status()
            except PlaitError:
                return  # its requests have ended with it
            is_idle = status is not None and status.sessions == 0

    # -- called by an ingress -------------------------------------------------------------------------

    async def address(self, replica_id: str, node_id: str) -> bytes:
        """Returns the encoded `ReplicaAddress` for an ingress on the node `node_id`, or b"" if this is another replica
        than the one that was asked, which has left."""
        if replica_id != self._place.replica_id:
            return b""
        if node_id == self._place.node_id:
            return ReplicaAddress(self._runtime.address).encode()
        return (await self._open_tunnel()).encode()

    async def _open_tunnel(self) -> ReplicaAddress:
        async with self._remote_address:
            if self._tunnel_at is None:
                secret = secrets.token_bytes(SECRET_BYTES)
                tunnel = TunnelServer(lambda: self._runtime.address, secret, self._place.tls)
                port = await tunnel.start(self._place.host)
                self._tunnel, self._tunnel_at = tunnel, ReplicaAddress("", self._place.host, port, secret)
                log.info("the runtime is reachable from other machines at %s port %d", self._place.host, port)
            return self._tunnel_at


# -- autoscaling ----------------------------------------------------------------------------------
# How many replicas a deployment should have, from the KV tokens in use. Knows nothing of Ray.

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
