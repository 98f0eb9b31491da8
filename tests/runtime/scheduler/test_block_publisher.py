"""Block events of an engine loop: a watching client hears of every block, and notices when it missed one."""

from __future__ import annotations

import pytest
from fake_engine import generate, make_engine_loop, post, run_until_idle

from plait.runtime.cluster.prefix_index import PrefixIndex
from plait.runtime.cluster.router import ReplicaFeed
from plait.runtime.kv_cache.block_events import BLOCK_TOKENS, HEARTBEAT_S
from plait.runtime.messages import Append, BlockBatch, BlockSnapshot, Close, FlushCache, Open, Tokens, WatchBlocks
from plait.runtime.scheduler import block_publisher
from plait.runtime.scheduler.block_publisher import BATCH_INTERVAL_S, MAX_WATCHES, WATCH_S
from plait.runtime.transport.frames import build_frame, decode_server_frame, encode


class Loop:
    """An engine loop whose publisher's clock is set by the test, and a feed for each client that watches."""

    def __init__(self) -> None:
        self.loop, self.transport, _ = make_engine_loop(pages=1024, batch_tokens=256)
        self.now, self.publisher = 100.0, self.loop.block_publisher
        publish, watch = self.publisher.publish, self.publisher.watch
        self.publisher.publish = lambda _: publish(self.now)
        self.publisher.watch = lambda client, snapshot, _: watch(client, snapshot, self.now)
        self.index, self.feeds, self.num_sessions = PrefixIndex(), {}, 0

    def watch(self, client=b"c", snapshot=True) -> None:
        self.step(WatchBlocks(snapshot), client=client)

    def step(self, *messages, client=b"c", seconds=BATCH_INTERVAL_S) -> None:
        self.now += seconds
        run_until_idle(self.loop, self.transport, *messages, client=client)

    def ask(self, token: int, num_blocks: int) -> None:
        """Computes a prompt of so many blocks, which shares none with those of other tokens."""
        self.num_sessions += 1
        number = self.num_sessions
        prompt = [token] * (num_blocks * BLOCK_TOKENS + 1)
        self.step(Open(number), Append(number, prompt), generate(number, number, 1), Close(number))

    def events(self, client=b"c") -> list:
        """The events that arrived for a client since the last call."""
        events = [message for to, message in self.transport.outbox if to == client and is_event(message)]
        self.transport.outbox = [(to, message) for to, message in self.transport.outbox if to != client]
        return events

    def deliver(self, client=b"c") -> set[int]:
        """Gives a client's feed what arrived, and returns the blocks that it knows."""
        if client not in self.feeds:
            number = len(self.feeds)
            self.index.add_replica(number)
            self.feeds[client] = ReplicaFeed(self.index, number, self.now)
        feed = self.feeds[client]
        for event in self.events(client):
            feed.receive(event, self.now)
        return set(self.index.reported(feed.replica))

    def blocks(self) -> set[int]:
        return {block for node in self.loop.cache.tree.nodes() for block in node.block_hashes}


def is_event(message) -> bool:
    return isinstance(message, BlockBatch | BlockSnapshot)


@pytest.fixture
def watched() -> Loop:
    return Loop()


def test_nothing_is_hashed_or_sent_before_somebody_watches(watched) -> None:
    watched.ask(1, 2)
    assert watched.loop.cache.tree.listener is None and not watched.events()
    watched.watch()
    assert len(watched.deliver()) == 2


def test_watcher_knows_what_is_in_the_tree(watched) -> None:
    watched.ask(1, 2)
    watched.watch()
    watched.ask(2, 3)
    watched.ask(1, 4)
    watched.step()
    assert watched.deliver() == watched.blocks() and len(watched.blocks()) == 7
    watched.step(FlushCache(9))
    watched.step()
    assert watched.deliver() == watched.blocks() == set()


