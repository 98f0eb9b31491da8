"""Clients that send their body late, leave in it, send more than is read, or do not read their response."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading

import pytest
from asgi_server import serve_app
from stalled_stream import stop_after
from waiting import wait_until

from plait.runtime.client import stream
from plait.runtime.server.generation import submission
from plait.runtime.server.http import connection_limits
from plait.runtime.server.http.connection_limits import make_http_protocol
from plait.runtime.server.listener import SEND_BUFFER_BYTES, bind_listener

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
GIANT = 13 << 20


def connect(address):
    host, port = address.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.settimeout(60)
    return connection


def read_all(connection) -> bytes:
    """Everything until the server ends its side; a reset fails the test."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def test_a_late_body_gets_408_and_its_connection_is_closed(serve, monkeypatch) -> None:
    monkeypatch.setattr(connection_limits, "DISCARD_TIMEOUT_S", 0.3)
    address, state = serve(body_timeout_s=0.3)
    with connect(address) as connection:
        connection.sendall(HEAD + b"content-length: 100\r\n\r\n{")
        answer = read_all(connection).lower()
        assert answer.startswith(b"http/1.1 408 ") and b"connection: close\r\n" in answer
        assert b'"code":"body_timeout"' in answer
        connection.settimeout(0.1)
        assert wait_until(lambda: is_reset(connection))  # nothing is held for a client that keeps its side open
    assert not state.in_flight.records


def is_reset(connection, data=b"x") -> bool:
    try:
        connection.sendall(data)
    except OSError:
        return True
    return False


@pytest.mark.parametrize("is_chunked", [False, True])
def test_the_413_of_a_giant_body_reaches_its_client(serve, monkeypatch, is_chunked) -> None:
    """The client reads nothing before it has sent everything."""
    for limit in ("DISCARD_TIMEOUT_S", "DISCARD_IDLE_TIMEOUT_S"):  # a busy machine sends late
        monkeypatch.setattr(connection_limits, limit, 60.0)
    address, _ = serve()
    for _ in range(5):
        with connect(address) as connection:
            if is_chunked:
                connection.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n")
                for _ in range(GIANT >> 20):
                    connection.sendall(b"100000\r\n" + b"x" * (1 << 20) + b"\r\n")
                connection.sendall(b"0\r\n\r\n")
            else:
                connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % GIANT + b"x" * GIANT)
            answer = read_all(connection).lower()
        assert answer.startswith(b"http/1.1 413 ") and b"connection: close\r\n" in answer
        assert b'"code":"body_too_large"' in answer


def test_input_after_a_refusal_is_read_up_to_a_limit(serve, monkeypatch) -> None:
    monkeypatch.setattr(connection_limits, "MAX_DISCARDED_BYTES", 1 << 20)
    address, _ = serve(max_body_bytes=1024)
    with connect(address) as connection:
        connection.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        chunk = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
        assert wait_until(lambda: is_reset(connection, chunk))


@pytest.mark.parametrize("limit", ["DISCARD_TIMEOUT_S", "MAX_DISCARDED_BYTES"])
def test_the_rest_of_a_body_that_no_route_reads_is_limited(serve, monkeypatch, limit) -> None:
    limits = {"DISCARD_TIMEOUT_S": 600.0} | {limit: 0.3 if limit == "DISCARD_TIMEOUT_S" else 1 << 16}
    for name, value in limits.items():
        monkeypatch.setattr(connection_limits, name, value)
    monkeypatch.setattr(connection_limits, "DISCARD_IDLE_TIMEOUT_S", 0.1)
    address, _ = serve()
    with connect(address) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 8000000\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        with contextlib.suppress(ConnectionError):  # the server ends the connection, at the latest when all was sent
            if limit == "MAX_DISCARDED_BYTES":
                connection.sendall(b"x" * (1 << 17))
            while connection.recv(65536):
                pass


def test_a_connection_goes_on_after_a_body_that_no_route_read(serve) -> None:
    address, _ = serve()
    with connect(address) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n\r\n12")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"345GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_clients_that_leave_within_their_body_are_no_error(serve, caplog) -> None:
    address, state = serve()
    caplog.set_level(logging.INFO)
    for _ in range(20):
        with connect(address) as connection:
            connection.sendall(HEAD + b"content-length: 100\r\n\r\n{")
            assert wait_until(lambda: state.in_flight.num_admitted)
        assert wait_until(lambda: not state.in_flight.records)

    def logged():
        return [record for record in list(caplog.records) if record.name == "plait.requests"]

    assert wait_until(lambda: len(logged()) >= 20)
    assert len(logged()) == 20 and {line.fields["status"] for line in logged()} == {499}
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


def test_writes_after_a_disconnect_are_dropped() -> None:
    ended = threading.Event()

    async def answer_late(scope, receive, send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(20):
            await asyncio.sleep(0.02)
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        ended.set()

    with serve_app(answer_late, make_http_protocol(60, 60)) as address:
        with connect(address) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert ended.wait(60)


STREAM = {
    "model": "default",
    "prompt": "One, two,",
    "max_tokens": 2000,
    "ignore_eos": True,
    "stream": True,
    "logprobs": 20,
}


def test_an_unread_stream_is_aborted_and_holds_little(serve, engine, idle, monkeypatch) -> None:
    """What waits for the client is bounded, and the rest of the answer is not generated."""
    monkeypatch.setattr(submission, "MAX_UNREAD_BYTES", 1 << 14)
    updates = []
    read = stream._Reading.read

    def recorded_read(self, index, since):
        result = read(self, index, since)
        updates.append((len(result[0].logprobs()), self._calls[index]))
        return result

    monkeypatch.setattr(stream._Reading, "read", recorded_read)
    is_paused = threading.Event()
    monkeypatch.setattr("plait.runtime.server.http.response.EventStream._send_events", stop_after(3, is_paused))
    address, _ = serve()
    body = json.dumps(STREAM).encode()
    with connect(address) as connection:
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert wait_until(lambda: updates and updates[0][1].failure is not None, 60)
        call = updates[0][1]
        assert wait_until(lambda: engine.client.status().running_calls == 0)
        unread = call.num_received_bytes - sum(map(len, call._logprobs[:1]))
        assert call.num_tokens < 1000 and unread < 1 << 16
        is_paused.set()
        events = b""
        while b"not read its stream" not in events:
            part = connection.recv(65536)
            assert part, events[-500:]
            events += part
    assert max(count for count, _ in updates) <= stream.MAX_MESSAGES_PER_UPDATE


def test_accepted_connections_inherit_the_limits_of_unread_bytes() -> None:
    with bind_listener("127.0.0.1", 0, 7.0) as listener:
        listener.setblocking(True)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            size = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
            assert SEND_BUFFER_BYTES <= size <= 2 * SEND_BUFFER_BYTES
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000
