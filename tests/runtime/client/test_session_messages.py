"""The messages that a session sends for its text: BOS tokens, and text that exceeds the context."""

from __future__ import annotations

import time
from types import SimpleNamespace

from echo_scheduler import CONTEXT, TOKENIZER, start_call

from plait.runtime.client.client import Client
from plait.runtime.messages import (
    MAX_APPEND_TOKENS,
    Append,
    Inspect,
)
from plait.runtime.sampling_params import sampling_params
from plait.runtime.transport.zmq_client import ZmqClientTransport


def test_text_that_exceeds_the_context_is_not_sent_completely(echo):
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


def test_text_gets_a_bos_token_and_token_ids_do_not(echo):
    tokenizer_with_bos = SimpleNamespace(**{**vars(TOKENIZER), "add_bos": True, "bos_id": 2})
    client = Client(ZmqClientTransport(echo.directory), tokenizer_with_bos)
    session = client.open_session()
    session.append_tokens([65, 66])
    session.append("C")
    assert session.generate(sampling_params()).result(60).text == "ABC"
    assert start_call(client, "ab")[1].result(60).token_ids == [2, *b"ab"]
    client.close()
