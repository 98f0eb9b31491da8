"""The scheduler's end of the ZeroMQ transport, which serves client processes over Unix sockets.

A directory of mode 0700 holds two sockets. `frames` is a ZeroMQ ROUTER. `lifeline` is a plain stream socket that
every client holds open: the kernel closes it when either process ends, for whatever reason, so that each side learns of
the other's death at once. Frames from a client without a lifeline are dropped.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from pathlib import Path

import zmq

from plait.runtime.messages import ClientMessage, ServerMessage
from plait.runtime.transport.base import ClientId
from plait.runtime.transport.frames import build_frame, decode_client_frame, encode

CLIENT_ID_BYTES = 16
FRAMES_SOCKET, LIFELINE_SOCKET = "frames", "lifeline"
MAX_POLL_S = 3600.0  # poll() takes its milliseconds as a C int
MAX_RECEIVE_S = 0.005  # `receive` starts no frame after this time; the remaining frames wait for the next step
MAX_MESSAGES_PER_RECEIVE = 1024  # `receive` starts no frame after this many messages
MAX_UNIDENTIFIED = 64  # lifelines without a client id; a further one closes the oldest of them
MAX_LIFELINE_READ = 1 << 16
# ZeroMQ disconnects the sender of a larger frame. Smaller frames beyond the limits of `messages` are answered.
MAX_SOCKET_BYTES = 16 << 20


class ZmqServerTransport:
    """Implements `ServerTransport`. End of file on the pipe `owner_fd` means that the owner process has exited.

    Replies are sent by the next `receive`, all replies to one client as one frame: a step answers many calls, and the
    client wakes up once for all of them. A `receive` that does not wait, as between two steps, makes no poll of ZeroMQ.
    """

    def __init__(self, directory: Path, owner_fd: int | None = None) -> None:
        self.num_bad_frames = 0
        self.should_stop = False  # the owner has exited
        self._owner_fd = owner_fd
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
        self._is_accepting = True
        self._unidentified: dict[int, socket.socket] = {}  # lifelines that have not sent their client id
        self._lifelines: dict[int, tuple[socket.socket, ClientId]] = {}
        self._clients: set[ClientId] = set()
        self._outbox: dict[ClientId, list[bytes]] = {}
        self._disconnected: list[ClientId] = []
        self._streams = selectors.DefaultSelector()  # the descriptors that are no sockets of ZeroMQ
        for fd in (self._listener.fileno(), *([] if owner_fd is None else [owner_fd])):
            self._streams.register(fd, selectors.EVENT_READ)
        self._poller = zmq.Poller()
        for watched in (self._router, self._streams.fileno()):
            self._poller.register(watched, zmq.POLLIN)

    @property
    def num_clients(self) -> int:
        return len(self._clients)

    def receive(self, timeout_s: float | None, wake_fds: list[int]) -> list[tuple[ClientId, ClientMessage]]:
        """Sends the queued replies, then returns the messages that have arrived; see `ServerTransport.receive`."""
        self._flush()
        has_frames = self._wait(timeout_s, wake_fds) if timeout_s != 0 else self._has_frames()
        for key, _ in self._streams.select(0):
            fd = key.fd
            if fd == self._listener.fileno():
                self._accept()
            elif fd in self._unidentified:
                self._identify_client(fd)
            elif fd in self._lifelines:
                self._on_lifeline_readable(fd)
            elif fd == self._owner_fd and not os.read(fd, MAX_LIFELINE_READ):
                self.should_stop = True
        return self._receive_frames() if has_frames else []

    def _has_frames(self) -> bool:
        return bool(int(self._router.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _wait(self, timeout_s: float | None, wake_fds: list[int]) -> bool:
        """Waits for anything to read; returns whether there are frames."""
        for fd in wake_fds:
            self._poller.register(fd, zmq.POLLIN)
        wait_ms = None if timeout_s is None else int(min(timeout_s, MAX_POLL_S) * 1000) + 1
        ready = dict(self._poller.poll(wait_ms))
        for fd in wake_fds:
            self._poller.unregister(fd)
        return self._router in ready

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
        self._streams.close()
        self._router.close()
        self._context.term()

    def _flush(self) -> None:
        for client, replies in self._outbox.items():
            if client in self._clients:
                self._router.send(client, zmq.SNDMORE)
                self._router.send(build_frame(replies))
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
                decoded = decode_client_frame(parts[0])
                messages += [(client, message) for message in decoded.messages]
                self.num_bad_frames += decoded.num_invalid
                for failure in decoded.failures:
                    self.send(client, failure)
            else:
                self.num_bad_frames += 1
        return messages

    def _accept(self) -> None:
        try:
            lifeline, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._pause_accepting()
            return  # otherwise the client is gone already
        lifeline.setblocking(False)
        if len(self._unidentified) >= MAX_UNIDENTIFIED:
            self._close_lifeline(self._unidentified.pop(next(iter(self._unidentified))))  # the oldest
        self._unidentified[lifeline.fileno()] = lifeline
        self._streams.register(lifeline.fileno(), selectors.EVENT_READ)

    def _pause_accepting(self) -> None:
        """No file descriptor is left: stops polling the listener, which would stay readable, until a lifeline ends."""
        self._streams.unregister(self._listener.fileno())
        self._is_accepting = False

    def _close_lifeline(self, lifeline: socket.socket) -> None:
        self._streams.unregister(lifeline.fileno())
        lifeline.close()
        if not self._is_accepting:
            self._streams.register(self._listener.fileno(), selectors.EVENT_READ)
            self._is_accepting = True

    def _identify_client(self, fd: int) -> None:
        client = _receive(self._unidentified[fd], CLIENT_ID_BYTES)
        if client is None:
            return
        lifeline = self._unidentified.pop(fd)
        if len(client) != CLIENT_ID_BYTES or client in self._clients:
            self._close_lifeline(lifeline)
            return
        self._lifelines[fd] = (lifeline, client)
        self._clients.add(client)
        with contextlib.suppress(OSError):
            lifeline.send(b"+")

    def _on_lifeline_readable(self, fd: int) -> None:
        lifeline, client = self._lifelines[fd]
        if _receive(lifeline, MAX_LIFELINE_READ) == b"":  # clients send nothing after their id; anything is dropped
            del self._lifelines[fd]
            self._close_lifeline(lifeline)
            self._clients.discard(client)
            self._disconnected.append(client)


def _receive(lifeline: socket.socket, count: int) -> bytes | None:
    """Reads up to `count` bytes; None if there are none now, b"" if the peer has closed the socket."""
    try:
        return lifeline.recv(count)
    except BlockingIOError:
        return None
    except OSError:
        return b""