def test_lost_batch_is_noticed_and_the_snapshot_repairs_it(watched) -> None:
    watched.watch()
    watched.deliver()
    watched.ask(1, 2)
    watched.step()
    assert any(event.added for event in watched.events())  # lost
    watched.step(seconds=HEARTBEAT_S)
    assert watched.deliver() == set() and not watched.feeds[b"c"].is_current
    assert watched.feeds[b"c"].should_ask(watched.now + 0.1)
    watched.watch()
    assert watched.deliver() == watched.blocks() and watched.feeds[b"c"].is_current


def test_snapshot_of_one_client_leaves_the_other_current(watched) -> None:
    watched.watch(b"c")
    watched.ask(1, 2)
    watched.step(seconds=1.0)
    watched.watch(b"d")
    watched.step(seconds=HEARTBEAT_S)
    assert watched.deliver(b"c") == watched.deliver(b"d") == watched.blocks() != set()
    assert watched.feeds[b"c"].is_current and watched.feeds[b"c"].num_snapshots == 1


def test_snapshots_are_limited_however_often_they_are_asked_for(watched) -> None:
    watched.watch()
    watched.events()
    post(watched.transport, *[WatchBlocks(True)] * 100)
    for _ in range(100):
        watched.step(WatchBlocks(True), seconds=0.001)
    assert sum(isinstance(event, BlockSnapshot) for event in watched.events()) <= 2


def test_idle_watch_gets_heartbeats_only(watched) -> None:
    watched.watch()
    watched.events()
    for _ in range(100):
        watched.step(seconds=0.01)
    assert 3 <= len(watched.events()) <= 5


def test_client_that_does_not_renew_gets_no_more(watched) -> None:
    watched.watch()
    for _ in range(200):
        watched.step(seconds=0.1)
    assert len(watched.events()) <= WATCH_S / 0.1 + 2
    assert not watched.publisher.is_watched and watched.loop.cache.tree.listener is None
    watched.ask(1, 2)
    watched.watch(snapshot=False)  # a client that was stopped and renews: a new epoch begins
    watched.step()
    assert watched.deliver() == watched.blocks() != set()


def test_renewed_watch_goes_on(watched) -> None:
    for _ in range(10):
        watched.watch(snapshot=False)
        watched.step(seconds=WATCH_S / 2)
    assert watched.publisher.is_watched and watched.deliver() == set() and watched.feeds[b"c"].is_current


def test_watch_ends_with_its_client(watched) -> None:
    watched.watch()
    watched.transport.vanished = [b"c"]
    watched.step()
    assert watched.publisher.next_due() is None and watched.loop.cache.tree.listener is None


def test_number_of_watches_is_limited(watched) -> None:
    for number in range(MAX_WATCHES + 1):
        watched.watch(b"%d" % number)
    assert watched.events(b"0") and not watched.events(b"%d" % MAX_WATCHES)


def test_more_changes_than_are_kept_leave_a_gap(watched, monkeypatch) -> None:
    events = block_publisher.BlockEvents
    monkeypatch.setattr(block_publisher, "BlockEvents", lambda tree: events(tree, max_pending=3))
    watched.watch()
    watched.deliver()
    watched.ask(1, 5)
    watched.step(seconds=HEARTBEAT_S)
    watched.deliver()
    assert not watched.feeds[b"c"].is_current and watched.feeds[b"c"].should_ask(watched.now + 0.1)


def test_idle_loop_wakes_for_its_heartbeat(watched) -> None:
    waits, receive = [], watched.transport.receive
    watched.transport.receive = lambda timeout_s, fds: (waits.append(timeout_s), receive(timeout_s, fds))[1]
    watched.loop.step(timeout_s=None)
    watched.now = 0.0  # of the publisher: the loop's own clock decides how long it waits
    watched.watch()
    watched.loop.step(timeout_s=None)
    assert waits[0] is None and waits[-1] is not None and waits[-1] <= HEARTBEAT_S


def test_unreadable_event_is_dropped_and_the_frame_goes_on() -> None:
    broken = encode(["BlockBatch", 1, "two", [], []])
    frame = build_frame([broken, encode(Tokens(1, [2]))])
    assert decode_server_frame(frame) == [Tokens(1, [2])]
    assert decode_server_frame(build_frame([broken])) == []
