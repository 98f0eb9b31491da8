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
import weakref
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
    Append,
    Hello,
    Inspect,
    Open,
    Reply,
    Request,
    Welcome,
    decode_replies,
    encode,
)

CONNECT_TIMEOUT_S = 30.0
DIED = "the runtime process ended"
POLL_S, SILENT_S = 5.0, 120.0  # after a silent poll the scheduler is asked for a sign of life
NOBODY = 0  # the call id of such a question: its answer is for no call
UNHURRIED = (Open, Append)  # do nothing by themselves: they go with what follows them, and cost no change of thread
MAX_FRAMES = 4096  # taken from the socket before they are delivered


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
        self._poll_s, self._silent_s = POLL_S, SILENT_S
        self._closing = False
        self._gone: str | None = None
        self._thread: threading.Thread | None = None
        self.welcome = self._shake_hands()
        os.register_at_fork(after_in_child=weakly(self._after_fork))

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
        if not isinstance(request, UNHURRIED):
            self._wake()

    def close(self) -> None:
        self._closing = True
        self._wake()
        if self._thread is None:
            self._close_sockets()
        elif self._thread is not threading.current_thread():
            self._thread.join(CONNECT_TIMEOUT_S)

    # -- the channel's thread ---------------------------------------------------------------------

    def _run(self, on_reply: Callable[[Reply], None], on_gone: Callable[[str], None]) -> None:
        silent_polls = 0  # counted in polls, not seconds: a process that was stopped has not listened either
        poller = zmq.Poller()
        for watched in (self._dealer, self._wake_out, self._lifeline):
            poller.register(watched, zmq.POLLIN)
        try:
            while not self._closing and self._gone is None:
                ready = dict(poller.poll(int(self._poll_s * 1000)))
                silent_polls = 0 if self._dealer in ready else silent_polls + (not ready)
                if silent_polls:
                    self._dealer.send(encode(Inspect(NOBODY)))
                if silent_polls * self._poll_s >= self._silent_s:
                    silence = f"the runtime has not answered for {self._silent_s:g} s"
                    self._gone = f"{silence}; its process may be stuck or stopped"
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

    def _after_fork(self) -> None:
        """In a forked child: the thread is not here, and the parent's lifeline is not ours to hold open."""
        self._gone = "this process was forked from one that used the runtime; start or connect a Runtime after the fork"
        self._lifeline.close()

    def _send_queued(self) -> None:
        while self._queue:
            self._dealer.send(self._queue.popleft())

    def _deliver(self, on_reply: Callable[[Reply], None]) -> None:
        while frames := self._received():
            for frame in frames:
                for reply in decode_replies(frame):
                    on_reply(reply)

    def _received(self) -> list[bytes]:
        """All that has come: a frame holds a step's replies, so those who wait are woken when all of them are here."""
        frames: list[bytes] = []
        with contextlib.suppress(zmq.Again):
            while len(frames) < MAX_FRAMES:
                frames.append(self._dealer.recv(zmq.NOBLOCK))
        return frames

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
                    reply = decode_replies(self._dealer.recv())[0]
                except (msgspec.DecodeError, IndexError) as error:
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


def weakly(method: Callable[[], None]) -> Callable[[], None]:
    """`method` without keeping its object alive."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    return call
