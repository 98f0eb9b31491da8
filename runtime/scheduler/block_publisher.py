"""Sends block events to the clients that watch them: what entered and left the radix tree, and heartbeats.

A watch ends after WATCH_S unless its client renews it, so a client that does not read gets few messages.
Without a watch nothing is hashed. What is due is sent at the end of a step, and the transport never waits.
"""

from __future__ import annotations

from collections.abc import Callable

from plait.runtime.kv_cache.block_events import HEARTBEAT_S, BlockEvents
from plait.runtime.kv_cache.radix_tree import RadixTree
from plait.runtime.messages import BlockBatch, BlockSnapshot
from plait.runtime.transport.base import ClientId

WATCH_S = 10.0
BATCH_INTERVAL_S = 0.01  # between two batches
SNAPSHOT_INTERVAL_S = 0.1  # between two snapshots, however often they are asked for
MAX_WATCHES = 8  # clients beyond them are ignored


class BlockPublisher:
    """The watches of one scheduler. Times are those of `time.monotonic()`, given by the caller."""

    def __init__(self, tree: RadixTree, send: Callable[[ClientId, BlockBatch | BlockSnapshot], None]) -> None:
        self._tree, self._send = tree, send
        self._events: BlockEvents | None = None
        self._watches: dict[ClientId, float] = {}  # client -> the time at which its watch ends
        self._asking: set[ClientId] = set()  # for a snapshot
        self._next_batch = self._next_snapshot = 0.0

    @property
    def is_watched(self) -> bool:
        """Whether a client has a watch."""
        return bool(self._watches)

    def watch(self, client: ClientId, snapshot: bool, now: float) -> None:
        """Begins or renews a client's watch."""
        if client not in self._watches and len(self._watches) >= MAX_WATCHES:
            return
        if self._events is None:
            self._events = BlockEvents(self._tree)
        self._watches[client] = now + WATCH_S
        if snapshot:
            self._asking.add(client)

    def drop_client(self, client: ClientId) -> None:
        """Ends the watch of a client that disconnected."""
        self._watches.pop(client, None)
        self._asking.discard(client)
        if not self._watches and self._events is not None:
            self._tree.listener = self._events = None

    def next_due(self) -> float | None:
        """The time of the next batch or heartbeat; None if nobody watches."""
        if self._events is None:
            return None
        if self._asking:
            return self._next_snapshot
        return self._next_batch if self._events.num_pending else self._next_batch + HEARTBEAT_S - BATCH_INTERVAL_S

    def publish(self, now: float) -> None:
        """Sends what is due: a batch to all, and a snapshot in its place to those that asked."""
        due = self.next_due()
        if self._events is None or due is None or now < due:
            return
        for client in [client for client, end in self._watches.items() if end <= now]:
            self.drop_client(client)
        if self._events is None:  # the last watch has ended
            return
        self._next_batch = now + BATCH_INTERVAL_S
        batch, snapshot = self._events.take_batch(), None
        if self._asking and now >= self._next_snapshot:
            self._next_snapshot = now + SNAPSHOT_INTERVAL_S
            snapshot = self._events.snapshot()
        for client in self._watches:
            self._send(client, snapshot if snapshot is not None and client in self._asking else batch)
        if snapshot is not None:
            self._asking.clear()
