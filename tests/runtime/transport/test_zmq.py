"""The channel and the link over real sockets, with a scheduler that only echoes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from plait.constrained import Vocabulary
from plait.runtime.client.client import Client
from plait.runtime.errors import RUNTIME_EXITED, CallRejected, RuntimeGone
from plait.runtime.messages import (
    MAX_APPEND_TOKENS,
    PROTOCOL,
    Abort,
    Append,
    Close,
    Embed,
    Failed,
    Finished,
    Generate,
    Hello,
    Inspect,
    Open,
    Select,
    Status,
    Tokens,
    Usage,
    Welcome,
    build_frame,
    decode_server_messages,
    encode,
)
from plait.runtime.sampling_params import sampling_params
from plait.runtime.transport import zmq_client
from plait.runtime.transport import zmq_server as link_module
from plait.runtime.transport.zmq_client import ZmqClientTransport, ZmqConnection
from plait.runtime.transport.zmq_server import ZmqServerTransport

CONTEXT = 100_000
WORDS = Vocabulary(tuple(bytes([i]) for i in range(128)), (0,), lambda text: list(text.encode()))
TOKENIZER = SimpleNamespace(
    encode=lambda parts, at_start: [ord(c) for text, _ in parts for c in text], add_bos=False, bos_id=None,
    vocabulary=WORDS,
)  # fmt: skip


class Echo:
    """Answers each Generate with its session's text; a `Hello` and questions as a scheduler does."""

    def __init__(self, directory: Path) -> None:
        self.out, self.owner = os.pipe()
        self.server = ZmqServerTransport(directory, owner_fd=self.out)
        self.texts, self.gone, self.requests, self.is_deaf = {}, [], [], False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        while not self.server.should_stop:
            for client, request in self.server.receive(None, []):
                self.requests.append(request)
                if not self.is_deaf:
                    self.answer(client, request)
            self.gone += self.server.take_disconnected()
        self.server.close()

    def answer(self, client, request) -> None:
        if isinstance(request, Hello):
            self.server.send(client, Welcome(PROTOCOL, "", 128, CONTEXT, os.getpid()))
        elif isinstance(request, Append):
            self.texts.setdefault((client, request.session), []).extend(request.token_ids)
        elif isinstance(request, Generate):
            for token in self.texts[client, request.session]:
                self.server.send(client, Tokens(request.call, [token]))
            self.server.send(client, Finished(request.call, "stop", Usage()))
        elif isinstance(request, Inspect):
            self.server.send(client, Status(request.call, *[0] * 12))

    def end(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.owner)
        self.thread.join(60)
        os.close(self.out)


@pytest.fixture
def echo():
    with tempfile.TemporaryDirectory(prefix="plait-") as directory:
        made = Echo(Path(directory))
        made.directory = directory
        yield made
        if made.thread.is_alive():
            made.end()


def ask(client, text):
    session = client.open_session()
    session.append(text)
    return session, session.generate(sampling_params(max_tokens=8))


async def read(client, text):
    session, call = ask(client, text)
    pieces = [piece async for piece in call.aiter_text()]
    session.close()
    return "".join(pieces)


@pytest.mark.parametrize("uses_loop", [False, True])
def test_each_gets_its_own_whoever_reads(echo, uses_loop):
    client = Client(ZmqClientTransport(echo.directory), TOKENIZER)

    async def main():
        if uses_loop:
            client.attach_to_loop()
        texts = [f"text {i}" for i in range(100)]
        assert await asyncio.gather(*(read(client, text) for text in texts)) == texts
        told = await asyncio.to_thread(lambda: ask(client, "from a thread")[1].result(60).text)
        assert told == "from a thread"
        assert (await client.astatus()).call
        if uses_loop:
            client.detach_from_loop()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert ask(client, "after the loop")[1].result(60).text == "after the loop"
    client.close()
    echo.end()
    assert len(echo.gone) == 1


