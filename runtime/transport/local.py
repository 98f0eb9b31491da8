"""Both ends of the transport within one process: a queue to the scheduler, a function call back to the client."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable

from plait.runtime.errors import RuntimeGone
from plait.runtime.messages import ClientMessage, ServerMessage, Welcome
from plait.runtime.transport.base import ClientId

CLOSED = "this engine was shut down"
MAX_WAIT_S = 3600.0  # poll() takes its milliseconds as a C int


class LocalServerTransport:
    """The scheduler's end, for exactly one client. `on_reply` is set by the client's end."""

    CLIENT: ClientId = b"local"

    def __init__(self) -> None:
        self.num_bad_frames = 0
        self.num_clients = 1
        self.on_reply: Callable[[ServerMessage], None] = lambda reply: None
        self._inbox: deque[ClientMessage] = deque()
        self._wake_read_fd, self._wake_write_fd = os.pipe()
        os.set_blocking(self._wake_read_fd, False)
        os.set_blocking(self._wake_write_fd, False)

    def enqueue(self, request: ClientMessage) -> None:
        """Queues a message for `receive`. Thread-safe."""
        self._inbox.append(request)
        self.wake()

    def wake(self) -> None:
        """Ends a `receive` that is waiting. Thread-safe."""
        with contextlib.suppress(BlockingIOError):  # a full pipe is readable already
            os.write(self._wake_write_fd, b"!")

    def receive(self, timeout_s: float | None, wake_fds: list[int]) -> list[tuple[ClientId, ClientMessage]]:
        if not self._inbox and timeout_s != 0:
            poller = select.poll()  # select() does not support descriptors above 1023
            for fd in (self._wake_read_fd, *wake_fds):
                poller.register(fd, select.POLLIN)
            poller.poll(None if timeout_s is None else min(timeout_s, MAX_WAIT_S) * 1000)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read_fd, 4096)
        return [(self.CLIENT, self._inbox.popleft()) for _ in range(len(self._inbox))]

    def take_disconnected(self) -> list[ClientId]:
        return []

    def send(self, client: ClientId, reply: ServerMessage) -> None:
        self.on_reply(reply)

    def close(self) -> None:
        """Closes the wake pipe; `enqueue` must not be called afterwards. Idempotent."""
        if self._wake_write_fd >= 0:
            os.close(self._wake_read_fd)
            os.close(self._wake_write_fd)
            self._wake_read_fd = self._wake_write_fd = -1


class LocalClientTransport:
    """The client's end. Its thread calls `step()` of the scheduler, which delivers the replies, until `close`.

    The scheduler has its own thread because an interrupt that reaches a waiting caller must not cut a step in two.
    `step()` waits for a message when there is nothing to compute. `begin()` is called first, in the same thread.
    """

    def __init__(
        self,
        welcome: Welcome,
        server: LocalServerTransport,
        step: Callable[[], None],
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self.welcome = welcome
        self._server = server
        self._step, self._begin = step, begin
        self._closing = False
        self._stop_reason = CLOSED
        self._thread: threading.Thread | None = None

    def start(self, on_reply: Callable[[ServerMessage], None], on_disconnect: Callable[[str], None]) -> None:
        self._server.on_reply = on_reply
        self._thread = threading.Thread(target=self._run, args=(on_disconnect,), name="plait-engine", daemon=True)
        self._thread.start()

    def send(self, request: ClientMessage) -> None:
        if self._closing:
            raise RuntimeGone(self._stop_reason)
        self._server.enqueue(request)

    @property
    def unanswered_s(self) -> float:
        """Always 0: the steps run in this process."""
        return 0.0

    def set_liveness_check(self, interval_s: float, unresponsive_after_s: float) -> None:
        """Does nothing: there is no other process."""

    def attach_to_loop(self) -> None:
        """Does nothing: replies are delivered by the thread that runs the steps."""

    def detach_from_loop(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        self._closing = True
        self._server.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self, on_disconnect: Callable[[str], None]) -> None:
        try:
            self._begin()
            while not self._closing:
                self._step()
        except Exception as error:
            self._stop_reason = f"the engine failed: {type(error).__name__}: {error}"
            raise
        finally:
            self._closing = True
            on_disconnect(self._stop_reason)
