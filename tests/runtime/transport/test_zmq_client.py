"""The ZeroMQ client over real sockets: replies reach their calls, and lost or silent schedulers are reported."""

from __future__ import annotations

import asyncio

import pytest
from echo_scheduler import TOKENIZER, read_text, start_call

from plait.runtime.client.client import Client
from plait.runtime.errors import RUNTIME_EXITED, RuntimeGone
from plait.runtime.messages import (
    Inspect,
)
from plait.runtime.transport.zmq_client import ZmqClientTransport


@pytest.mark.parametrize("uses_loop", [False, True])
def test_every_call_gets_its_own_text(echo, uses_loop):
    client = Client(ZmqClientTransport(echo.directory), TOKENIZER)

    async def main():
        if uses_loop:
            client.attach_to_loop()
        texts = [f"text {i}" for i in range(100)]
        assert await asyncio.gather(*(read_text(client, text) for text in texts)) == texts
        text = await asyncio.to_thread(lambda: start_call(client, "from a thread")[1].result(60).text)
        assert text == "from a thread"
        assert (await client.astatus()).call
        if uses_loop:
            client.detach_from_loop()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert start_call(client, "after the loop")[1].result(60).text == "after the loop"
    client.close()
    echo.stop()
    assert len(echo.disconnected) == 1


@pytest.mark.parametrize("uses_loop", [False, True])
def test_waiting_calls_raise_runtime_gone_when_the_scheduler_exits(echo, uses_loop):
    client = Client(ZmqClientTransport(echo.directory), TOKENIZER)

    async def main():
        if uses_loop:
            client.attach_to_loop()
        assert await read_text(client, "first") == "first"
        echo.is_silent = True
        waiting = [asyncio.create_task(read_text(client, "never")) for _ in range(5)]
        await asyncio.sleep(0)
        await asyncio.to_thread(echo.stop)
        for task in waiting:
            with pytest.raises(RuntimeGone, match=RUNTIME_EXITED):
                await task
        with pytest.raises(RuntimeGone):
            start_call(client, "later")

    asyncio.run(asyncio.wait_for(main(), 60))
    client.close()


@pytest.mark.parametrize("uses_loop", [False, True])
def test_a_silent_scheduler_is_checked_and_then_reported(echo, uses_loop):
    client = Client(ZmqClientTransport(echo.directory), TOKENIZER)
    client.set_liveness_check(0.01, 60.0)

    async def main():
        if uses_loop:
            client.attach_to_loop()
        while sum(isinstance(request, Inspect) for request in echo.requests) < 3:
            await asyncio.sleep(0.01)
        assert await read_text(client, "it answers") == "it answers"
        echo.is_silent = True
        client.set_liveness_check(0.01, 0.3)
        with pytest.raises(RuntimeGone, match=r"has not answered for 0\.3 s"):
            await read_text(client, "never")

    asyncio.run(asyncio.wait_for(main(), 60))
    client.close()
