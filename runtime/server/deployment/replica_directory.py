"""The replicas of a deployment, as an ingress knows them: connects to each, watches it, places requests on them.

Knows nothing of Ray: `ReplicaPort` reaches the replicas, and `update` says which there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from plait.runtime.cluster.replicated_transport import NO_REPLICA, RENEW_WATCH_S, UNANSWERED_S
from plait.runtime.cluster.router import WINDOW_TOKENS, NoReplicaError, Placement, Router
from plait.runtime.errors import RuntimeGone
from plait.runtime.kv_cache.block_events import HEARTBEAT_S
from plait.runtime.messages import BlockBatch, BlockSnapshot, ServerMessage, Status, Welcome
from plait.runtime.server.deployment.planned_prompt import IngressClient, PlannedPrompt
from plait.runtime.server.replicated_runtime import ReplicaGroup, ReplicaReport, ReplicaState
from plait.runtime.server.restarting_runtime import NOT_READY_AFTER_S
from plait.runtime.tokenizer.tokenizer import load_tokenizer

TICK_S = 0.25  # between two looks at who is silent
RECONNECT_S, REFUSED_S = 0.5, 5.0  # before a watch that ended, or that was refused, is tried again
_messages = msgspec.msgpack.Decoder(list[ServerMessage])

log = logging.getLogger("plait.server")


class ReplicaPort(Protocol):
    """How an ingress reaches replicas."""

    def answer(self, replica: str, data: bytes) -> AsyncGenerator[bytes, None]:
        """The frames of the answer to a `ForwardedRequest`. Raises whatever the replica raised, or RuntimeGone."""
        ...

    def watch(self, replica: str, watch: str) -> AsyncGenerator[bytes, None]:
        """Lists of messages of a replica's runtime, in MessagePack; a Welcome first. Raises as `answer`.

        watch: names it for `renew`, without which it ends after some seconds.
        """
        ...

    async def renew(self, replica: str, watch: str, snapshot: bool) -> None:
        """Lets a watch go on. snapshot: whether a snapshot of the replica's blocks comes in it."""
        ...


@dataclass(eq=False)
class RemoteReplica:
    """One replica. router_number: -1 while it is not connected. refusal: why it gets no requests.

    on_silence: called when it has not answered for some seconds, for each of its requests.
    """

    id: str
    number: int
    router_number: int = -1
    last_heard: float = 0.0
    status: Status | None = None
    num_placed: int = 0
    max_batch_rows: int = 0
    refusal: str | None = None
    watcher: asyncio.Task[None] | None = None
    watch: str = ""  # the name of the current one
    next_renewal: float = 0.0
    on_silence: set[Callable[[], None]] = field(default_factory=set)

    @property
    def unanswered_s(self) -> float:
        """For how long it has not answered, in seconds; a heartbeat may be late by its interval."""
        return max(0.0, time.monotonic() - self.last_heard - 2 * HEARTBEAT_S)


