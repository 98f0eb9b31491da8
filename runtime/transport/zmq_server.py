"""The scheduler's end of the ZeroMQ transport, which serves client processes over Unix sockets.

A directory of mode 0700 holds two sockets. `frames` is a ZeroMQ ROUTER. `lifeline` is a plain stream socket that
every client holds open: the kernel closes it when either process ends, for whatever reason, so that each side learns of
the other's death at once. Frames from a client without a lifeline are dropped.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

import msgspec
import zmq

from plait.runtime.messages import (
    ClientMessage,
    Failed,
    MessageHeader,
    ServerMessage,
    build_frame,
    decode_client_messages,
    encode,
    split_frame,
)
from plait.runtime.transport.base import ClientId

CLIENT_ID_BYTES = 16
FRAMES_SOCKET, LIFELINE_SOCKET = "frames", "lifeline"
MAX_POLL_S = 3600.0  # poll() takes its milliseconds as a C int
MAX_RECEIVE_S = 0.005  # `receive` starts no frame after this time; the remaining frames wait for the next step
MAX_MESSAGES_PER_RECEIVE = 1024  # `receive` starts no frame after this many messages
# ZeroMQ disconnects the sender of a larger frame. Smaller frames beyond the limits of `messages` are answered.
MAX_SOCKET_BYTES = 16 << 20


class ZmqServerTransport:
    """Implements `ServerTransport`. End of file on the pipe `owner_fd` means that the owner process has exited.

    Replies are sent by the next `receive`, all replies to one client as one frame: a step answers many calls, and the
    client wakes up once for all of them.
    """

    def __init__(self, directory: Path, owner_fd: int | None = None) -> None:
        self.num_bad_frames = 0
        self.should_stop = self.owner_exited = False
        self._owner_fd = owner_fd
        self._stop_read_fd, self._stop_write_fd = os.pipe()
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.SNDHWM, 0)  # never drop a reply; a client's calls bound their number
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_SOCKET_BYTES)
        self._router.bind(f"ipc://{directory / FRAMES_SOCKET}")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(directory / LIFELINE_SOCKET))
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._unidentified: dict[int, socket.socket] = {}  # lifelines that have not sent their client id
        self._lifelines: dict[int, tuple[socket.socket, ClientId]] = {}
        self._clients: set[ClientId] = set()
        self._outbox: dict[ClientId, list[bytes]] = {}
        self._disconnected: list[ClientId] = []
        self._poller = zmq.Poller()
        for watched in (
            self._router,
            self._listener.fileno(),
            self._stop_read_fd,
            *([] if owner_fd is None else [owner_fd]),
        ):
            self._poller.register(watched, zmq.POLLIN)

    @property
    def num_clients(self) -> int:
        return len(self._clients)

    def receive(self, timeout_s: float | None, wake_fds: list[int]) -> list[tuple[ClientId, ClientMessage]]:
        """Sends the queued replies, then returns the messages that have arrived; see `ServerTransport.receive`."""
        self._flush()
        for fd in wake_fds:
            self._poller.register(fd, zmq.POLLIN)
        wait_ms = None if timeout_s is None else int(min(timeout_s, MAX_POLL_S) * 1000) + (timeout_s > 0)
        ready = dict(self._poller.poll(wait_ms))
        for fd in wake_fds:
            self._poller.unregister(fd)
        for fd in ready:
            if fd == self._listener.fileno():
                self._accept()
            elif fd in self._unidentified:
                self._identify_client(fd)
            elif fd in self._lifelines:
                self._on_lifeline_readable(fd)
            elif fd == self._stop_read_fd:
                self.should_stop = True
            elif fd == self._owner_fd and not os.read(fd, 1):
                self.should_stop = self.owner_exited = True
        return self._receive_frames() if self._router in ready else []

    def stop(self) -> None:
        """Ends a waiting `receive`, which then sets `should_stop`. Safe to call from a signal handler."""
        os.write(self._stop_write_fd, b"!")

    def take_disconnected(self) -> list[ClientId]:
        clients, self._disconnected = self._disconnected, []
        return clients

    def send(self, client: ClientId, reply: ServerMessage) -> None:
        if client in self._clients:
            self._outbox.setdefault(client, []).append(encode(reply))

    def close(self) -> None:
        """Sends the queued replies and closes every socket, which ends the lifelines of the clients."""
        self._flush()
        for lifeline in (*self._unidentified.values(), *(s for s, _ in self._lifelines.values()), self._listener):
            lifeline.close()
        self._router.close()
        self._context.term()
        os.close(self._stop_read_fd)
        os.close(self._stop_write_fd)

    def _flush(self) -> None:
        for client, replies in self._outbox.items():
            if client in self._clients:
                self._router.send_multipart([client, build_frame(replies)])
        self._outbox.clear()

    def _receive_frames(self) -> list[tuple[ClientId, ClientMessage]]:
        messages: list[tuple[ClientId, ClientMessage]] = []
        deadline = time.monotonic() + MAX_RECEIVE_S
        while len(messages) < MAX_MESSAGES_PER_RECEIVE and time.monotonic() < deadline:
            try:
                client, *parts = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(parts) == 1 and client in self._clients:
                messages += [(client, message) for message in self._decode_frame(client, parts[0])]
            else:
                self.num_bad_frames += 1
        return messages

    def _decode_frame(self, client: ClientId, frame: bytes) -> list[ClientMessage]:
        """Returns the valid messages of a frame. Counts each invalid one, and rejects it if it would start a call."""
        try:
            return decode_client_messages(frame)
        except (msgspec.DecodeError, RecursionError) as error:
            reason = str(error)
        try:
            frames = split_frame(frame)
        except (msgspec.DecodeError, RecursionError):
            frames = [frame]
        if len(frames) == 1:
            self.num_bad_frames += 1
            self._reject(client, MessageHeader.parse(frame), reason)
            return []
        return [message for single_frame in frames for message in self._decode_frame(client, single_frame)]

    def _reject(self, client: ClientId, header: MessageHeader | None, reason: str) -> None:
        """Fails the call of an invalid message, so that its client does not wait for a result."""
        if header is not None and header.kind in (b"Generate", b"Select", b"Embed") and len(header.ids) == 2:
            self.send(client, Failed(header.ids[1], "invalid", f"the runtime refused this request: {reason:.200}"))

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the client is gone already, or no file descriptor is left
            lifeline, _ = self._listener.accept()
            lifeline.setblocking(False)
            self._unidentified[lifeline.fileno()] = lifeline
            self._poller.register(lifeline.fileno(), zmq.POLLIN)

    def _identify_client(self, fd: int) -> None:
        lifeline = self._unidentified.pop(fd)
        client = _recv_or_empty(lifeline, CLIENT_ID_BYTES)
        if len(client) != CLIENT_ID_BYTES or client in self._clients:
            self._poller.unregister(fd)
            lifeline.close()
            return
        self._lifelines[fd] = (lifeline, client)
        self._clients.add(client)
        with contextlib.suppress(OSError):
            lifeline.send(b"+")

    def _on_lifeline_readable(self, fd: int) -> None:
        lifeline, client = self._lifelines[fd]
        if not _recv_or_empty(lifeline, 1):
            self._poller.unregister(fd)
            lifeline.close()
            del self._lifelines[fd]
            self._clients.discard(client)
            self._disconnected.append(client)


def _recv_or_empty(lifeline: socket.socket, count: int) -> bytes:
    """Reads up to `count` bytes; b"" if the peer has closed the socket."""
    try:
        return lifeline.recv(count)
    except ConnectionError:
        return b""
