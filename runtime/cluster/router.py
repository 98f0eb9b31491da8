"""Places requests on replicas: where their prefix is cached, among the replicas that are not busier than others.

The candidates are the replicas whose load is within a window of the least loaded one. The candidate with the longest
cached prefix gets the request; among equals the least loaded.

A prefix that is too hot for its replicas raises their load out of the window; the request then goes to the least loaded
replica, which computes the prefix and shares it from then on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from plait.runtime.cluster.prefix_index import PrefixIndex
from plait.runtime.kv_cache.block_events import BLOCK_TOKENS, HEARTBEAT_S
from plait.runtime.messages import BlockBatch, BlockSnapshot

# -- replica feed ---------------------------------------------------------------------------------
# Applies the block events of one replica in order, whatever order they arrive in, and notices what was lost.
#
# A message that was lost shows as a gap before the next batch or heartbeat. Later batches are kept meanwhile. If the
# gap does not close in REORDER_S, a snapshot is asked for, and asked for again while none arrives.

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


# -- router ---------------------------------------------------------------------------------------

OUTPUT_WEIGHT = 4  # prompt tokens that cost as much time as one output token, on an H100 with an 8B model
WINDOW_TOKENS = 8192  # prompt tokens that a replica's load may lie above the least
WINDOW_SHARE = 0.25  # and this share of the mean load
EXPECT_S = 1.0  # blocks of a request that ended are expected so much longer: until its replica's report is here
OUTPUT_EWMA_WEIGHT = 1 / 64
FIRST_OUTPUT_ESTIMATE = 256
EVERY_REPLICA = -1  # the mask of all
PLACED_BITS = 40  # a sort key of a replica is load << PLACED_BITS | number of requests placed on it
CLOSED = 1 << 100  # the sort key of a replica that takes no new requests


class NoReplicaError(Exception):
    """No replica accepts requests now."""


@dataclass(slots=True, eq=False)
class _Replica:
    number: int
    feed: ReplicaFeed
    is_open: bool = True  # whether it takes new requests
    load: int = 0
    num_placed: int = 0


@dataclass(slots=True, eq=False)
class Placement:
    """One placed request. Give it back with `Router.finish`, however the request ended."""

    replica: int
    num_matched: int  # tokens of the prompt that the replica has cached, as far as known
    prompt_load: int
    output_load: int
    expected: Sequence[int]
    home: _Replica  # a new replica may have the number of one that was removed
    is_open: bool = True

    @property
    def load(self) -> int:
        return self.prompt_load + self.output_load


class Router:
    """Chooses replicas. No I/O and no clock: callers pass the time in seconds of one monotonic clock."""

    def __init__(self, window_tokens: int = WINDOW_TOKENS) -> None:
        self.index = PrefixIndex()
        self.window_tokens = window_tokens
        self.mean_output: float = FIRST_OUTPUT_ESTIMATE
        self.num_spread = 0  # requests placed away from a longer prefix because its replicas were too busy
        self._replicas: dict[int, _Replica] = {}
        self._keys: list[int] = []  # of the replica with this number
        self._num_open = self._open_load = 0  # replicas that take new requests, and their load
        self._ended: deque[tuple[float, int, Sequence[int]]] = deque()

    # -- replicas -------------------------------------------------------------------------------------

    def add_replica(self, now: float) -> int:
        """Adds a replica and returns its number, the smallest that is free."""
        replica = next(number for number in range(len(self._replicas) + 1) if number not in self._replicas)
        self.index.add_replica(replica)
        self._replicas[replica] = _Replica(replica, ReplicaFeed(self.index, replica, now))
        self._keys += [CLOSED] * (replica + 1 - len(self._keys))
        self._keys[replica] = 0
        self._num_open += 1
        return replica

    def drain(self, replica: int) -> None:
        """Places no new requests on the replica."""
        drained = self._replicas[replica]
        if drained.is_open:
            drained.is_open = False
            self._keys[replica] = CLOSED
            self._num_open -= 1
            self._open_load -= drained.load

    def reopen(self, replica: int) -> None:
        """Undoes `drain`."""
        reopened = self._replicas[replica]
        if not reopened.is_open:
            reopened.is_open = True
            self._num_open += 1
            self._open_load += reopened.load
            self._keys[replica] = reopened.load << PLACED_BITS | reopened.num_placed

    def remove_replica(self, replica: int) -> None:
        """Forgets a replica that ended. Its placements need not be given back."""
        self.drain(replica)
        del self._replicas[replica]
        self.index.remove_replica(replica)
        self._ended = deque(entry for entry in self._ended if entry[1] != replica)

    def receive(self, replica: int, message: BlockBatch | BlockSnapshot, now: float) -> None:
        """Takes a message of a replica's `BlockEvents`. Ignores replicas that were removed."""
        if replica in self._replicas:
            self._replicas[replica].feed.receive(message, now)

    def replicas_to_ask(self, now: float) -> list[int]:
        """The replicas to ask for a snapshot now. Call it every 50 ms or so."""
        self._expire(now)
        return [number for number, replica in self._replicas.items() if replica.feed.should_ask(now)]

    def load(self, replica: int) -> int:
        """The load of the requests placed on a replica: prompt tokens to compute, and weighted output tokens."""
        return self._replicas[replica].load

    # -- requests -------------------------------------------------------------------------------------

    def place(self, blocks: Sequence[int], num_tokens: int, max_tokens: int, now: float) -> Placement:
        """Chooses a replica and counts the request's load on it at once.

        blocks: `block_hashes` of the prompt in its tenant's namespace. num_tokens: length of the prompt. Raises
        NoReplicaError.
        """
        self._expire(now)
        number, count = self._choose(blocks)
        num_matched = min(count * BLOCK_TOKENS, num_tokens)
        replica = self._replicas[number]
        placement = Placement(
            number,
            num_matched,
            num_tokens - num_matched,
            self._output_load(max_tokens),
            self.index.expect(number, blocks) if count < len(blocks) else (),
            replica,
        )
        replica.num_placed += 1
        self._add_load(replica, placement.load)
        return placement

    def continue_on(self, replica: int, num_tokens: int, max_tokens: int) -> Placement:
        """Counts the load of a further call on the replica that holds its session. num_tokens: of the new text."""
        home = self._replicas[replica]
        placement = Placement(replica, 0, num_tokens, self._output_load(max_tokens), (), home)
        self._add_load(home, placement.load)
        return placement

    def _output_load(self, max_tokens: int) -> int:
        return round(OUTPUT_WEIGHT * min(max_tokens, self.mean_output))

    def _choose(self, blocks: Sequence[int]) -> tuple[int, int]:
        """Returns the replica and how many leading blocks it has."""
        if not self._num_open:
            raise NoReplicaError
        keys = self._keys
        least = min(keys)
        limit = (least >> PLACED_BITS) + self.window_tokens + WINDOW_SHARE * self._open_load / self._num_open
        highest_key = int(limit + 1) << PLACED_BITS
        candidates = 0
        for number, key in enumerate(keys):
            if key < highest_key:
                candidates |= 1 << number
        count, best = self.index.longest(blocks, candidates)
        if count < len(blocks) and candidates.bit_count() < self._num_open:
            self.num_spread += self.index.longest(blocks, EVERY_REPLICA)[0] > count
        number = keys.index(least)
        if not best >> number & 1:
            number = min((key, other) for other, key in enumerate(keys) if best >> other & 1)[1]
        return number, count

    def _add_load(self, replica: _Replica, load: int) -> None:
        replica.load += load
        if replica.is_open:
            self._open_load += load
            self._keys[replica.number] = replica.load << PLACED_BITS | replica.num_placed

    def first_token(self, placement: Placement) -> None:
        """Gives back the load of the prompt, which is computed."""
        if placement.is_open:
            self._add_load(placement.home, -placement.prompt_load)
            placement.prompt_load = 0

    def finish(self, placement: Placement, num_output: int | None, now: float) -> None:
        """Gives back the load of a request that ended, failed or was aborted. Does nothing the second time.

        num_output: tokens that it generated; None if it was to generate none, or failed.
        """
        if not placement.is_open:
            return
        placement.is_open = False
        if num_output is not None:
            self.mean_output += OUTPUT_EWMA_WEIGHT * (num_output - self.mean_output)
        self._add_load(placement.home, -placement.load)
        if placement.expected and self._replicas.get(placement.replica) is placement.home:
            self._ended.append((now + EXPECT_S, placement.replica, placement.expected))

    def _expire(self, now: float) -> None:
        while self._ended and self._ended[0][0] <= now:
            _, replica, blocks = self._ended.popleft()
            self.index.stop_expecting(replica, blocks)
