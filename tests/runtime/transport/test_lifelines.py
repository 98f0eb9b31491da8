"""The lifeline socket: connections that send no id, a wrong one or anything else, and too many of them."""

from __future__ import annotations

import os
import resource
import socket
import time

import pytest
from echo_scheduler import TOKENIZER, start_call

from plait.runtime.client.client import Client
from plait.runtime.transport.zmq_client import ZmqClientTransport
from plait.runtime.transport.zmq_server import LIFELINE_SOCKET, MAX_UNIDENTIFIED


def connect(echo) -> socket.socket:
    lifeline = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    lifeline.settimeout(60)
    lifeline.connect(str(echo.directory / LIFELINE_SOCKET))
    return lifeline


def assert_works(echo) -> None:
    client = Client(ZmqClientTransport(echo.directory), TOKENIZER)
    assert start_call(client, "abc")[1].result(60).text == "abc"
    client.close()


@pytest.mark.parametrize("sent", [b"x", b"", b"y" * 15])
def test_an_incomplete_id_closes_the_connection(echo, sent):
    with connect(echo) as lifeline:
        lifeline.sendall(sent)
        lifeline.shutdown(socket.SHUT_WR)
        assert lifeline.recv(1) == b""
    assert_works(echo)


def test_data_after_the_id_is_dropped(echo):
    with connect(echo) as lifeline:
        lifeline.sendall(os.urandom(16))
        assert lifeline.recv(1) == b"+"
        lifeline.sendall(b"z" * 500_000)
        assert_works(echo)


def test_connections_without_an_id_are_limited(echo):
    silent = [connect(echo) for _ in range(MAX_UNIDENTIFIED + 5)]
    assert_works(echo)
    assert silent[0].recv(1) == b""  # the oldest is closed
    silent[-1].sendall(os.urandom(16))
    assert silent[-1].recv(1) == b"+"
    for lifeline in silent:
        lifeline.close()


def test_no_file_descriptor_left(echo, monkeypatch):
    """The listener is not polled meanwhile: it would be readable, and the loop would not rest."""
    client = Client(ZmqClientTransport(echo.directory), TOKENIZER)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    waiting.settimeout(60)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # of this process, in which the scheduler runs
    try:
        waiting.connect(str(echo.directory / LIFELINE_SOCKET))
        deadline = time.monotonic() + 60
        while echo.server._is_accepting and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not echo.server._is_accepting
        before = time.process_time()
        time.sleep(0.2)
        assert time.process_time() - before < 0.15
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    waiting.sendall(os.urandom(16))
    client.close()  # ends a lifeline, so the listener is polled again
    assert waiting.recv(1) == b"+"
    waiting.close()
    assert_works(echo)
