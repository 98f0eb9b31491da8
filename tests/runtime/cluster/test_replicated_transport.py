"""A client over several replicas: echo schedulers on real sockets, which answer a call with its session's text."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest
from echo_scheduler import TOKENIZER, read_text, running_echo_scheduler, start_call
from waiting import wait_until

from plait.runtime.cluster.replicated_client import ReplicatedClient
from plait.runtime.cluster.replicated_transport import UNANSWERED_S, ReplicatedTransport
from plait.runtime.errors import InputError, RuntimeGone
from plait.runtime.kv_cache.block_events import BLOCK_TOKENS, block_hashes, namespace_hash
from plait.runtime.kv_cache.radix_node import CacheNamespace
from plait.runtime.messages import Abort, Append, BlockBatch, Close, Failed, Fork, Generate, Open, WatchBlocks
from plait.runtime.sampling_params import sampling_params
from plait.runtime.transport.zmq_client import ZmqClientTransport

SAMPLING = sampling_params(max_tokens=8)
TEXT = "x" * (2 * BLOCK_TOKENS + 1)


class Replicas:
    """A client, its transport, and the echo schedulers behind it."""

    def __init__(self, schedulers) -> None:
        self.schedulers = schedulers
        transports = [ZmqClientTransport(scheduler.directory) for scheduler in schedulers]
        self.transport = ReplicatedTransport(transports[0].welcome)
        self.client = ReplicatedClient(self.transport, TOKENIZER, lambda: [])
        for number, transport in enumerate(transports):
            self.transport.connect(number, transport)

    def got(self, number, *kinds):
        """The messages of sessions that a replica got; of these kinds, if any are given."""
        requests = [request for request in self.schedulers[number].requests if hasattr(request, "session")]
        return [request for request in requests if not kinds or isinstance(request, kinds)]

    def replica_of(self, call) -> int:
        """The replica that got a call, which has ended."""
        (number,) = (
            number for number in range(len(self.schedulers)) if call.call_id in map(call_id, self.got(number, Generate))
        )
        return number

    def run(self, text) -> int:
        """Runs a call and returns its replica."""
        session, call = start_call(self.client, text)
        assert call.result(60).text == text
        session.close()
        return self.replica_of(call)


def call_id(request) -> int:
    return request.call


@pytest.fixture
def replicas():
    with contextlib.ExitStack() as stack:
        running = Replicas([stack.enter_context(running_echo_scheduler()) for _ in range(2)])
        stack.callback(running.client.close)
        yield running


def publish(replicas, number, text, sequence) -> None:
    """The replica says that it has the blocks of `text`."""
    tokens = np.array([ord(letter) for letter in text], np.int32)
    blocks = block_hashes(tokens, namespace_hash(CacheNamespace()))
    replicas.transport._receive(replicas.transport._links[number], BlockBatch(1, sequence, list(blocks), []))


@pytest.mark.parametrize("uses_loop", [False, True])
def test_every_call_gets_its_own_text(replicas, uses_loop) -> None:
    async def main() -> None:
        if uses_loop:
            replicas.client.attach_to_loop()
        texts = [f"text {number}" for number in range(100)]
        assert await asyncio.gather(*(read_text(replicas.client, text) for text in texts)) == texts
        if uses_loop:
            replicas.client.detach_from_loop()

    asyncio.run(asyncio.wait_for(main(), 60))
    shares = [len(replicas.got(number, Generate)) for number in (0, 1)]
    assert sum(shares) == 100 and min(shares) > 20
    assert not replicas.transport._routes and [replicas.transport.load(number) for number in (0, 1)] == [0, 0]


def test_equal_prefixes_go_to_the_replica_that_has_them(replicas) -> None:
    for number in (0, 1):
        publish(replicas, number, "ab"[number] * BLOCK_TOKENS * 2, 1)
    for _ in range(5):
        assert replicas.run("b" * BLOCK_TOKENS * 3) == 1
        assert replicas.run("a" * BLOCK_TOKENS * 3) == 0


def test_text_is_sent_once_and_to_one_replica(replicas) -> None:
    session, call = start_call(replicas.client, "one")
    session.append(" two")
    second = session.generate(SAMPLING)
    assert (call.result(60).text, second.result(60).text) == ("one", "one two")
    number = replicas.replica_of(call)
    assert replicas.replica_of(second) == number and not replicas.got(1 - number)
    assert len(replicas.got(number, Open)) == 1 and len(replicas.got(number, Append)) == 2
    session.close()
    assert wait_until(lambda: replicas.got(number, Close))


def test_forks_follow_their_session(replicas) -> None:
    session = replicas.client.open_session()
    session.append(TEXT)
    children = [grandchild for child in session.fork(3) for grandchild in child.fork(2)]
    for child in children:
        child.append("more")
    calls = [child.generate(SAMPLING) for child in children]
    assert [call.result(60).text for call in calls] == ["more"] * 6  # the echo has no forks
    (number,) = {replicas.replica_of(call) for call in calls}
    assert len(replicas.got(number, Fork)) == 4 and not replicas.got(1 - number)
    for opened in (session, *children):
        opened.close()
    assert wait_until(lambda: replicas.transport.load(number) == 0)


def test_load_of_forks_counts_their_prompt_once_and_is_given_back(replicas) -> None:
    replicas.schedulers[0].is_silent = replicas.schedulers[1].is_silent = True
    session = replicas.client.open_session()
    session.append(TEXT)
    children = session.fork(3)
    loads = lambda: sum(replicas.transport.load(number) for number in (0, 1))  # noqa: E731
    assert loads() == len(TEXT)
    for child in children:
        child.generate(SAMPLING)
    assert loads() == len(TEXT) + 3 * 4 * SAMPLING.max_tokens
    for opened in (session, *children):
        opened.abort()
    assert loads() == 3 * 4 * SAMPLING.max_tokens  # until the replica says that the calls have ended
    link = next(link for link in replicas.transport._links.values() if link.calls)
    for call in list(link.calls):
        replicas.transport._receive(link, Failed(call, "aborted", "the session was aborted"))
    assert loads() == 0


def test_session_that_ends_before_its_first_call_reaches_no_replica(replicas) -> None:
    for end in ("close", "abort"):
        session = replicas.client.open_session()
        session.append_tokens([1, 2, 3])
        getattr(session, end)()
    assert not replicas.transport._routes
    replicas.run("later")
    assert sum(len(replicas.got(number, Open, Close, Abort)) for number in (0, 1)) <= 2


@pytest.mark.parametrize("uses_loop", [False, True])
def test_calls_of_a_replica_that_ends_fail_and_the_others_go_on(replicas, uses_loop) -> None:
    async def main() -> None:
        if uses_loop:
            replicas.client.attach_to_loop()
        replicas.schedulers[0].is_silent = replicas.schedulers[1].is_silent = True
        calls = [start_call(replicas.client, f"text {number}")[1] for number in range(8)]
        ended, running = (set(replicas.transport._links[number].calls) for number in (0, 1))
        assert ended and running
        await asyncio.to_thread(replicas.schedulers[0].stop)
        for call in calls:
            if call.call_id in ended:
                with pytest.raises(RuntimeGone):
                    await asyncio.wait_for(call.aresult(), 60)
            else:
                assert not call.done()
        replicas.schedulers[1].is_silent = False
        assert await read_text(replicas.client, "goes on") == "goes on"
        assert not replicas.client.is_closed and replicas.transport.load(0) is None
        if uses_loop:
            replicas.client.detach_from_loop()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_without_replicas_calls_fail_at_once_and_another_replica_ends_that(replicas) -> None:
    session, call = start_call(replicas.client, "first")
    call.result(60)
    for scheduler in replicas.schedulers:
        scheduler.stop()
    assert wait_until(lambda: replicas.client.is_closed)
    for use in (lambda: start_call(replicas.client, "x"), lambda: session.generate(SAMPLING), replicas.client.status):
        with pytest.raises(RuntimeGone):
            use()
    session.close()
    with running_echo_scheduler() as scheduler:
        replicas.transport.connect(1, ZmqClientTransport(scheduler.directory))
        assert not replicas.client.is_closed
        assert start_call(replicas.client, "again")[1].result(60).text == "again"


def test_call_that_is_too_large_leaves_nothing_behind(replicas) -> None:
    session = replicas.client.open_session()
    session.append("x")
    with pytest.raises(InputError, match="above the limit"):
        session.score_tokens([1] * 300_000)
    session.close()
    assert not replicas.transport._routes and [replicas.transport.load(number) for number in (0, 1)] == [0, 0]


def test_replica_that_does_not_answer_gets_no_new_sessions_while_another_does(replicas, monkeypatch) -> None:
    silence = {0: UNANSWERED_S, 1: 0.0}
    for number, link in replicas.transport._links.items():
        monkeypatch.setattr(type(link.transport), "unanswered_s", property(lambda self: silence[self.number]))
        link.transport.number = number
    assert {replicas.run(f"text {number}") for number in range(6)} == {1}
    silence[1] = UNANSWERED_S
    assert {replicas.run(f"text {number}") for number in range(10)} == {0, 1}
    silence[0] = silence[1] = 0.0
    assert {replicas.run(f"text {number}") for number in range(4)} == {0, 1}


def test_calls_are_moved_from_a_replica_that_does_not_answer_if_another_does(replicas, monkeypatch) -> None:
    silence = {0: UNANSWERED_S, 1: UNANSWERED_S}
    for number, link in replicas.transport._links.items():
        monkeypatch.setattr(type(link.transport), "unanswered_s", property(lambda self: silence[self.number]))
        link.transport.number = number
        replicas.schedulers[number].is_silent = True
    calls = [start_call(replicas.client, f"text {number}")[1].call_id for number in range(4)]
    assert replicas.transport.calls_to_move(0) == replicas.transport.calls_to_move(1) == set()
    silence[1] = 0.0
    moved = replicas.transport.calls_to_move(0)
    assert len(moved) == 2 and moved < set(calls) and replicas.transport.calls_to_move(1) == set()
    silence[0] = 0.0
    assert replicas.transport.calls_to_move(0) == set()


def test_events_are_asked_for_and_the_watch_is_renewed(replicas, monkeypatch) -> None:
    assert wait_until(lambda: all(WatchBlocks(True) in scheduler.requests for scheduler in replicas.schedulers))
    publish(replicas, 0, "", 1)
    assert WatchBlocks(False) not in replicas.schedulers[0].requests
    replicas.transport._links[0].next_renewal = 0.0
    publish(replicas, 0, "", 2)
    assert wait_until(lambda: WatchBlocks(False) in replicas.schedulers[0].requests)


def test_client_that_was_closed_sends_nothing(replicas) -> None:
    replicas.client.close()
    with pytest.raises(RuntimeGone):
        start_call(replicas.client, "x")