def test_who_reads_may_change_at_any_time_and_nothing_is_lost(echo, monkeypatch):
    monkeypatch.setattr(zmq_client, "SILENCE_CHECK_S", 3600)  # no look that nobody asked for
    client, random_ = Client(ZmqClientTransport(echo.directory), TOKENIZER), random.Random(5)
    found, texts = {}, [f"call {i}" for i in range(300)]

    def from_thread(mine):
        for text in mine:
            found[text] = ask(client, text)[1].result(60).text

    async def main():
        threads = [threading.Thread(target=from_thread, args=(texts[at:200:4],)) for at in range(4)]
        for thread in threads:
            thread.start()
        for text in texts[200:]:
            await asyncio.sleep(random_.choice([0, 0.001]))
            random_.choice([client.attach_to_loop, client.detach_from_loop, lambda: None])()
            found[text] = await read(client, text)
        while any(thread.is_alive() for thread in threads):
            await asyncio.sleep(0.001)
        client.detach_from_loop()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert found == {text: text for text in texts}
    client.close()


def test_an_answer_that_comes_while_the_loop_sends_is_not_overlooked(echo, monkeypatch):
    monkeypatch.setattr(zmq_client, "SILENCE_CHECK_S", 3600)
    client = Client(ZmqClientTransport(echo.directory), TOKENIZER)

    async def main():
        client.attach_to_loop()
        for number in range(5):
            reading = asyncio.create_task(read(client, f"text {number}"))
            await asyncio.sleep(0)
            while (
                not client._transport._connection.has_pending_input
            ):  # looking takes the socket's notice away, as sending does
                time.sleep(0.001)
            client.send(Abort(1))
            assert await reading == f"text {number}"
        client.detach_from_loop()

    asyncio.run(asyncio.wait_for(main(), 60))
    client.close()


def test_goodbyes_go_without_anything_after_them(echo, monkeypatch):
    monkeypatch.setattr(zmq_client, "SILENCE_CHECK_S", 3600)
    client = Client(ZmqClientTransport(echo.directory), TOKENIZER)

    async def main():
        client.attach_to_loop()
        await read(client, "text")
        while not any(isinstance(request, Close) for request in echo.requests):
            await asyncio.sleep(0.01)
        client.detach_from_loop()

    asyncio.run(asyncio.wait_for(main(), 60))
    client.close()


def test_text_that_cannot_fit_is_not_sent_to_its_end(echo):
    client = Client(ZmqClientTransport(echo.directory), TOKENIZER)
    session = client.open_session()
    session.append_tokens([65] * 300_000)
    session.append("and more")
    session.generate(sampling_params()).result(60)
    sent = sum(len(request.token_ids) for request in echo.requests if isinstance(request, Append))
    assert CONTEXT < sent <= CONTEXT + MAX_APPEND_TOKENS
    child = session.fork(1)[0]
    child.append("still more")
    child._flush(None)
    client.send(Inspect(10**6))
    while not isinstance(echo.requests[-1], Inspect):
        time.sleep(0.001)
    assert sent == sum(len(request.token_ids) for request in echo.requests if isinstance(request, Append))
    client.close()


@pytest.mark.parametrize("uses_loop", [False, True])
def test_the_scheduler_ends_and_who_waits_is_told(echo, uses_loop):
    client = Client(ZmqClientTransport(echo.directory), TOKENIZER)

    async def main():
        if uses_loop:
            client.attach_to_loop()
        assert await read(client, "first") == "first"
        echo.is_deaf = True
        waiting = [asyncio.create_task(read(client, "never")) for _ in range(5)]
        await asyncio.sleep(0)
        await asyncio.to_thread(echo.end)
        for task in waiting:
            with pytest.raises(RuntimeGone, match=RUNTIME_EXITED):
                await task
        with pytest.raises(RuntimeGone):
            ask(client, "later")

    asyncio.run(asyncio.wait_for(main(), 60))
    client.close()


