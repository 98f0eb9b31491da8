"""The channel to a scheduler in another process: requests queued from any thread, replies delivered by one.

Who that one is, a driver says: at first a thread of the channel's own, in a server its event loop. When the lifeline
ends, the scheduler's process has, and every waiting call is told at once.

Knows: queues, frames, silence. Must not know: what the messages mean.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

from plait.runtime.errors import RUNTIME_EXITED, RuntimeGone
from plait.runtime.messages import (
    Append,
    ClientMessage,
    Close,
    Inspect,
    Open,
    ServerMessage,
    decode_server_messages,
    encode,
    encode_client_message,
)
from plait.runtime.transport.fork import register_after_fork_in_child
from plait.runtime.transport.io_driver import EventLoopIoDriver, IoDriver, ThreadIoDriver
from plait.runtime.transport.zmq_connection import MAX_FRAMES_PER_POLL, ZmqConnection

CLOSED = "this client was closed"
SILENCE_CHECK_S, UNRESPONSIVE_AFTER_S = 5.0, 120.0  # after a silent poll the scheduler is asked for a sign of life
NO_CALL_ID = 0  # the call id of such a question: its answer is for no call
DEFERRABLE = (Open, Append)  # do nothing by themselves: they go with what follows them


class ZmqClientTransport:
    """See the file's header. `address` is the runtime's directory."""

    def __init__(self, address: str | Path, exit_reason: Callable[[], str] = lambda: RUNTIME_EXITED) -> None:
        self._exit_reason = exit_reason
        self._connection = ZmqConnection(Path(address))
        self._queue: deque[bytes] = deque()
        self.silence_check_s, self._unresponsive_after_s = SILENCE_CHECK_S, UNRESPONSIVE_AFTER_S
        self._unanswered_checks = 0  # counted in polls, not seconds: a process that was stopped has not listened either
        self._closing = self._has_ended = False
        self._disconnect_reason: str | None = None
        self._driver: IoDriver | None = None
        self.welcome = self._connection.handshake(exit_reason)
        register_after_fork_in_child(self._after_fork)

    def start(self, on_reply: Callable[[ServerMessage], None], on_disconnect: Callable[[str], None]) -> None:
        self._on_reply, self._on_disconnect = on_reply, on_disconnect
        self._driver = ThreadIoDriver(self, self._connection)

    def send(self, request: ClientMessage) -> None:
        message = encode_client_message(request)
        if self._disconnect_reason is not None or self._closing:
            raise RuntimeGone(self._disconnect_reason or CLOSED)
        self._queue.append(message)
        if self._driver is None or isinstance(request, DEFERRABLE):
            return
        if isinstance(request, Close):
            self._driver.wake_soon()
        else:
            self._driver.wake()

    def attach_to_loop(self) -> None:
        """Delivers in the running event loop's own thread from now on. Call it there."""
        self._change_driver(EventLoopIoDriver)

    def detach_from_loop(self) -> None:
        """Delivers in a thread again. Call it where `attach_to_loop` was called, before the loop is closed."""
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
            self._driver.wake()  # for what was queued and what came in between

    # -- what the driver calls --------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Nothing more can be sent or will come."""
        return self._closing or self._disconnect_reason is not None

    def send_and_receive(self) -> bool:
        """Sends what is queued and delivers what has come; whether anything had."""
        self.flush_queue()
        received_any, frames = False, self._connection.receive_frames()
        while frames:
            received_any, self._unanswered_checks = True, 0
            for frame in frames:
                for reply in decode_server_messages(frame):
                    self._on_reply(reply)
            frames = self._connection.receive_frames() if len(frames) == MAX_FRAMES_PER_POLL else []
        return received_any

    def flush_queue(self) -> None:
        if self._queue:
            self._connection.send(self._queue)

    def check_lifeline(self) -> None:
        """Something happened to it."""
        if self._connection.peer_has_exited():
            self.send_and_receive()  # what it said before it died still counts
            self._disconnect_reason = self._exit_reason()

    def on_silence(self) -> None:
        """Nothing came for `silence_check_s`: asks for a sign of life, and gives up after many unanswered questions."""
        self._unanswered_checks += 1
        self._queue.append(encode(Inspect(NO_CALL_ID)))
        if self._unanswered_checks * self.silence_check_s >= self._unresponsive_after_s:
            silence = f"the runtime has not answered for {self._unresponsive_after_s:g} s"
            self._disconnect_reason = f"{silence}; its process may be stuck or stopped"

    def finish(self, error: Exception | None) -> None:
        """The last call: closes the sockets and tells who waits. Idempotent."""
        if self._has_ended:
            return
        self._has_ended = True
        if error is not None:
            self._disconnect_reason = f"the connection to the runtime broke: {error}"
        self._connection.close()
        self._on_disconnect(self._disconnect_reason or CLOSED)

    def _after_fork(self) -> None:
        """In a forked child: the thread is not here, and the parent's lifeline is not ours to hold open."""
        self._disconnect_reason = (
            "this process was forked from one that used the runtime; start or connect a Runtime after the fork"
        )
        self._connection.lifeline.close()
