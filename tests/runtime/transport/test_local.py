"""The in-process transport with several threads and with asyncio, over the engine loop and the chain model."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest
from fake_engine import VOCAB, ChainRunner, ReadyCompiler, greedy, vocabulary

from plait.runtime.client.client import Client
from plait.runtime.config import engine_config
from plait.runtime.errors import RuntimeGone
from plait.runtime.messages import PROTOCOL, Welcome
from plait.runtime.sampling.sampler import Sampler
from plait.runtime.sampling_params import sampling_params
from plait.runtime.scheduler.engine_loop import EngineLoop
from plait.runtime.transport.local import LocalClientTransport, LocalServerTransport


@pytest.fixture
def client():
    transport, chain_vocabulary = LocalServerTransport(), vocabulary()
    welcome = Welcome(PROTOCOL, "", VOCAB, 2000, 0)
    config = engine_config(check_integrity=True)
    runner = ChainRunner(2000, 64)
    engine_loop = EngineLoop(config, welcome, runner, Sampler(), chain_vocabulary, ReadyCompiler(), transport)
    tokenizer = SimpleNamespace(
        encode=lambda parts, at_start: [t for text, _ in parts for t in chain_vocabulary.encode(text)],
        encode_plain=chain_vocabulary.encode, add_bos=False, bos_id=None, vocabulary=chain_vocabulary,
    )  # fmt: skip
    client = Client(LocalClientTransport(welcome, transport, engine_loop.step), tokenizer)
    client.engine_loop, client.runner = engine_loop, runner
    yield client
    client.close()
    transport.close()


def start_call(client, text, max_tokens=20):
    session = client.open_session()
    session.append(text)
    return session.generate(sampling_params(max_tokens=max_tokens, temperature=0.0))


def test_calls_from_many_threads_get_their_own_tokens(client):
    texts, results = [f"text {i}" for i in range(24)], {}

    def run(text):
        results[text] = start_call(client, text).result(60).token_ids

    threads = [threading.Thread(target=run, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {text: greedy(client.tokenizer.encode_plain(text), 20) for text in texts}


def test_calls_from_asyncio(client):
    async def main():
        calls = [start_call(client, f"task {i}") for i in range(20)]

        async def read(call):
            return "".join([piece async for piece in call.aiter_text()])

        return await asyncio.wait_for(asyncio.gather(*map(read, calls)), 60), calls

    texts, calls = asyncio.run(main())
    assert texts == [call.result().text for call in calls]


def test_closing_fails_waiting_calls(client):
    call = start_call(client, "waiting", 1500)
    client.close()
    with pytest.raises(RuntimeGone):
        call.result(60)
    with pytest.raises(RuntimeGone):
        client.open_session()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_in_a_step_fails_waiting_calls(client):
    def raise_error():
        raise MemoryError("out of everything")

    client._transport._step = raise_error
    with pytest.raises(RuntimeGone, match="out of everything"):
        start_call(client, "waiting").result(60)
