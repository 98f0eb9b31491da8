"""Carries the two Unix sockets of a runtime to another machine over TCP. Bytes pass unread in both directions.

`TunnelServer` listens beside the runtime. `TunnelClient` puts the same two sockets into a directory of the client's
machine, which `ZmqClientTransport` uses like that of a runtime. When either end of a connection closes, the other one
is closed too, so a lifeline means through a tunnel what it means without.

Both ends of a connection prove that they know a secret: an HMAC-SHA256 over random numbers of both, compared in
constant time. Only a TLS context encrypts what follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import os
import socket
import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from plait.runtime.transport.zmq_server import FRAMES_SOCKET, LIFELINE_SOCKET

SOCKETS = (FRAMES_SOCKET, LIFELINE_SOCKET)
SECRET_BYTES = NONCE_BYTES = PROOF_BYTES = 32
PROOF_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 10.0
MAX_UNPROVEN = 64  # connections that have not proved the secret; a further one closes the oldest of them
ACCEPT_PAUSE_S = 0.1  # after an accept that failed: this process may have no file descriptor left
CHUNK_BYTES = 1 << 16
DEAD_AFTER_S = 20  # without an answer of the other machine

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class TunnelServer:
    """Forwards proven connections to the sockets in `directory()`, which is called for each of them.

    secret: SECRET_BYTES random bytes. tls: a server's context that demands a certificate of the client.
    """

    def __init__(self, directory: Callable[[], str], secret: bytes, tls: ssl.SSLContext | None = None) -> None:
        self._directory, self._secret, self._tls = directory, _checked(secret), tls
        self._unproven: dict[socket.socket, asyncio.Task[None]] = {}
        self._connections = _Tasks()

    async def start(self, host: str) -> int:
        """Listens at one address of this machine, at a port that the system chooses, and returns the port.

        Raises ValueError for a host that means all addresses, and OSError.
        """
        if _means_all_addresses(host):
            raise ValueError(f"a tunnel listens at one address of a machine, not at all of them: {host!r}")
        found = await asyncio.get_running_loop().getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        listener = socket.create_server(found[0][4], family=found[0][0], backlog=MAX_UNPROVEN)
        listener.setblocking(False)
        self._connections.start(self._accept(listener), listener)
        return int(listener.getsockname()[1])

    async def close(self) -> None:
        """Stops listening and closes all connections."""
        await self._connections.cancel()

    async def _accept(self, listener: socket.socket) -> None:
        """Accepts connections; each counts as unproven before anything is read from it or a handshake begins."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if len(self._unproven) >= MAX_UNPROVEN:
                self._unproven.pop(next(iter(self._unproven))).cancel()  # the oldest
            self._unproven[connection] = self._connections.start(self._serve(connection), connection)
            await asyncio.sleep(0)  # `sock_accept` returns at once while connections are queued

    async def _serve(self, connection: socket.socket) -> None:
        writer = None
        try:
            async with asyncio.timeout(PROOF_TIMEOUT_S):
                reader, writer = await self._open_streams(connection)
                name = await self._prove(reader, writer)
            self._unproven.pop(connection, None)
            if name is not None:
                _notice_dead_peers(writer)
                path = str(Path(self._directory()) / name)
                await _join((reader, writer), await asyncio.open_unix_connection(path, limit=CHUNK_BYTES))
        except (OSError, EOFError, TimeoutError):
            return  # also if no runtime listens there now: the client sees the end of the connection
        finally:
            self._unproven.pop(connection, None)
            if writer is not None:
                writer.close()

    async def _open_streams(self, connection: socket.socket) -> Streams:
        """Returns the streams of an accepted connection, after the handshake of TLS if there is one. They own it."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=CHUNK_BYTES, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        owned = socket.socket(fileno=connection.detach())
        end_s = None if self._tls is None else PROOF_TIMEOUT_S  # of a TLS connection that the client does not end
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, owned, ssl=self._tls, ssl_handshake_timeout=end_s, ssl_shutdown_timeout=end_s
        )
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    async def _prove(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str | None:
        """Returns the socket that the client asks for; None if it does not know the secret."""
        mine = os.urandom(NONCE_BYTES)
        writer.write(mine)
        data = await reader.readexactly(1 + NONCE_BYTES + PROOF_BYTES)
        numbers, proof = mine + data[: 1 + NONCE_BYTES], data[1 + NONCE_BYTES :]
        if not hmac.compare_digest(proof, _proof(self._secret, b"client", numbers)) or data[0] >= len(SOCKETS):
            return None
        writer.write(_proof(self._secret, b"server", numbers))
        await writer.drain()
        return SOCKETS[data[0]]


class TunnelClient:
    """Puts the sockets of the runtime behind the `TunnelServer` at host and port into `directory`, which only this user
    may reach.

    has_lost_connection: whether any connection has ended. The client of the runtime must then close all of its own:
    ZeroMQ connects again by itself, and does not know that messages were lost between.
    """

    def __init__(self, directory: str, host: str, port: int, secret: bytes, tls: ssl.SSLContext | None = None) -> None:
        self.directory, self._host, self._port, self._secret, self._tls = directory, host, port, _checked(secret), tls
        self._servers: list[asyncio.Server] = []
        self._connections = _Tasks()
        self.has_lost_connection = False

    async def start(self) -> None:
        """Listens at the two sockets."""
        for index, name in enumerate(SOCKETS):

            def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, index: int = index) -> None:
                self._connections.start(self._forward(index, (reader, writer)), writer)

            path = str(Path(self.directory) / name)
            self._servers.append(await asyncio.start_unix_server(accept, path, limit=CHUNK_BYTES))

    async def close(self) -> None:
        """Stops listening and closes all connections."""
        for server in self._servers:
            server.close()
        await self._connections.cancel()

    async def _forward(self, index: int, local: Streams) -> None:
        remote = None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                remote = await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=CHUNK_BYTES)
                await self._prove(index, *remote)
            _notice_dead_peers(remote[1])
            await _join(local, remote)
        except (OSError, EOFError, TimeoutError):
            return  # the client sees the end of its connection
        finally:
            self.has_lost_connection = True
            if remote is not None:
                remote[1].close()

    async def _prove(self, index: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Raises ConnectionError if the other end does not know the secret."""
        theirs, mine = await reader.readexactly(NONCE_BYTES), os.urandom(NONCE_BYTES)
        numbers = theirs + bytes([index]) + mine
        writer.write(bytes([index]) + mine + _proof(self._secret, b"client", numbers))
        proof = await reader.readexactly(PROOF_BYTES)
        if not hmac.compare_digest(proof, _proof(self._secret, b"server", numbers)):
            raise ConnectionError("the other end of the tunnel does not know the secret")


