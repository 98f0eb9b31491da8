"""The client's end of the ZeroMQ transport to a scheduler in another process.

Messages are queued by any thread and sent by the I/O driver, which also delivers the replies: at first a thread, in a
server its event loop. Each client holds two sockets: a ZeroMQ DEALER for frames, and the lifeline, a stream socket
that the kernel closes when the scheduler's process ends, so that every waiting call fails at once.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from plait.host.fork import register_after_fork_in_child
from plait.runtime.errors import CLIENT_CLOSED, RUNTIME_EXITED, RuntimeGone
from plait.runtime.messages import PROTOCOL, Append, ClientMessage, Close, Hello, Inspect, Open, ServerMessage, Welcome
from plait.runtime.transport.base import CONNECT_TIMEOUT_S
from plait.runtime.transport.frames import build_frame, build_frames, decode_server_frame, encode, encode_client_message
from plait.runtime.transport.io_driver import EventLoopIoDriver, ThreadIoDriver
from plait.runtime.transport.zmq_server import CLIENT_ID_BYTES, FRAMES_SOCKET, LIFELINE_SOCKET

MAX_FRAMES_PER_POLL = 4096  # read before they are delivered
LIVENESS_INTERVAL_S, UNRESPONSIVE_AFTER_S = (
    5.0,
    120.0,
)  # a check follows each interval without replies
LIVENESS_CALL_ID = 0  # of these checks; no call has this id, so the answer is dropped
DEFERRABLE = (Open, Append)  # cause no reply, so they are sent with the message that follows


class ZmqClientTransport:
    """Implements `ClientTransport`. `address` is the runtime's directory; `exit_reason()` explains a lost lifeline."""

    def __init__(self, address: str | Path, exit_reason: Callable[[], str] = lambda: RUNTIME_EXITED) -> None:
        self._exit_reason = exit_reason
        self._connection = ZmqConnection(Path(address))
        self._queue: deque[bytes] = deque()
        self.liveness_interval_s, self._unresponsive_after_s = LIVENESS_INTERVAL_S, UNRESPONSIVE_AFTER_S
        self._unanswered_checks = 0  # a count, not a time: while this process was stopped it did not listen either
        self._closing = self._has_ended = False
        self._disconnect_reason: str | None = None
        self._driver: EventLoopIoDriver | ThreadIoDriver | None = None
        self.welcome = self._connection.handshake(exit_reason)
        register_after_fork_in_child(self._after_fork)

    def start(self, on_reply: Callable[[ServerMessage], None], on_disconnect: Callable[[str], None]) -> None:
        self._on_reply, self._on_disconnect = on_reply, on_disconnect
        self._driver = ThreadIoDriver(self, self._connection)

    def send(self, request: ClientMessage) -> None:
        message = encode_client_message(request)
        if self._disconnect_reason is not None or self._closing:
            raise RuntimeGone(self._disconnect_reason or CLIENT_CLOSED)
        self._queue.append(message)
        if self._driver is None or isinstance(request, DEFERRABLE):
            return
        if isinstance(request, Close):
            self._driver.wake_soon()
        else:
            self._driver.wake()

    @property
    def unanswered_s(self) -> float:
        return max(0, self._unanswered_checks - 1) * self.liveness_interval_s  # the first one sends the check

    def set_liveness_check(self, interval_s: float, unresponsive_after_s: float) -> None:
        self.liveness_interval_s, self._unresponsive_after_s = interval_s, unresponsive_after_s
        if self._driver is not None:
            self._driver.wake()  # a thread that waits for the old interval

    def attach_to_loop(self) -> None:
        self._change_driver(EventLoopIoDriver)

    def detach_from_loop(self) -> None:
        self._change_driver(ThreadIoDriver)

    def close(self) -> None:
        self._closing = True
        if self._driver is not None:
            self._driver.stop(final=True)
        elif not self._has_ended:
            self._has_ended = True
            self._connection.close()

    def _change_driver(self, kind: type[EventLoopIoDriver] | type[ThreadIoDriver]) -> None:
        if self._driver is None or self.is_closed:
            return
        self._driver.stop(final=False)
        if not self.is_closed:
            self._driver = kind(self, self._connection)
            self._driver.wake()  # for messages queued and replies received between the two drivers

    # -- called by the I/O driver -----------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether nothing more can be sent or received."""
        return self._closing or self._disconnect_reason is not None

    def send_and_receive(self) -> bool:
        """Sends the queue and delivers all replies that have arrived. Returns whether there were any."""
        self.flush_queue()
        received_any, frames = False, self._connection.receive_frames()
        while frames:
            received_any, self._unanswered_checks = True, 0
            for frame in frames:
                self._deliver(frame)
            frames = self._connection.receive_frames() if len(frames) == MAX_FRAMES_PER_POLL else []
        return received_any

    def _deliver(self, frame: bytes) -> None:
        """Passes on the replies of a frame. Disconnects if it cannot be read, since a call might wait for its reply."""
        try:
            replies = decode_server_frame(frame)
        except msgspec.DecodeError as error:
            self._disconnect_reason = f"the runtime sent a frame that cannot be read ({error!s:.200})"
            return
        for reply in replies:
            self._on_reply(reply)

    def flush_queue(self) -> None:
        if self._queue:
            self._connection.send(self._queue)

    def check_lifeline(self) -> None:
        """Called when the lifeline is readable.

        If the scheduler has exited, delivers its last replies and disconnects.
        """
        if self._connection.peer_has_exited():
            self.send_and_receive()
            self._disconnect_reason = self._exit_reason()

    def check_liveness(self) -> None:
        """Called after `liveness_interval_s` without replies.

        Queues a liveness check; disconnects after too many of them.
        """
        self._unanswered_checks += 1
        self._queue.append(encode(Inspect(LIVENESS_CALL_ID)))
        if self.unanswered_s >= self._unresponsive_after_s:
            reason = f"the runtime has not answered for {self._unresponsive_after_s:g} s"
            self._disconnect_reason = f"{reason}; its process may be stuck or stopped"

    def finish(self, error: Exception | None) -> None:
        """The driver's last call: closes the sockets and calls `on_disconnect`. Idempotent."""
        if self._has_ended:
            return
        self._has_ended = True
        if error is not None:
            self._disconnect_reason = f"the connection to the runtime failed: {error}"
        self._connection.close()
        self._on_disconnect(self._disconnect_reason or CLIENT_CLOSED)

    def _after_fork(self) -> None:
        """Runs in a forked child: it has no I/O thread, and must not keep the parent's lifeline open."""
        self._disconnect_reason = (
            "this process was forked from one that used the runtime; start or connect a Runtime after the fork"
        )
        self._connection.lifeline.close()


