"""`EngineReplica`: one replica of a deployment in Ray Serve: a runtime, and the server's endpoints in front of it.

Ray Serve restarts a replica whose `check_health` raises. Replicas are called by an ingress only; they listen nowhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from plait.runtime.client.client import Client
from plait.runtime.errors import PlaitError, RuntimeGone
from plait.runtime.messages import BlockBatch, BlockSnapshot, ServerMessage, Status, WatchBlocks
from plait.runtime.process.runtime import Runtime
from plait.runtime.server.app import create_app
from plait.runtime.server.deployment.autoscaling import KV_DEMAND, kv_demand
from plait.runtime.server.deployment.deploy_config import DeployConfig
from plait.runtime.server.deployment.forwarded import decode_request
from plait.runtime.server.deployment.replica_run import ReplicaRun
from plait.runtime.server.ops.status_query import StatusQuery
from plait.runtime.server.restarting_runtime import LIVENESS_INTERVAL_S
from plait.runtime.transport.zmq_client import ZmqClientTransport

LEASE_S = 8.0  # of a watch; an ingress renews it every RENEW_WATCH_S
STATUS_INTERVAL_S = 0.5  # between two statuses in a watch
MAX_WAITING_EVENTS = 1024  # of a watch whose ingress does not read; later ones are dropped, and it asks for a snapshot

log = logging.getLogger("plait.server")


class EngineReplica:
    """Starts the runtime in the constructor, which raises what `Runtime` raises.

    config: a `DeployConfig` as JSON. replica_id: returns the id by which Ray Serve knows this replica.
    """

    def __init__(self, config: bytes, replica_id: Callable[[], str]) -> None:
        settings = msgspec.json.decode(config, type=DeployConfig)
        self._replica_id = replica_id()
        self._runtime = Runtime(settings.model, progress=False, **settings.engine)
        self._runtime.client.set_liveness_check(LIVENESS_INTERVAL_S, settings.server.stuck_after_s)
        self._app = create_app(self._runtime, settings.server)
        self._status = StatusQuery(lambda: self._client)
        self._watches: dict[str, _Watch] = {}
        self._is_attached = False

    @property
    def _client(self) -> Client:
        if not self._is_attached:
            self._is_attached = True
            self._runtime.client.attach_to_loop()
        return self._runtime.client

    # -- called by Ray Serve --------------------------------------------------------------------------

    async def check_health(self) -> None:
        """Raises RuntimeGone if the runtime has ended, which makes Ray Serve replace this replica."""
        if self._client.is_closed:
            raise RuntimeGone(str(self._client.disconnect_reason))

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The share of the KV tokens that running and waiting requests need, for `KvTokensPolicy`."""
        try:
            status = await self._status.status()
        except PlaitError:
            status = None
        return {} if status is None else {KV_DEMAND: kv_demand(status)}

    def __del__(self) -> None:
        runtime = getattr(self, "_runtime", None)
        if runtime is not None:
            runtime.shutdown()

    # -- called by an ingress -------------------------------------------------------------------------

    async def answer(self, replica_id: str, data: bytes) -> AsyncGenerator[bytes, None]:
        """Answers a `ForwardedRequest`, as frames. Another replica than the chosen one answers, if that is gone."""
        assert self._client is not None
        run = ReplicaRun(self._call_endpoint, self._app.state.plait, decode_request(data))
        async with contextlib.aclosing(run.frames()) as frames:
            async for frame in frames:
                yield frame

    async def _call_endpoint(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self._app
        await self._app.endpoint_table(scope, receive, send)

    async def watch(self, replica_id: str, watch_id: str) -> AsyncGenerator[bytes, None]:
        """Sends the model first, then block events and statuses, until the runtime ends. Each frame is a list of
        messages of `runtime/messages.py`. Ends LEASE_S after the last `renew`, since nothing else tells that an ingress
        was killed. Raises LookupError if this is not the replica."""
        self._check_id(replica_id)
        client, loop = self._client, asyncio.get_running_loop()
        queue: asyncio.Queue[ServerMessage | None] = asyncio.Queue(MAX_WAITING_EVENTS)
        transport = ZmqClientTransport(self._runtime.address)
        transport.set_liveness_check(LIVENESS_INTERVAL_S, self._app.state.plait.settings.stuck_after_s)
        transport.start(
            lambda reply: _call_in(loop, _put, queue, reply), lambda reason: _call_in(loop, _put_end, queue)
        )
        watch = self._watches[watch_id] = _Watch(transport, time.monotonic() + LEASE_S)
        watch.ask(snapshot=True)
        status = asyncio.create_task(self._poll_status(queue))
        try:
            yield _encode([client.model])
            while time.monotonic() < watch.ends:
                messages = await _next_messages(queue)
                if None in messages:
                    raise RuntimeGone(str(client.disconnect_reason))
                if messages:
                    yield _encode(messages)
        finally:
            self._watches.pop(watch_id, None)
            status.cancel()
            transport.close()

    async def renew(self, replica_id: str, watch_id: str, snapshot: bool) -> None:
        """Lets a watch go on for LEASE_S. snapshot: whether it gets one. Raises LookupError if there is none.

        Does nothing for the replica "", an ingress's first call.
        """
        if not replica_id:
            return
        self._check_id(replica_id)
        watch = self._watches[watch_id]
        watch.ends = time.monotonic() + LEASE_S
        watch.ask(snapshot)

    async def _poll_status(self, queue: asyncio.Queue[ServerMessage | None]) -> None:
        while True:
            with contextlib.suppress(PlaitError):
                if (status := await self._status.status()) is not None:
                    _put(queue, status)
            await asyncio.sleep(STATUS_INTERVAL_S)

    def _check_id(self, replica_id: str) -> None:
        if replica_id != self._replica_id:
            raise LookupError(f"this is replica {self._replica_id}, not {replica_id}")


@dataclass
class _Watch:
    """The events that one ingress gets. ends: when, unless it is renewed (monotonic time)."""

    transport: ZmqClientTransport
    ends: float

    def ask(self, snapshot: bool) -> None:
        """Asks the runtime for events for the next 10 s."""
        with contextlib.suppress(PlaitError):  # then the watch ends
            self.transport.send(WatchBlocks(snapshot))


async def _next_messages(queue: asyncio.Queue[ServerMessage | None]) -> list[ServerMessage | None]:
    """All that is queued, after at most a second; None is the end."""
    messages: list[ServerMessage | None] = []
    with contextlib.suppress(TimeoutError):
        messages.append(await asyncio.wait_for(queue.get(), 1.0))
    while not queue.empty():
        messages.append(queue.get_nowait())
    return messages


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: the replica ends
        loop.call_soon_threadsafe(function, *arguments)


def _put(queue: asyncio.Queue[ServerMessage | None], message: ServerMessage) -> None:
    if isinstance(message, BlockBatch | BlockSnapshot | Status) and not queue.full():
        queue.put_nowait(message)


def _put_end(queue: asyncio.Queue[ServerMessage | None]) -> None:
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(None)


_encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
