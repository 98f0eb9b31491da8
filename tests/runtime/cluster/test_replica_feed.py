"""Block events over a channel that loses, repeats, delays and reorders: the index is right again within a second."""

from __future__ import annotations

import heapq
import random

import pytest
from cached_sequences import publish
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.runtime.cluster.prefix_index import PrefixIndex
from plait.runtime.cluster.router import ReplicaFeed
from plait.runtime.kv_cache.block_events import BLOCK_TOKENS, HEARTBEAT_S, BlockEvents
from plait.runtime.kv_cache.prefix_cache import PrefixCache
from plait.runtime.messages import BlockBatch

TICK_S = 0.05


class Replica:
    """A cache that changes at random, its events, and a faulty channel to a feed."""

    def __init__(self, seed: int) -> None:
        self.draw, self.now, self.epoch = random.Random(seed), 100.0, 0
        self.index = PrefixIndex()
        self.index.add_replica(0)
        self.feed = ReplicaFeed(self.index, 0, self.now)
        self.channel: list[tuple[float, int, object]] = []
        self.num_sent, self.is_faulty, self.next_batch = 0, True, self.now
        self.restart()

    def restart(self) -> None:
        self.epoch += 1
        self.cache = PrefixCache(40 * BLOCK_TOKENS)
        self.events = BlockEvents(self.cache.tree, epoch=self.epoch)

    def change(self) -> None:
        """Computes one random text, and sometimes evicts everything."""
        if self.draw.random() < 0.1:
            self.cache.flush()
        text = [token for _ in range(3) for token in [self.draw.randrange(3)] * BLOCK_TOKENS]
        self.cache.free(publish(self.cache, text))

    def send(self, message: object) -> None:
        copies = self.draw.choice([0, 1, 1, 2]) if self.is_faulty else 1
        for _ in range(copies):
            delay = self.draw.uniform(0, 0.3) if self.is_faulty else 0.0
            self.num_sent += 1
            heapq.heappush(self.channel, (self.now + delay, self.num_sent, message))

    def tick(self) -> None:
        """Lets TICK_S pass."""
        self.now += TICK_S
        if self.events.num_pending or self.now >= self.next_batch:
            self.send(self.events.take_batch())
            self.next_batch = self.now + HEARTBEAT_S
        while self.channel and self.channel[0][0] <= self.now:
            self.feed.receive(heapq.heappop(self.channel)[2], self.now)
        if self.feed.should_ask(self.now) and not (self.is_faulty and self.draw.random() < 0.5):
            self.events.take_batch()
            self.send(self.events.snapshot())

    def blocks(self) -> set[int]:
        return {block for node in self.cache.tree.nodes() for block in node.block_hashes}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), st.lists(st.sampled_from(["change", "tick", "tick", "restart"]), max_size=60))
def test_the_index_is_right_within_a_second_after_the_last_fault(seed, steps) -> None:
    replica = Replica(seed)
    for step in steps:
        getattr(replica, step)()
    replica.is_faulty = False
    replica.change()
    for _ in range(round(1 / TICK_S)):
        replica.tick()
    assert replica.index.reported(0) == replica.blocks()
    assert replica.feed.is_current


def test_one_lost_batch_is_mended_though_nothing_changes_after_it() -> None:
    replica = Replica(1)
    replica.is_faulty = False
    replica.change()
    replica.tick()
    replica.change()
    replica.events.take_batch()  # lost
    assert replica.index.reported(0) != replica.blocks()
    for _ in range(round(1 / TICK_S)):
        replica.tick()
    assert replica.index.reported(0) == replica.blocks()
    assert (replica.feed.num_gaps, replica.feed.num_snapshots) == (1, 1)


def test_reordered_batches_need_no_snapshot() -> None:
    index, cache = PrefixIndex(), PrefixCache(1000)
    index.add_replica(0)
    feed, events, batches = ReplicaFeed(index, 0, 0.0), BlockEvents(cache.tree), []
    for token in range(3):
        publish(cache, [token] * BLOCK_TOKENS)
        batches.append(events.take_batch())
    for batch in (batches[2], batches[1], batches[1], batches[0], batches[0]):
        feed.receive(batch, 0.01)
        assert not feed.should_ask(0.01)
    assert len(index.reported(0)) == 3
    assert not feed.should_ask(0.4)


@pytest.mark.parametrize("late", ["batch", "snapshot"])
def test_what_a_replica_sent_before_its_restart_is_ignored(late) -> None:
    replica = Replica(2)
    replica.is_faulty = False
    replica.change()
    old = replica.events.take_batch()
    if late != "batch":
        old = replica.events.snapshot()
    replica.restart()
    replica.tick()
    replica.feed.receive(old, replica.now)
    assert replica.index.reported(0) == set()


def test_a_silent_replica_is_asked_again_and_again() -> None:
    index = PrefixIndex()
    index.add_replica(0)
    feed = ReplicaFeed(index, 0, 0.0)
    feed.receive(BlockBatch(1, 1, [], []), 0.0)
    asked = [step for step in range(40) if feed.should_ask(step * TICK_S)]
    assert len(asked) >= 8
    assert feed.num_gaps == 1
