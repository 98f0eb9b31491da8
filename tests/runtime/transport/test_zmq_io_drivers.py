"""The ZeroMQ client in an event loop: changing the I/O driver and closing lose no message."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest
from echo_scheduler import TOKENIZER, read_text, start_call

from plait.runtime.client.client import Client
from plait.runtime.errors import RuntimeGone
from plait.runtime.messages import Abort, Close, Inspect
from plait.runtime.transport import zmq_client
from plait.runtime.transport.frames import encode
from plait.runtime.transport.zmq_client import ZmqClientTransport


def test_changing_the_driver_at_any_time_loses_nothing(echo, monkeypatch):
    monkeypatch.setattr(zmq_client, "LIVENESS_INTERVAL_S", 3600)  # no liveness checks
    client, random_ = Client(ZmqClientTransport(echo.directory), TOKENIZER), random.Random(5)
    results, texts = {}, [f"call {i}" for i in range(300)]

    def run_calls(own_texts):
        for text in own_texts:
            results[text] = start_call(client, text)[1].result(60).text

    async def main():
        threads = [threading.Thread(target=run_calls, args=(texts[at:200:4],)) for at in range(4)]
        for thread in threads:
            thread.start()
        for text in texts[200:]:
            await asyncio.sleep(random_.choice([0, 0.001]))
            random_.choice([client.attach_to_loop, client.detach_from_loop, lambda: None])()
            results[text] = await read_text(client, text)
        while any(thread.is_alive() for thread in threads):
            await asyncio.sleep(0.001)
        client.detach_from_loop()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert results == {text: text for text in texts}
    client.close()


def test_a_reply_that_arrives_while_the_loop_sends_is_delivered(echo, monkeypatch):
    monkeypatch.setattr(zmq_client, "LIVENESS_INTERVAL_S", 3600)
    client = Client(ZmqClientTransport(echo.directory), TOKENIZER)

    async def main():
        client.attach_to_loop()
        for number in range(5):
            reading = asyncio.create_task(read_text(client, f"text {number}"))
            await asyncio.sleep(0)
            # Like sending, this check consumes the notification of the socket's descriptor.
            while not client._transport._connection.has_pending_input:
                time.sleep(0.001)
            client.send(Abort(1))
            assert await reading == f"text {number}"
        client.detach_from_loop()

    asyncio.run(asyncio.wait_for(main(), 60))
    client.close()


def test_a_close_is_sent_without_a_later_message(echo, monkeypatch):
    monkeypatch.setattr(zmq_client, "LIVENESS_INTERVAL_S", 3600)
    client = Client(ZmqClientTransport(echo.directory), TOKENIZER)

    async def main():
        client.attach_to_loop()
        await read_text(client, "text")
        while not any(isinstance(request, Close) for request in echo.requests):
            await asyncio.sleep(0.01)
        client.detach_from_loop()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert any(isinstance(request, Close) for request in echo.requests)
    client.close()


@pytest.mark.parametrize("closes_in_thread", [False, True])
def test_closing_in_a_loop_fails_waiting_calls(echo, closes_in_thread):
    client = Client(ZmqClientTransport(echo.directory), TOKENIZER)

    async def main():
        client.attach_to_loop()
        echo.is_silent = True
        waiting = asyncio.create_task(read_text(client, "never"))
        await asyncio.sleep(0)
        await asyncio.to_thread(client.close) if closes_in_thread else client.close()
        with pytest.raises(RuntimeGone, match="closed"):
            await waiting
        client.close()

    asyncio.run(asyncio.wait_for(main(), 60))
    echo.stop()
    assert len(echo.disconnected) == 1


def test_a_client_can_attach_to_another_loop(echo):
    """Also if its previous loop was closed without `detach_from_loop`."""
    client = Client(ZmqClientTransport(echo.directory), TOKENIZER)

    async def main(text, *, detaches):
        client.attach_to_loop()
        assert await read_text(client, text) == text
        if detaches:
            client.detach_from_loop()

    for number, detaches in enumerate([True, True, False, True]):
        asyncio.run(asyncio.wait_for(main(f"loop {number}", detaches=detaches), 60))
        if detaches:
            assert start_call(client, "between")[1].result(60).text == "between"
    client.close()
    assert client._transport._connection.socket.closed


def test_closing_from_a_thread_waits_until_the_sockets_are_closed(echo, monkeypatch):
    transport = ZmqClientTransport(echo.directory)
    client = Client(transport, TOKENIZER)
    close, close_started = transport._connection.close, threading.Event()

    def close_slowly():
        close_started.set()
        time.sleep(0.3)
        close()

    def close_in_thread():
        client.close()
        return transport._connection.socket.closed

    monkeypatch.setattr(transport._connection, "close", close_slowly)

    async def main():
        client.attach_to_loop()
        assert await asyncio.to_thread(close_in_thread)

    asyncio.run(asyncio.wait_for(main(), 60))
    assert close_started.is_set()


def test_closing_while_the_loop_is_closed_closes_the_sockets(echo):
    """The loop receives the stop request and is closed before it runs it."""
    transport = ZmqClientTransport(echo.directory)
    client, loop = Client(transport, TOKENIZER), asyncio.new_event_loop()

    async def attach():
        client.attach_to_loop()

    loop.run_until_complete(attach())
    closing = threading.Thread(target=client.close)
    closing.start()
    while not loop._ready:  # the stop request has been queued
        time.sleep(0.001)
    loop.close()
    closing.join(60)
    assert not closing.is_alive() and transport._connection.socket.closed


def test_messages_queued_between_two_drivers_are_sent(echo, monkeypatch):
    monkeypatch.setattr(zmq_client, "LIVENESS_INTERVAL_S", 3600)
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
    assert Inspect(500) in echo.requests and Inspect(501) in echo.requests
    client.close()


def test_an_error_in_the_lifeline_check_disconnects(echo, monkeypatch):
    async def main():
        transport = ZmqClientTransport(echo.directory)
        reasons = []
        transport.start(lambda reply: None, reasons.append)
        transport.attach_to_loop()
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        monkeypatch.setattr(transport, "check_lifeline", raise_error)  # like an invalid last frame
        echo.stop()
        while not reasons:
            await asyncio.sleep(0.001)
        return reasons

    assert "the connection to the runtime failed" in asyncio.run(asyncio.wait_for(main(), 60))[0]


def raise_error():
    raise ValueError("no frame")
