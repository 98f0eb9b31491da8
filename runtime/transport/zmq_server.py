"""The scheduler's ends of the two channels: ZeroMQ for other processes, a queue for this one.

A directory of mode 0700 holds two Unix sockets. `frames` is a ZeroMQ ROUTER. `lifeline` is a plain stream
socket that every client holds open: the kernel closes it when either process ends, however it ends, so that
each side learns of the other's death at once. Frames from a client without a lifeline are dropped.

Knows: sockets and frames. Must not know: sessions, calls, models.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable
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

CLIENT_ID_BYTES = 16
FRAMES_SOCKET, LIFELINE_SOCKET = "frames", "lifeline"
MAX_POLL_S = 3600.0  # a poll's milliseconds are a C int
MAX_RECEIVE_S = 0.005  # of one `receive`, and one frame more; what else has come waits for the next step
MAX_MESSAGES_PER_RECEIVE = 1024  # requests
MAX_SOCKET_BYTES = 16 << 20  # ZeroMQ cuts off who sends more at once; see `messages` for what is refused with an answer


class ZmqServerTransport:
    """The ROUTER and its clients' lifelines. `owner_fd` is a pipe whose end means that the owner is gone.

    What is sent goes out at the next `receive`, all of a client's replies as one frame: a step answers many calls, and
    its client wakes once for them.
    """

    def __init__(self, directory: Path, owner_fd: int | None = None) -> None:
        self.num_bad_frames = 0
        self.should_stop = self.owner_exited = False
        self._owner_fd = owner_fd
        self._stop_read_fd, self._stop_write_fd = os.pipe()
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.SNDHWM, 0)  # never drop an answer: a client's calls bound what it is owed
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_SOCKET_BYTES)
        self._router.bind(f"ipc://{directory / FRAMES_SOCKET}")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(directory / LIFELINE_SOCKET))
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._unidentified: dict[int, socket.socket] = {}  # lifelines whose client id has not come yet
        self._lifelines: dict[int, tuple[socket.socket, bytes]] = {}
        self._clients: set[bytes] = set()
        self._outbox: dict[bytes, list[bytes]] = {}
        self._disconnected: list[bytes] = []
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

    def receive(self, timeout_s: float | None, wake_fds: list[int]) -> list[tuple[bytes, ClientMessage]]:
        """Frames that have come; waits up to `timeout_s` seconds for one, or for a fd in `wake_fds`."""
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
        """Ends a `receive` that waits, and sets `should_stop`. A signal handler may call it."""
        os.write(self._stop_write_fd, b"!")

    def take_disconnected(self) -> list[bytes]:
        gone, self._disconnected = self._disconnected, []
        return gone

    def send(self, client: bytes, reply: ServerMessage) -> None:
        if client in self._clients:
            self._outbox.setdefault(client, []).append(encode(reply))

    def close(self) -> None:
        """Closes every socket; clients see their lifelines end."""
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

    def _receive_frames(self) -> list[tuple[bytes, ClientMessage]]:
        taken: list[tuple[bytes, ClientMessage]] = []
        until = time.monotonic() + MAX_RECEIVE_S
        while len(taken) < MAX_MESSAGES_PER_RECEIVE and time.monotonic() < until:
            try:
                client, *parts = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(parts) == 1 and client in self._clients:
                taken += [(client, request) for request in self._decode_frame(client, parts[0])]
            else:
                self.num_bad_frames += 1
        return taken

    def _decode_frame(self, client: bytes, frame: bytes) -> list[ClientMessage]:
        """A frame's requests; what is none is counted, and if it was to be a call, its client is told."""
        try:
            return decode_client_messages(frame)
        except (msgspec.DecodeError, RecursionError) as error:
            why = str(error)
        try:
            each = split_frame(frame)
        except (msgspec.DecodeError, RecursionError):
            each = [frame]
        if len(each) == 1:
            self.num_bad_frames += 1
            self._reject(client, MessageHeader.parse(frame), why)
            return []
        return [request for one in each for request in self._decode_frame(client, one)]

    def _reject(self, client: bytes, head: MessageHeader | None, why: str) -> None:
        """Answers the call of a request that cannot be taken, so that nobody waits for it."""
        if head is not None and head.kind in (b"Generate", b"Select", b"Embed") and len(head.ids) == 2:
            self.send(client, Failed(head.ids[1], "invalid", f"the runtime refused this request: {why:.200}"))

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it went away again, or there are no file descriptors left
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
    """Up to `count` bytes; b"" when the other side has ended."""
    try:
        return lifeline.recv(count)
    except ConnectionError:
        return b""


class LocalServerTransport:
    """The scheduler's end within one process: a queue in, a call back out. One client."""

    CLIENT = b"local"

    def __init__(self) -> None:
        self.num_bad_frames = 0
        self.num_clients = 1
        self.on_reply: Callable[[ServerMessage], None] = lambda reply: None
        self._inbox: deque[ClientMessage] = deque()
        self._wake_read_fd, self._wake_write_fd = os.pipe()
        os.set_blocking(self._wake_read_fd, False)
        os.set_blocking(self._wake_write_fd, False)

    def enqueue(self, request: ClientMessage) -> None:
        """From any thread."""
        self._inbox.append(request)
        self.wake()

    def wake(self) -> None:
        """Ends a `receive` that waits. From any thread."""
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes just as well
            os.write(self._wake_write_fd, b"!")

    def receive(self, timeout_s: float | None, wake_fds: list[int]) -> list[tuple[bytes, ClientMessage]]:
        if not self._inbox and timeout_s != 0:
            poller = select.poll()  # select() itself stops at descriptor 1023
            for fd in (self._wake_read_fd, *wake_fds):
                poller.register(fd, select.POLLIN)
            poller.poll(None if timeout_s is None else min(timeout_s, MAX_POLL_S) * 1000)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read_fd, 4096)
        return [(self.CLIENT, self._inbox.popleft()) for _ in range(len(self._inbox))]

    def take_disconnected(self) -> list[bytes]:
        return []

    def send(self, client: bytes, reply: ServerMessage) -> None:
        self.on_reply(reply)

    def close(self) -> None:
        """Idempotent; nothing may be posted afterwards."""
        if self._wake_write_fd >= 0:
            os.close(self._wake_read_fd)
            os.close(self._wake_write_fd)
            self._wake_read_fd = self._wake_write_fd = -1