@pytest.mark.parametrize("closes_in_thread", [False, True])
def test_closing_in_a_loop_fails_what_waits(echo, closes_in_thread):
    client = Client(ZmqClientTransport(echo.directory), TOKENIZER)

    async def main():
        client.attach_to_loop()
        echo.is_deaf = True
        waiting = asyncio.create_task(read(client, "never"))
        await asyncio.sleep(0)
        await asyncio.to_thread(client.close) if closes_in_thread else client.close()
        with pytest.raises(RuntimeGone, match="closed"):
            await waiting
        client.close()

    asyncio.run(asyncio.wait_for(main(), 60))
    echo.end()
    assert len(echo.gone) == 1


def test_a_client_that_left_its_loop_may_join_another(echo):
    """Left or not: a loop that was closed under it is no reason to fail either."""
    client = Client(ZmqClientTransport(echo.directory), TOKENIZER)

    async def main(text, *, leaves):
        client.attach_to_loop()
        assert await read(client, text) == text
        if leaves:
            client.detach_from_loop()

    for number, leaves in enumerate([True, True, False, True]):
        asyncio.run(asyncio.wait_for(main(f"loop {number}", leaves=leaves), 60))
        if leaves:
            assert ask(client, "between")[1].result(60).text == "between"
    client.close()
    assert client._transport._connection.socket.closed


def test_closing_from_a_thread_returns_once_the_sockets_are_closed(echo, monkeypatch):
    transport = ZmqClientTransport(echo.directory)
    client = Client(transport, TOKENIZER)
    close, about_to = transport._connection.close, threading.Event()

    def slowly():
        about_to.set()
        time.sleep(0.3)
        close()

    def close_in_thread():
        client.close()
        return transport._connection.socket.closed

    monkeypatch.setattr(transport._connection, "close", slowly)

    async def main():
        client.attach_to_loop()
        assert await asyncio.to_thread(close_in_thread)

    asyncio.run(asyncio.wait_for(main(), 60))
    assert about_to.is_set()


def test_closing_while_the_loop_is_closed_closes_the_sockets(echo):
    """The loop takes the wish to stop, and is closed before it is carried out."""
    transport = ZmqClientTransport(echo.directory)
    client, loop = Client(transport, TOKENIZER), asyncio.new_event_loop()

    async def join():
        client.attach_to_loop()

    loop.run_until_complete(join())
    closing = threading.Thread(target=client.close)
    closing.start()
    while not loop._ready:  # the wish came, and nobody runs it
        time.sleep(0.001)
    loop.close()
    closing.join(20)
    assert not closing.is_alive() and transport._connection.socket.closed


@pytest.mark.parametrize("uses_loop", [False, True])
def test_silence_is_asked_about_and_then_given_up(echo, uses_loop, monkeypatch):
    monkeypatch.setattr(zmq_client, "SILENCE_CHECK_S", 0.01)
    monkeypatch.setattr(zmq_client, "UNRESPONSIVE_AFTER_S", 1.0)
    client = Client(ZmqClientTransport(echo.directory), TOKENIZER)

    async def main():
        if uses_loop:
            client.attach_to_loop()
        while sum(isinstance(request, Inspect) for request in echo.requests) < 3:
            await asyncio.sleep(0.01)
        assert await read(client, "it answers") == "it answers"
        echo.is_deaf = True
        with pytest.raises(RuntimeGone, match="has not answered"):
            await read(client, "never")

    asyncio.run(asyncio.wait_for(main(), 60))
    client.close()


@pytest.mark.parametrize(
    "wrong", [lambda at, call: Select(at, call, [[1]], "nope"), lambda at, call: Embed(at, call, "many")]
)
def test_a_bad_request_leaves_its_frame_alone(echo, wrong):
    client = Client(ZmqClientTransport(echo.directory), TOKENIZER)
    session = client.open_session()
    session.append("good")
    session._flush("gen")  # the text is in the frame of the bad request
    bad = client.start_call(session.session_id, lambda call: wrong(session.session_id, call), None)
    with pytest.raises(CallRejected, match="refused"):
        bad.result(60)
    assert session.generate(sampling_params()).result(60).text == "good"
    assert echo.server.num_bad_frames == 1
    client.close()


