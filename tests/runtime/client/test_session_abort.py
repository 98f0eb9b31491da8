"""`Session.abort` after `close`: it ends the calls that still run, and sends nothing when there are none."""

from __future__ import annotations

import time

from echo_scheduler import TOKENIZER, start_call

from plait.runtime.client.client import Client
from plait.runtime.messages import Abort, Generate, Inspect
from plait.runtime.sampling_params import sampling_params
from plait.runtime.transport.zmq_client import ZmqClientTransport


def aborts(echo, client):
    """The sessions that the client aborted so far."""
    number = client.next_id()
    client.send(Inspect(number))
    while Inspect(number) not in echo.requests:
        time.sleep(0.001)
    return [request.session for request in echo.requests if isinstance(request, Abort) and request.call is None]


def test_a_closed_session_is_aborted_while_its_calls_run(echo):
    client = Client(ZmqClientTransport(echo.directory), TOKENIZER)
    echo.is_silent = True
    session, first = start_call(client, "text")
    last = session.generate(sampling_params(max_tokens=8))
    session.close()
    session.abort()
    assert aborts(echo, client) == [session.session_id]
    session.abort()
    session.close()
    assert aborts(echo, client) == [session.session_id]
    assert not first.done() and not last.done()  # the scheduler answers them
    client.close()


def test_a_call_in_the_middle_keeps_a_closed_session_abortable(echo):
    client = Client(ZmqClientTransport(echo.directory), TOKENIZER)
    session, call = start_call(client, "text")
    call.result(60)
    echo.is_silent = True
    running = session.generate(sampling_params(max_tokens=8))
    expired = session.generate(sampling_params(max_tokens=8))
    expired.expire()
    session.close()
    assert expired.done() and not running.done()
    session.abort()
    assert aborts(echo, client) == [session.session_id]
    client.close()


def test_nothing_is_sent_for_a_closed_session_whose_calls_have_ended(echo):
    client = Client(ZmqClientTransport(echo.directory), TOKENIZER)
    session, call = start_call(client, "text")
    call.result(60)
    session.close()
    session.abort()
    assert aborts(echo, client) == []
    assert sum(isinstance(request, Generate) for request in echo.requests) == 1
    client.close()
