"""Applies the block events of one replica in order, whatever order they arrive in, and notices what was lost.

A message that was lost shows as a gap before the next batch or heartbeat. Later batches are kept meanwhile. If the gap
does not close in REORDER_S, a snapshot is asked for, and asked for again while none arrives.
"""

from __future__ import annotations

from plait.runtime.cluster.prefix_index import PrefixIndex
from plait.runtime.kv_cache.block_events import HEARTBEAT_S
from plait.runtime.messages import BlockBatch, BlockSnapshot

REORDER_S = 0.05
SILENT_S = 2 * HEARTBEAT_S  # without a message for so long, a snapshot is asked for
ASK_AGAIN_S = 0.2
MAX_KEPT = 64  # batches behind a gap; older ones are dropped, and the snapshot covers them


class ReplicaFeed:
    """The state of one replica's events. Times are seconds of one monotonic clock, given by the caller."""

    def __init__(self, index: PrefixIndex, replica: int, now: float) -> None:
        self.index, self.replica = index, replica
        self.epoch, self.next_sequence = 0, 1
        self.num_snapshots = 0  # applied
        self.num_gaps = 0  # in which a snapshot had to be asked for
        self._kept: dict[int, BlockBatch] = {}
        self._last_heard = now
        self._gap_since: float | None = now  # nothing is known until the first batch or snapshot
        self._asked_at: float | None = None

    @property
    def is_current(self) -> bool:
        """Whether every message up to the last received one is applied."""
        return self._gap_since is None

    def receive(self, message: BlockBatch | BlockSnapshot, now: float) -> None:
        """Applies a message, or keeps it until those before it arrived. Old and repeated ones are ignored."""
        if message.epoch < self.epoch:
            return
        self._last_heard = now
        if message.epoch > self.epoch:  # a restart: its cache begins empty
            self.epoch, self.next_sequence = message.epoch, 1
            self._kept.clear()
            self.index.replace(self.replica, ())
        if message.sequence < self.next_sequence:
            return
        if isinstance(message, BlockSnapshot):
            self.num_snapshots += 1
            self.index.replace(self.replica, message.blocks)
            self.next_sequence = message.sequence + 1
        else:
            self._kept[message.sequence] = message
        self._apply_kept()
        if not self._kept:
            self._gap_since = self._asked_at = None
        elif self._gap_since is None:
            self._gap_since = now

    def _apply_kept(self) -> None:
        for sequence in [sequence for sequence in self._kept if sequence < self.next_sequence]:
            del self._kept[sequence]
        while (batch := self._kept.pop(self.next_sequence, None)) is not None:
            self.index.change(self.replica, batch.added, batch.removed)
            self.next_sequence += 1
        while len(self._kept) > MAX_KEPT:
            del self._kept[min(self._kept)]

    def should_ask(self, now: float) -> bool:
        """Whether to ask the replica for a snapshot now. True once for each time to ask."""
        is_gap = self._gap_since is not None and now >= self._gap_since + REORDER_S
        if not is_gap and now < self._last_heard + SILENT_S:
            return False
        if self._asked_at is not None and now < self._asked_at + ASK_AGAIN_S:
            return False
        self.num_gaps += self._asked_at is None
        self._asked_at = now
        return True
