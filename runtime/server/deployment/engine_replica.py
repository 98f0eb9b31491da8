"""`EngineReplica`: one replica of a deployment in Ray Serve: a runtime, and the server's endpoints in front of it.

Ray Serve restarts a replica whose `check_health` raises. Replicas are called by an ingress only; they listen nowhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from plait.runtime.client.client import Client
from plait.runtime.cluster.replicated_transport import RENEW_WATCH_S
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
        self._watchers: dict[asyncio.Queue[ServerMessage | None], ZmqClientTransport] = {}
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

    async def watch(self, replica_id: str) -> AsyncGenerator[bytes, None]:
        """Sends the model first, then block events and statuses, until the runtime ends. Each frame is a list of
        messages of `runtime/messages.py`. Raises LookupError if this is not the replica."""
        self._check_id(replica_id)
        client, loop = self._client, asyncio.get_running_loop()
        queue: asyncio.Queue[ServerMessage | None] = asyncio.Queue(MAX_WAITING_EVENTS)
        transport = ZmqClientTransport(self._runtime.address)
        transport.set_liveness_check(LIVENESS_INTERVAL_S, self._app.state.plait.settings.stuck_after_s)
        transport.start(
            lambda reply: _call_in(loop, _put, queue, reply), lambda reason: _call_in(loop, _put_end, queue)
        )
        self._watchers[queue] = transport
        tasks = [asyncio.create_task(self._renew(transport)), asyncio.create_task(self._poll_status(queue))]
        try:
            yield _encode([client.model])
            while True:
                messages: list[ServerMessage | None] = [await queue.get()]
                while not queue.empty():
                    messages.append(queue.get_nowait())
                if None in messages:
                    raise RuntimeGone(str(client.disconnect_reason))
                yield _encode(messages)
        finally:
            del self._watchers[queue]
            for task in tasks:
                task.cancel()
            transport.close()

    async def _renew(self, transport: ZmqClientTransport) -> None:
        is_first = True
        while True:
            with contextlib.suppress(PlaitError):  # then the watch ends
                transport.send(WatchBlocks(snapshot=is_first))
            is_first = False
            await asyncio.sleep(RENEW_WATCH_S)

    async def _poll_status(self, queue: asyncio.Queue[ServerMessage | None]) -> None:
        while True:
            with contextlib.suppress(PlaitError):
                if (status := await self._status.status()) is not None:
                    _put(queue, status)
            await asyncio.sleep(STATUS_INTERVAL_S)

    async def send_snapshot(self, replica_id: str) -> None:
        """Sends a snapshot of the blocks in every watch. Raises LookupError if this is not the replica."""
        self._check_id(replica_id)
        for transport in self._watchers.values():
            with contextlib.suppress(PlaitError):
                transport.send(WatchBlocks(snapshot=True))

    def _check_id(self, replica_id: str) -> None:
        if replica_id != self._replica_id:
            raise LookupError(f"this is replica {self._replica_id}, not {replica_id}")


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