class _Tasks:
    """The tasks of connections; the event loop keeps no reference to them. A connection is closed when its task ends,
    also if that never ran."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(
        self, work: Coroutine[Any, Any, None], connection: asyncio.StreamWriter | socket.socket
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda task: connection.close())
        return task

    async def cancel(self) -> None:
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _means_all_addresses(host: str) -> bool:
    try:
        return not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        return False


def _checked(secret: bytes) -> bytes:
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"the secret of a tunnel has {SECRET_BYTES} bytes, not {len(secret)}")
    return secret


def _proof(secret: bytes, side: bytes, numbers: bytes) -> bytes:
    return hmac.digest(secret, side + numbers, "sha256")


def _notice_dead_peers(writer: asyncio.StreamWriter) -> None:
    """Ends a connection whose other machine has not answered for DEAD_AFTER_S."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_USER_TIMEOUT", DEAD_AFTER_S * 1000)):
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def _join(one: Streams, other: Streams) -> None:
    """Copies in both directions until either end closes; then closes both."""
    pumps = [asyncio.ensure_future(_pump(one[0], other[1])), asyncio.ensure_future(_pump(other[0], one[1]))]
    try:
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for writer in (one[1], other[1]):
            with contextlib.suppress(OSError):
                writer.close()  # sends what is written before
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