class ReplicaDirectory(ReplicaGroup):
    """A backend of a server (`engines.served_model.Backend`) whose engine is the replicas that `update` names.

    on_change: called with the sum of `max_batch_rows` of the connected replicas. All methods run in one event loop.
    """

    has_given_up = False  # Ray Serve starts replicas as long as the deployment exists

    def __init__(self, port: ReplicaPort, window_tokens: int = WINDOW_TOKENS) -> None:
        self._port = port
        self.router = Router(window_tokens)
        self._replicas: dict[str, RemoteReplica] = {}
        self._client: IngressClient | None = None
        self._has_client, self._lock = asyncio.Event(), asyncio.Lock()
        self._ticker: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_restarts, self._most = 0, 0  # replicas that took the place of others; most at a time
        self.on_change: Callable[[int], None] = lambda max_running: None

    # -- what a server uses -----------------------------------------------------------------------------

    @property
    def client(self) -> IngressClient:
        """The client. Raises RuntimeGone until the first replica has connected."""
        if self._client is None:
            raise RuntimeGone(NO_REPLICA)
        return self._client

    @property
    def num_spread(self) -> int:
        return self.router.num_spread

    async def reports(self) -> list[ReplicaReport]:
        return [self._report(replica) for replica in sorted(self._replicas.values(), key=lambda other: other.number)]

    def _report(self, replica: RemoteReplica) -> ReplicaReport:
        is_connected = replica.router_number >= 0
        state: ReplicaState = "restarting"
        if replica.refusal is not None:
            state = "refused"
        elif is_connected:
            state = "ready" if replica.unanswered_s < UNANSWERED_S else "unanswered"
        load = self.router.load(replica.router_number) if is_connected else 0
        status = replica.status if state == "ready" else None
        unanswered_s = replica.unanswered_s if is_connected else 0.0
        return ReplicaReport(replica.number, state, 0, unanswered_s, load, replica.num_placed, status)

    async def wait_until_connected(self, timeout_s: float) -> bool:
        """Waits for the first replica. Returns False after `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._has_client.wait(), timeout_s)
        return self._client is not None

    def close(self) -> None:
        """Ends all watches."""
        self.update([])
        if self._ticker is not None:
            self._ticker.cancel()

    # -- which replicas there are -----------------------------------------------------------------------

    def update(self, ids: Sequence[str]) -> None:
        """Sets which replicas take requests. Those that left finish what they have: they drain, or have ended."""
        for gone in self._replicas.keys() - set(ids):
            replica = self._replicas.pop(gone)
            if replica.watcher is not None:
                replica.watcher.cancel()
            self._disconnect(replica)
        for new in ids:
            if new not in self._replicas:
                taken = {replica.number for replica in self._replicas.values()}
                number = next(number for number in range(len(taken) + 1) if number not in taken)
                replica = self._replicas[new] = RemoteReplica(new, number)
                replica.watcher = asyncio.create_task(self._watch(replica))
                self.num_restarts += self._has_client.is_set() and len(self._replicas) <= self._most
                self._most = max(self._most, len(self._replicas))
        if self._ticker is None:
            self._ticker = asyncio.create_task(self._tick())

    async def _watch(self, replica: RemoteReplica) -> None:
        last_reason = ""
        while True:
            reason = "its watch ended"
            try:
                replica.watch, replica.next_renewal = secrets.token_hex(8), time.monotonic() + RENEW_WATCH_S
                async with contextlib.aclosing(self._port.watch(replica.id, replica.watch)) as frames:
                    async for frame in frames:
                        await self._receive(replica, frame)
                        if replica.refusal is not None:
                            break
            except Exception as error:
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"
            if reason != last_reason:
                log.warning("replica %d (%s) is not connected: %s", replica.number, replica.id, reason)
            last_reason = reason
            self._disconnect(replica)
            await asyncio.sleep(RECONNECT_S if replica.refusal is None else REFUSED_S)

    async def _receive(self, replica: RemoteReplica, frame: bytes) -> None:
        for message in _messages.decode(frame):
            replica.last_heard = time.monotonic()
            if isinstance(message, Welcome):
                await self._connect(replica, message)
            elif isinstance(message, Status):
                replica.status = message
            elif isinstance(message, BlockBatch | BlockSnapshot) and replica.router_number >= 0:
                self.router.receive(replica.router_number, message, replica.last_heard)

    async def _connect(self, replica: RemoteReplica, welcome: Welcome) -> None:
        """Begins to place requests on a replica, unless its model is another one than that of the first replica."""
        async with self._lock:
            if self._client is None:
                path = Path(welcome.model_path)
                tokenizer = await asyncio.to_thread(load_tokenizer, path, vocab_size=welcome.vocab_size)
                self._client = IngressClient(
                    welcome, tokenizer, lambda: self._num_connected > 0, lambda: self._unanswered_s, self._statuses
                )
                self._has_client.set()
        served, before = self._client.model, replica.refusal
        replica.refusal = None
        if (welcome.model_fingerprint, welcome.vocab_size) != (served.model_fingerprint, served.vocab_size):
            replica.refusal = "it has other model files than the replica that connected first"
            if before is None:
                log.error("replica %d (%s) is refused: %s", replica.number, replica.id, replica.refusal)
            return
        if replica.id in self._replicas and replica.router_number < 0:
            replica.router_number = self.router.add_replica(replica.last_heard)
            replica.max_batch_rows = welcome.max_batch_rows
            self._report_change()
            log.info("replica %d (%s) is connected", replica.number, replica.id)

    def _disconnect(self, replica: RemoteReplica) -> None:
        replica.status = None
        if replica.router_number >= 0:
            self.router.remove_replica(replica.router_number)
            replica.router_number = -1
            self._report_change()

    def _report_change(self) -> None:
        self.on_change(sum(replica.max_batch_rows for replica in self._connected()))

    def lose(self, replica: RemoteReplica) -> None:
        """Takes a replica that did not answer a request out of the choice, until its watch is connected again."""
        if self._replicas.get(replica.id) is replica and replica.router_number >= 0:
            self._disconnect(replica)
            if replica.watcher is not None:
                replica.watcher.cancel()
            replica.watcher = asyncio.create_task(self._watch(replica))

    # -- placing ----------------------------------------------------------------------------------------

    def place(self, plan: PlannedPrompt) -> tuple[RemoteReplica, list[Placement]]:
        """Chooses the replica of a request and counts its load there, until `finish`. Raises RuntimeGone."""
        self._open_answering()
        now, outputs = time.monotonic(), plan.outputs or [0]
        try:
            placement = self.router.place(plan.blocks, plan.num_tokens, outputs[0], now)
        except NoReplicaError:
            raise RuntimeGone(NO_REPLICA) from None
        replica = next(other for other in self._connected() if other.router_number == placement.replica)
        others = [self.router.continue_on(placement.replica, 0, output) for output in outputs[1:]]
        replica.num_placed += 1
        return replica, [placement, *others]

    def finish(self, placements: Sequence[Placement], outputs: Sequence[int]) -> None:
        """Gives back the load of a request that ended. outputs: tokens of its calls that ended with a value."""
        now = time.monotonic()
        for index, placement in enumerate(placements):
            self.router.finish(placement, outputs[index] if index < len(outputs) else None, now)

    def listed(self) -> list[RemoteReplica]:
        """The connected replicas."""
        return list(self._connected())

    def _connected(self) -> list[RemoteReplica]:
        return [replica for replica in self._replicas.values() if replica.router_number >= 0]

    @property
    def _num_connected(self) -> int:
        return len(self._connected())

    @property
    def _unanswered_s(self) -> float:
        return min((replica.unanswered_s for replica in self._connected()), default=0.0)

    def _statuses(self) -> list[Status]:
        answering = [replica for replica in self._connected() if replica.unanswered_s < UNANSWERED_S]
        return [replica.status for replica in answering if replica.status is not None]

    def _open_answering(self) -> None:
        """Takes the replicas that do not answer out of the router's choice, unless none answers."""
        connected = self._connected()
        silent = [replica for replica in connected if replica.unanswered_s >= UNANSWERED_S]
        for replica in connected:
            if replica in silent and len(silent) < len(connected):
                self.router.drain(replica.router_number)
            else:
                self.router.reopen(replica.router_number)

    async def _tick(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            if now - began > 4 * TICK_S:  # this process stood still, and has not read what the replicas sent
                continue
            for replica in self._silent_beside_others():
                for on_silence in tuple(replica.on_silence):
                    on_silence()
            asked = self.router.replicas_to_ask(now)
            for replica in self._connected():
                has_gap = replica.router_number in asked
                if (has_gap or now >= replica.next_renewal) and replica.unanswered_s < UNANSWERED_S:
                    replica.next_renewal = now + RENEW_WATCH_S
                    self._start(self._port.renew(replica.id, replica.watch, snapshot=has_gap))

    def _silent_beside_others(self) -> list[RemoteReplica]:
        connected = self._connected()
        silent = [replica for replica in connected if replica.unanswered_s >= NOT_READY_AFTER_S]
        return silent if len(silent) < len(connected) else []

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(_quietly(work))  # kept, since the event loop keeps no reference
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _quietly(work: Awaitable[None]) -> None:
    """Awaits a renewal. One that fails is repeated; if none succeeds, the watch ends, and another one begins."""
    try:
        await work
    except Exception as error:
        log.info("a watch of a replica was not renewed: %s", type(error).__name__)