class ZmqConnection:
    """One client's sockets. Only `handshake` and the constructor wait. One thread at a time may use it.

    Raises RuntimeGone if no runtime answers in `directory`.
    """

    def __init__(self, directory: Path) -> None:
        client_id = os.urandom(CLIENT_ID_BYTES)
        self.lifeline = _open_lifeline(directory, client_id)
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.IDENTITY, client_id)
        self.socket.connect(f"ipc://{directory / FRAMES_SOCKET}")

    def handshake(self, exit_reason: Callable[[], str]) -> Welcome:
        """Returns the scheduler's Welcome. Raises RuntimeGone if none comes or its protocol version differs."""
        self.socket.send(build_frame([encode(Hello(PROTOCOL))]))
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.socket.poll(100):
                try:
                    reply = decode_server_frame(self.socket.recv())[0]
                except (msgspec.DecodeError, IndexError) as error:
                    raise RuntimeGone(f"the runtime uses another version of the protocol: {error}") from None
                if isinstance(reply, Welcome) and reply.protocol == PROTOCOL:
                    return reply
                raise RuntimeGone("the runtime uses another version of the protocol; upgrade both to one version")
            if self.peer_has_exited():
                raise RuntimeGone(exit_reason())
        raise RuntimeGone(f"the runtime did not answer within {CONNECT_TIMEOUT_S:.0f} s")

    def send(self, messages: deque[bytes]) -> None:
        """Sends all encoded `messages` in as few frames as possible and empties the queue."""
        batch: list[bytes] = []
        while messages:  # other threads may append meanwhile
            batch.append(messages.popleft())
        for frame in build_frames(batch):
            self.socket.send(frame)

    def receive_frames(self) -> list[bytes]:
        """Returns up to MAX_FRAMES_PER_POLL frames without waiting.

        Reading them all first lets the replies of one step wake their readers together.
        """
        frames: list[bytes] = []
        while len(frames) < MAX_FRAMES_PER_POLL and self.has_pending_input:
            frames.append(self.socket.recv())
        return frames

    @property
    def fd(self) -> int:
        """An edge-triggered descriptor: readable once after input has arrived, see `has_pending_input`."""
        return int(self.socket.getsockopt(zmq.FD))

    @property
    def has_pending_input(self) -> bool:
        """Whether `receive_frames` would return any frame."""
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def peer_has_exited(self) -> bool:
        """Whether the scheduler's process has closed its end of the lifeline."""
        try:
            return not self.lifeline.recv(16)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Closes both sockets; the scheduler then drops this client's sessions."""
        self.socket.close()
        self._context.term()
        self.lifeline.close()


def _open_lifeline(directory: Path, client_id: bytes) -> socket.socket:
    lifeline = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    lifeline.settimeout(CONNECT_TIMEOUT_S)
    try:
        lifeline.connect(str(directory / LIFELINE_SOCKET))
        lifeline.sendall(client_id)
        if lifeline.recv(1) != b"+":
            raise ConnectionError("it refused the connection")
    except OSError as error:
        lifeline.close()
        raise RuntimeGone(f"no runtime answers at {str(directory)!r} ({error})") from None
    lifeline.setblocking(False)
    return lifeline
