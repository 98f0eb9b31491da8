"""A channel carries messages between one client and one scheduler; how is its own affair.

Two exist: `zmq_channel.ZmqChannel` to another process, `local_channel.LocalChannel` to a scheduler in this one.

Knows: the methods. Must not know: calls, sessions, text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from plait.runtime.messages import Reply, Request, Welcome


class Channel(Protocol):
    """What a client needs of its way to the scheduler."""

    welcome: Welcome

    def start(self, on_reply: Callable[[Reply], None], on_gone: Callable[[str], None]) -> None:
        """Delivers every reply to `on_reply`; calls `on_gone(why)` once when no more can come."""

    def send(self, request: Request) -> None:
        """Sends without waiting, from any thread. Raises RuntimeGone when the scheduler has ended."""

    def join_loop(self) -> None:
        """From now on the running event loop reads, where a thread did that does nothing else; call it there."""

    def leave_loop(self) -> None:
        """Undoes `join_loop`, before the loop is closed; call it there."""

    def close(self) -> None:
        """Says goodbye; the scheduler drops this client's sessions. Idempotent."""
