"""A channel carries messages between one client and one scheduler; how is its own affair.

Two exist: `zmq_channel.ZmqClientTransport` to another process, `local_channel.LocalClientTransport` to a scheduler in this one.

Knows: the methods. Must not know: calls, sessions, text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from plait.runtime.messages import ClientMessage, ServerMessage, Welcome


class ClientTransport(Protocol):
    """What a client needs of its way to the scheduler."""

    welcome: Welcome

    def start(self, on_reply: Callable[[ServerMessage], None], on_disconnect: Callable[[str], None]) -> None:
        """Delivers every reply to `on_reply`; calls `on_disconnect(why)` once when no more can come."""

    def send(self, request: ClientMessage) -> None:
        """Sends without waiting, from any thread. Raises RuntimeGone when the scheduler has ended."""

    def attach_to_loop(self) -> None:
        """From now on the running event loop reads, where a thread did that does nothing else; call it there."""

    def detach_from_loop(self) -> None:
        """Undoes `attach_to_loop`, before the loop is closed; call it there."""

    def close(self) -> None:
        """Says goodbye; the scheduler drops this client's sessions. Idempotent."""
