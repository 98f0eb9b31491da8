"""The connections of an ingress to the runtime of one replica, on this machine or through a tunnel."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from concurrent.futures import ThreadPoolExecutor

from plait.runtime.client.client import Client
from plait.runtime.messages import Welcome
from plait.runtime.process.runtime_directory import make_runtime_directory
from plait.runtime.server.deployment.replica_address import ReplicaAddress
from plait.runtime.server.engines.restarting_runtime import LIVENESS_INTERVAL_S
from plait.runtime.tokenizer.tokenizer import Tokenizer
from plait.runtime.transport.tunnel import TunnelClient
from plait.runtime.transport.zmq_client import ZmqClientTransport

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
