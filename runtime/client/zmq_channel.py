"""The channel to a scheduler in another process: a ZeroMQ DEALER owned by one thread, and the lifeline beside it.

Callers' threads only append to a queue; the channel's thread sends, receives and delivers. When the lifeline
ends, the scheduler's process has, and every waiting call is told at once.

Knows: sockets, threads, frames. Must not know: what the messages mean.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from plait.runtime.errors import InputError, RuntimeGone
from plait.runtime.link import CLIENT_ID_BYTES, FRAMES, LIFELINE
from plait.runtime.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    Hello,
    Reply,
    Request,
    Welcome,
    decode_reply,
    encode,
)

CONNECT_TIMEOUT_S = 30.0
DIED = "the runtime process ended"


class ZmqChannel:
    """See the file's header. `address` is the runtime's directory."""

    def __init__(self, address: str | Path, why_it_died: Callable[[], str] = lambda: DIED) -> None:
        self._why_it_died = why_it_died
        client_id = os.urandom(CLIENT_ID_BYTES)
        self._lifeline = _open_lifeline(Path(address), client_id)
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.LINGER, 0)
        self._dealer.setsockopt(zmq.SNDHWM, 0)
        self._dealer.setsockopt(zmq.IDENTITY, client_id)
        self._dealer.connect(f"ipc://{Path(address) / FRAMES}")
        self._queue: deque[bytes] = deque()
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._closing = False
        self._gone: str | None = None
        self._thread: threading.Thread | None = None
        self.welcome = self._shake_hands()

    def start(self, on_reply: Callable[[Reply], None], on_gone: Callable[[str], None]) -> None:
        self._thread = threading.Thread(target=self._run, args=(on_reply, on_gone), name="plait-client", daemon=True)
        self._thread.start()

    def send(self, request: Request) -> None:
        frame = encode(request)
        if len(frame) > MAX_FRAME_BYTES:
            raise InputError(f"a message of {len(frame)} bytes is above the limit of {MAX_FRAME_BYTES}")
        if self._gone is not None or self._closing:
            raise RuntimeGone(self._gone or "this client was closed")
        self._queue.append(frame)
        self._wake()

    def wait(self, condition: threading.Condition, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        return condition.wait_for(ready, timeout_s)

    def pump(self) -> None:
        """The channel's thread makes progress by itself."""

    def close(self) -> None:
        self._closing = True
        self._wake()
        if self._thread is None:
            self._close_sockets()
        elif self._thread is not threading.current_thread():
            self._thread.join(CONNECT_TIMEOUT_S)

    # -- the channel's thread ---------------------------------------------------------------------

    def _run(self, on_reply: Callable[[Reply], None], on_gone: Callable[[str], None]) -> None:
        poller = zmq.Poller()
        for watched in (self._dealer, self._wake_out, self._lifeline):
            poller.register(watched, zmq.POLLIN)
        try:
            while not self._closing and self._gone is None:
                ready = dict(poller.poll())
                if self._wake_out.fileno() in ready:
                    with contextlib.suppress(BlockingIOError):
                        self._wake_out.recv(4096)
                self._send_queued()
                self._deliver(on_reply)
                if self._lifeline.fileno() in ready and _has_ended(self._lifeline):
                    self._deliver(on_reply)  # what it said before it died still counts
                    self._gone = self._why_it_died()
        except Exception as error:
            self._gone = f"the connection to the runtime broke: {error}"
            raise
        finally:
            self._close_sockets()
            on_gone(self._gone or "this client was closed")

    def _send_queued(self) -> None:
        while self._queue:
            self._dealer.send(self._queue.popleft())

    def _deliver(self, on_reply: Callable[[Reply], None]) -> None:
        while True:
            try:
                frame = self._dealer.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            on_reply(decode_reply(frame))

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: awake already; closed: nothing to wake
            self._wake_in.send(b"!")

    def _close_sockets(self) -> None:
        self._dealer.close()
        self._context.term()
        for end in (self._lifeline, self._wake_in, self._wake_out):
            end.close()

    # -- starting ---------------------------------------------------------------------------------

    def _shake_hands(self) -> Welcome:
        self._dealer.send(encode(Hello(PROTOCOL)))
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._dealer.poll(100):
                try:
                    reply = decode_reply(self._dealer.recv())
                except msgspec.DecodeError as error:
                    raise RuntimeGone(f"the runtime speaks another version of the protocol: {error}") from None
                if isinstance(reply, Welcome) and reply.protocol == PROTOCOL:
                    return reply
                raise RuntimeGone("the runtime speaks another version of the protocol; upgrade both to one version")
            if _has_ended(self._lifeline):
                raise RuntimeGone(self._why_it_died())
        raise RuntimeGone(f"the runtime did not answer within {CONNECT_TIMEOUT_S:.0f} s")


def _open_lifeline(directory: Path, client_id: bytes) -> socket.socket:
    lifeline = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    lifeline.settimeout(CONNECT_TIMEOUT_S)
    try:
        lifeline.connect(str(directory / LIFELINE))
        lifeline.sendall(client_id)
        if lifeline.recv(1) != b"+":
            raise ConnectionError("it refused the connection")
    except OSError as error:
        lifeline.close()
        raise RuntimeGone(f"no runtime answers at {str(directory)!r} ({error})") from None
    lifeline.setblocking(False)
    return lifeline


def _has_ended(lifeline: socket.socket) -> bool:
    try:
        return not lifeline.recv(16)
    except BlockingIOError:
        return False
    except OSError:
        return True
