"""The two ends of the message transport between a client and the scheduler.

`zmq_client` and `zmq_server` connect two processes, `local` connects two threads of one process. Every transport
promises:

- Order: messages of one client arrive in the order in which they were sent, in both directions, and each arrives once.
- No waiting: `send` never blocks, on either end. Each end queues what the other one has not read.
- One delivering thread: `on_reply` runs in one thread at a time, which must not be blocked.
- One end: `on_disconnect` runs exactly once, after the last reply. From then on `send` raises RuntimeGone.

A caller of `Session.generate` needs no more than this to follow a call; sockets and threads are described in the
implementing modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from plait.runtime.messages import ClientMessage, ServerMessage, Welcome

CONNECT_TIMEOUT_S = 30.0

ClientId = bytes  # names one connection; chosen by the transport


class ClientTransport(Protocol):
    """The client's end: sends to one scheduler and receives its replies.

    unanswered_s: for how long the scheduler has not answered a liveness check, in seconds; 0 if none is open.
    """

    welcome: Welcome

    @property
    def unanswered_s(self) -> float: ...

    def start(self, on_reply: Callable[[ServerMessage], None], on_disconnect: Callable[[str], None]) -> None:
        """Starts delivery: every reply goes to `on_reply`, the reason for the end goes to `on_disconnect`."""

    def send(self, request: ClientMessage) -> None:
        """Queues a message; any thread may call it. Raises RuntimeGone after the end, InputError if it is too large."""

    def set_liveness_check(self, interval_s: float, unresponsive_after_s: float) -> None:
        """Sends a liveness check after each `interval_s` seconds without replies, and disconnects after
        `unresponsive_after_s` seconds without an answer."""

    def attach_to_loop(self) -> None:
        """Delivers in the running event loop from now on. For a process whose loop is never blocked; call it there."""

    def detach_from_loop(self) -> None:
        """Undoes `attach_to_loop`. Call it in the same loop, before the loop is closed."""

    def close(self) -> None:
        """Disconnects; the scheduler drops this client's sessions. Idempotent."""


class ServerTransport(Protocol):
    """The scheduler's end: serves any number of clients."""

    num_bad_frames: int

    def receive(self, timeout_s: float | None, wake_fds: list[int]) -> list[tuple[ClientId, ClientMessage]]:
        """Returns the messages that have arrived.

        If there are none, waits up to `timeout_s` seconds (None: without limit) for a message or for a readable
        descriptor in `wake_fds`.
        """

    def take_disconnected(self) -> list[ClientId]:
        """Returns the clients that disconnected or died since the last call."""

    def send(self, client: ClientId, reply: ServerMessage) -> None:
        """Queues a reply. A client that has disconnected is no error."""

    @property
    def num_clients(self) -> int: ...
