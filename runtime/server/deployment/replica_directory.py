"""The replicas of a deployment, as an ingress knows them: connects to each, watches it, and places requests on them.

Knows nothing of Ray: `find_address` asks a replica where its runtime is, and `update` says which replicas there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from plait.runtime.client.client import Client
from plait.runtime.cluster.replicated_client import ReplicatedClient
from plait.runtime.cluster.replicated_transport import NO_REPLICA
from plait.runtime.cluster.router import WINDOW_TOKENS
from plait.runtime.errors import RuntimeGone
from plait.runtime.messages import Welcome
from plait.runtime.process.runtime_directory import make_runtime_directory
from plait.runtime.server.deployment.replica_address import ReplicaAddress
from plait.runtime.server.engines.replicated_runtime import ReplicaGroup, ReplicaReport, ReplicaState
from plait.runtime.server.engines.restarting_runtime import LIVENESS_INTERVAL_S, NOT_READY_AFTER_S
from plait.runtime.server.engines.status_query import StatusQuery
from plait.runtime.server.settings import STUCK_AFTER_S
from plait.runtime.tokenizer.tokenizer import Tokenizer, load_tokenizer
from plait.runtime.transport.tunnel import TunnelClient
from plait.runtime.transport.zmq_client import ZmqClientTransport

# -- replica connection ---------------------------------------------------------------------------
# The connections of an ingress to the runtime of one replica, on this machine or through a tunnel.

# An attempt at a machine that does not answer takes seconds; requests need the threads of `asyncio.to_thread`.
_threads = ThreadPoolExecutor(32, "plait-connect")


class ReplicaConnection:
    """calls: the transport of the requests. Open it with `connect_replica`, and close it."""

    def __init__(
        self, calls: ZmqClientTransport, control: ZmqClientTransport, tunnel: TunnelClient | None, stuck_after_s: float
    ) -> None:
        self.calls, self._control_transport, self._tunnel = calls, control, tunnel
        self._control: Client | None = None
        for transport in (calls, control):
            transport.set_liveness_check(LIVENESS_INTERVAL_S, stuck_after_s)

    @property
    def welcome(self) -> Welcome:
        """What the runtime said about its model."""
        return self.calls.welcome

    def open_control(self, tokenizer: Tokenizer) -> Client:
        """Opens and returns `control`. Call it in the event loop that receives the replies."""
        self._control = Client(self._control_transport, tokenizer)
        self._control.attach_to_loop()
        return self._control

    @property
    def control(self) -> Client:
        """The client for what concerns the runtime and no session."""
        assert self._control is not None
        return self._control

    @property
    def is_closed(self) -> bool:
        """Whether the runtime has ended or cannot be reached, or messages may have been lost on the way to it."""
        is_cut = self._tunnel is not None and self._tunnel.has_lost_connection
        return is_cut or self.calls.is_closed or (self._control is not None and self._control.is_closed)

    @property
    def end_reason(self) -> str:
        """Why it is closed."""
        reason = None if self._control is None else self._control.disconnect_reason
        return reason or "a connection to it has ended"

    async def close(self) -> None:
        """Disconnects; what was placed on the replica has failed then."""
        if self._control is not None:
            self._control.close()
        self._control_transport.close()
        self.calls.close()
        await _close_tunnel(self._tunnel)


async def connect_replica(
    address: ReplicaAddress, stuck_after_s: float, tls: ssl.SSLContext | None = None
) -> ReplicaConnection:
    """Connects to a replica. Raises RuntimeGone if no runtime answers there.

    tls: of a tunnel's client, with its certificate.
    """
    loop = asyncio.get_running_loop()
    if not address.host:
        transports = await loop.run_in_executor(_threads, _connect_twice, address.directory)
        return ReplicaConnection(*transports, None, stuck_after_s)
    tunnel = TunnelClient(make_runtime_directory(), address.host, address.port, address.secret, tls)
    try:
        await tunnel.start()
        calls, control = await loop.run_in_executor(_threads, _connect_twice, tunnel.directory)
    except BaseException:
        await _close_tunnel(tunnel)
        raise
    return ReplicaConnection(calls, control, tunnel, stuck_after_s)


def _connect_twice(directory: str) -> tuple[ZmqClientTransport, ZmqClientTransport]:
    calls = ZmqClientTransport(directory)
    try:
        return calls, ZmqClientTransport(directory)
    except BaseException:
        calls.close()
        raise


async def _close_tunnel(tunnel: TunnelClient | None) -> None:
    if tunnel is not None:
        await tunnel.close()
        shutil.rmtree(tunnel.directory, ignore_errors=True)


# -- replica directory ----------------------------------------------------------------------------

TICK_S = 0.1  # between two looks at a connection
UNRESPONSIVE_REPORT_S = 0.5  # between two reports of the calls of a silent replica
RECONNECT_S, REFUSED_S = 0.25, 5.0  # before a connection that ended, or a refused replica, is tried again
ADDRESS_TIMEOUT_S = 10.0

FindAddress = Callable[[str], Awaitable[ReplicaAddress]]

log = logging.getLogger("plait.server")


@dataclass(eq=False)
class ReplicaRecord:
    """One replica. connection: None while there is none. pid: of the runtime that was connected last. refusal: why it
    gets no requests. is_leaving: Ray Serve sends it no more requests; it ends when those that it has are answered."""

    id: str
    number: int
    connection: ReplicaConnection | None = None
    status: StatusQuery | None = None
    pid: int | None = None
    num_restarts: int = 0
    refusal: str | None = None
    is_leaving: bool = False
    task: asyncio.Task[None] | None = None


class ReplicaDirectory(ReplicaGroup):
    """A backend of a server (`engines.served_model.Backend`) whose engine is the replicas that `update` names.

    tls: of connections to other machines. on_change: called with `max_batch_rows` when it changes.
    All methods run in one event loop.
    """

    def __init__(
        self,
        find_address: FindAddress,
        window_tokens: int = WINDOW_TOKENS,
        stuck_after_s: float = STUCK_AFTER_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(window_tokens)
        self._find_address, self._stuck_after_s, self._tls = find_address, stuck_after_s, tls
        self._replicas: dict[str, ReplicaRecord] = {}
        self._has_client, self._lock = asyncio.Event(), asyncio.Lock()
        self.num_restarts, self._most = 0, 0  # runtimes that took the place of others; most replicas at a time
        self.on_change: Callable[[int], None] = lambda max_running: None

    # -- what a server uses -----------------------------------------------------------------------------

    @property
    def client(self) -> ReplicatedClient:
        """The client. Raises RuntimeGone until the first replica has connected."""
        if self._client is None:
            raise RuntimeGone(NO_REPLICA)
        return self._client

    @property
    def has_given_up(self) -> bool:
        """Whether all replicas have another model than this ingress serves, as after an update: it must be replaced.

        Otherwise Ray Serve starts replicas as long as the deployment exists.
        """
        return bool(self._replicas) and all(replica.refusal is not None for replica in self._replicas.values())

    @property
    def max_batch_rows(self) -> int:
        """The sum over the connected replicas."""
        return sum(connection.welcome.max_batch_rows for connection in self._connections())

    async def reports(self) -> list[ReplicaReport]:
        """The state of every replica that does not leave."""
        staying = [replica for replica in self._replicas.values() if not replica.is_leaving]
        return list(await asyncio.gather(*map(self._report_on, sorted(staying, key=lambda replica: replica.number))))

    async def _report_on(self, replica: ReplicaRecord) -> ReplicaReport:
        unanswered_s = replica.connection.calls.unanswered_s if replica.connection is not None else 0.0
        if_ended: ReplicaState = "restarting" if replica.refusal is None else "refused"
        return await self._report(replica.number, replica.status, unanswered_s, replica.num_restarts, if_ended)

    async def wait_until_connected(self, timeout_s: float) -> bool:
        """Waits for the first replica. Returns False after `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._has_client.wait(), timeout_s)
        return self._client is not None

    async def close(self) -> None:
        """Disconnects from all replicas."""
        tasks = [replica.task for replica in self._replicas.values() if replica.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- which replicas there are -----------------------------------------------------------------------

    def update(self, ids: Sequence[str]) -> None:
        """Sets which replicas take requests. Those that left finish what they have: they drain, or have ended."""
        for replica in self._replicas.values():
            self._set_leaving(replica, replica.id not in ids)
        for new in ids:
            if new not in self._replicas:
                taken = {replica.number for replica in self._replicas.values()}
                number = next(number for number in range(len(taken) + 1) if number not in taken)
                replica = self._replicas[new] = ReplicaRecord(new, number)
                replica.task = asyncio.create_task(self._keep_connected(replica))
                self.num_restarts += self._has_client.is_set() and len(ids) <= self._most
        self._most = max(self._most, len(ids))

    def _set_leaving(self, replica: ReplicaRecord, is_leaving: bool) -> None:
        replica.is_leaving = is_leaving
        if self._transport is not None:
            self._transport.set_draining(replica.number, is_leaving)

    async def _keep_connected(self, replica: ReplicaRecord) -> None:
        last_reason = ""
        try:
            while not replica.is_leaving:
                reason = await self._connect(replica)
                if reason != last_reason and not replica.is_leaving:
                    log.warning("replica %d (%s) is not connected: %s", replica.number, replica.id, reason)
                last_reason = reason
                await asyncio.sleep(RECONNECT_S if replica.refusal is None else REFUSED_S)
        finally:
            del self._replicas[replica.id]

    async def _connect(self, replica: ReplicaRecord) -> str:
        """Connects to a replica and returns why the connection ended, when it has."""
        connection = None
        try:
            async with asyncio.timeout(ADDRESS_TIMEOUT_S):
                address = await self._find_address(replica.id)
            connection = await connect_replica(address, self._stuck_after_s, self._tls)
            replica.refusal = await self._refusal(connection.welcome)
            if replica.refusal is not None:
                return replica.refusal
            self._add(replica, connection)
            while not connection.is_closed:
                await self._watch(replica, connection)
            return f"its runtime has ended: {connection.end_reason}"
        except Exception as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"
        finally:
            replica.connection = replica.status = None
            if connection is not None:
                await connection.close()
                self._report_change()

    async def _refusal(self, welcome: Welcome) -> str | None:
        """Why a replica gets no requests: its model, adapters or chat template differ from those of the first one."""
        async with self._lock:
            if self._transport is None:
                tokenizer = await asyncio.to_thread(
                    load_tokenizer, Path(welcome.model_path), vocab_size=welcome.vocab_size
                )
                self._open_client(welcome, tokenizer)
                self.client.attach_to_loop()
        difference = self._difference(welcome)
        if difference is None and welcome.chat_template != self.client.model.chat_template:
            difference = "another chat template"
        return None if difference is None else f"it has {difference} than the replica that connected first"

    def _add(self, replica: ReplicaRecord, connection: ReplicaConnection) -> None:
        """Begins to place requests on a replica."""
        assert self._transport is not None and self._client is not None
        control = connection.open_control(self._client.tokenizer)
        replica.connection, replica.status = connection, StatusQuery(lambda: control)
        is_restart = replica.pid not in (None, connection.welcome.server_pid)
        replica.pid, replica.num_restarts = connection.welcome.server_pid, replica.num_restarts + is_restart
        self.num_restarts += is_restart
        self._transport.connect(replica.number, connection.calls)
        self._set_leaving(replica, replica.is_leaving)
        self._has_client.set()
        self._report_change()
        log.info("replica %d (%s) is connected", replica.number, replica.id)

    async def _watch(self, replica: ReplicaRecord, connection: ReplicaConnection) -> None:
        """Waits for a moment; moves the requests of a replica that does not answer, if another one does."""
        is_silent = connection.calls.unanswered_s >= NOT_READY_AFTER_S
        if is_silent:
            self._move_calls(replica.number)
        await asyncio.sleep(UNRESPONSIVE_REPORT_S if is_silent else TICK_S)

    def _connections(self) -> list[ReplicaConnection]:
        return [replica.connection for replica in self._replicas.values() if replica.connection is not None]

    def _control_clients(self) -> list[Client]:
        return [connection.control for connection in self._connections()]

    def _report_change(self) -> None:
        self.on_change(self.max_batch_rows)