def test_a_frame_too_large_is_answered_and_its_client_goes_on(echo):
    connection = ZmqConnection(Path(echo.directory))
    connection.handshake(lambda: RUNTIME_EXITED)
    far_too_many = encode(Append(1, [7] * 3_000_000))
    for message in (far_too_many, encode(Select(1, 42, [[5] * 400_000])), b"\xff" * 200_000):
        connection.socket.send(build_frame([message]))
    requests = [Open(1), Append(1, [65, 66]), Generate(1, 43, sampling_params())]
    connection.socket.send(build_frame([encode(request) for request in requests]))
    replies = []
    while not (replies and isinstance(replies[-1], Finished)):
        assert connection.socket.poll(60_000)
        replies += decode_server_messages(connection.socket.recv())
    assert isinstance(replies[0], Failed) and (replies[0].call, replies[0].kind) == (42, "invalid")
    assert "above the limit" in replies[0].text
    assert replies[1:] == [Tokens(43, [65]), Tokens(43, [66]), Finished(43, "stop", Usage())]
    assert echo.server.num_bad_frames == 3
    connection.close()


def test_a_flood_is_taken_in_parts(echo, monkeypatch):
    monkeypatch.setattr(link_module, "MAX_MESSAGES_PER_RECEIVE", 300)
    sizes, receive = [], echo.server.receive
    monkeypatch.setattr(echo.server, "receive", lambda *given: [sizes.append(len(got := receive(*given))), got][1])
    client = Client(ZmqClientTransport(echo.directory), TOKENIZER)
    calls = [ask(client, "abc")[1] for _ in range(2000)]
    assert {call.result(60).text for call in calls} == {"abc"}
    assert max(sizes) <= 300 + 256
    client.close()


def test_what_is_queued_between_two_readers_is_sent(echo, monkeypatch):
    monkeypatch.setattr(zmq_client, "SILENCE_CHECK_S", 3600)
    transport = ZmqClientTransport(echo.directory)
    client = Client(transport, TOKENIZER)

    async def main():
        for number, change in enumerate((client.attach_to_loop, client.detach_from_loop), start=500):
            stop = transport._driver.stop

            def stop_and_queue(*, final, stop=stop, number=number):
                stop(final=final)
                transport._queue.append(encode(Inspect(number)))

            monkeypatch.setattr(transport._driver, "stop", stop_and_queue)
            change()
            while Inspect(number) not in echo.requests:
                await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(main(), 60))
    client.close()


def test_only_text_gets_a_bos(echo):
    wants_bos = SimpleNamespace(**{**vars(TOKENIZER), "add_bos": True, "bos_id": 2})
    client = Client(ZmqClientTransport(echo.directory), wants_bos)
    session = client.open_session()
    session.append_tokens([65, 66])
    session.append("C")
    assert session.generate(sampling_params()).result(60).text == "ABC"
    assert ask(client, "ab")[1].result(60).token_ids == [2, *b"ab"]
    client.close()


def test_what_a_lifeline_brings_up_ends_the_channel(echo, monkeypatch):
    async def main():
        transport = ZmqClientTransport(echo.directory)
        gone = []
        transport.start(lambda reply: None, gone.append)
        transport.attach_to_loop()
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        monkeypatch.setattr(transport, "check_lifeline", broken)  # as where what came last is no frame
        echo.end()
        while not gone:
            await asyncio.sleep(0.001)
        return gone

    assert "the connection to the runtime broke" in asyncio.run(asyncio.wait_for(main(), 60))[0]


def broken():
    raise ValueError("no frame")
