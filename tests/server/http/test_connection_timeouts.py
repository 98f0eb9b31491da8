"""Timeouts of connections: headers that do not arrive, and responses that are not read."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import threading
import time

import pytest
from asgi_server import serve_app
from waiting import wait_until

from plait.runtime.server.http import connection_limits
from plait.runtime.server.http.connection_limits import make_http_protocol

HEAD = b"GET /health HTTP/1.1\r\nhost: x\r\n"


def connect(address):
    host, port = address.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.settimeout(10)
    return connection


def read_all(connection):
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


@pytest.mark.parametrize("sent", [b"", b"G", HEAD])
def test_incomplete_headers_time_out(serve, sent) -> None:
    address, _ = serve(idle_timeout_s=0.3)
    with connect(address) as connection:
        connection.sendall(sent)
        assert read_all(connection) == b""


def test_incomplete_headers_of_a_second_request_time_out(serve) -> None:
    address, _ = serve(idle_timeout_s=0.3)
    with connect(address) as connection:
        connection.sendall(HEAD + b"\r\n" + b"G")
        assert b'{"status":"ok"}' in read_all(connection)


def drip(connection, start) -> bytes:
    """Sends `start`, then a byte every 20 ms, until the server closes. Returns what it answered."""
    answer = b""
    connection.settimeout(0.02)
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        connection.sendall(start)
        for _ in range(1000):
            with contextlib.suppress(TimeoutError):
                if not (part := connection.recv(4096)):
                    break
                answer += part
                continue
            connection.sendall(b"x")
        else:
            pytest.fail("the connection is still open after 20 s")
    return answer


@pytest.mark.parametrize("sent", [b"GET /a", HEAD + b"x-slow: "])
def test_a_head_has_its_own_limit(serve, monkeypatch, sent) -> None:
    """A head that stops or drips, as the first of a connection and after a request; between the two it may be idle."""
    monkeypatch.setattr(connection_limits, "HEAD_TIMEOUT_S", 0.4)
    address, _ = serve(idle_timeout_s=60)
    with connect(address) as connection:
        assert drip(connection, sent) == b""
    for may_drip in (False, True):
        with connect(address) as connection:
            connection.sendall(HEAD + b"\r\n")
            assert b'{"status":"ok"}' in connection.recv(65536)
            time.sleep(0.8)
            if may_drip:
                assert drip(connection, sent) == b""
            else:
                connection.sendall(sent)
                assert read_all(connection) == b""


@pytest.mark.parametrize("is_early", [False, True])
def test_a_head_that_begins_behind_another_request_times_out(monkeypatch, is_early) -> None:
    """It begins before or after the response of the request before it. Early: that response comes before its body."""
    monkeypatch.setattr(connection_limits, "HEAD_TIMEOUT_S", 0.4)
    begun, may_end = threading.Event(), threading.Event()

    async def answer(scope, receive, send) -> None:
        begun.set()
        await asyncio.to_thread(may_end.wait, 30)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    with serve_app(answer, make_http_protocol(60, 5)) as address, connect(address) as connection:
        if is_early:
            may_end.set()
            connection.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\n")
            assert connection.recv(65536).endswith(b"ok")
            connection.sendall(b"b" + HEAD)
            assert read_all(connection) == b""
        else:
            connection.sendall(HEAD + b"\r\n" + HEAD)
            assert begun.wait(30)
            may_end.set()
            assert read_all(connection).endswith(b"ok")


def test_connection_carries_two_requests(serve) -> None:
    address, _ = serve(idle_timeout_s=5)
    with connect(address) as connection:
        for _ in range(2):
            connection.sendall(HEAD + b"\r\n")
            answer = b""
            while b'{"status":"ok"}' not in answer:
                part = connection.recv(65536)
                assert part, f"the connection was closed after {answer!r}"
                answer += part


def test_too_large_headers_get_431(serve) -> None:
    address, _ = serve()
    with connect(address) as connection:
        connection.sendall(HEAD)
        try:
            for number in range(40):
                connection.sendall(f"x-{number}: {'y' * 4000}\r\n".encode())
        except (BrokenPipeError, ConnectionResetError):
            pass
        else:
            assert b" 431 " in read_all(connection)


def test_client_that_does_not_read_is_disconnected() -> None:
    ended = threading.Event()

    async def send_endlessly(scope, receive, send) -> None:
        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            ended.set()

        watching = asyncio.create_task(watch())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not ended.is_set():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        await watching

    with serve_app(send_endlessly, make_http_protocol(5, 0.3)) as address, connect(address) as connection:
        connection.sendall(HEAD + b"\r\n")
        assert ended.wait(60)


def count_rest(connection) -> int:
    """The bytes until the server's side ends, by a reset or without one."""
    num_bytes = 0
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 19):
            num_bytes += len(part)
    return num_bytes


def test_the_write_timeout_ends_only_a_client_that_has_not_read(monkeypatch) -> None:
    """The checks of the timer are made here, once after the client has read and once after it has not."""
    size, checks = 24 << 20, queue.Queue()
    start = connection_limits._LimitedProtocol._start_write_timer

    def started(protocol) -> None:
        start(protocol)
        checks.put((protocol, protocol.transport.get_write_buffer_size()))

    monkeypatch.setattr(connection_limits._LimitedProtocol, "_start_write_timer", started)

    async def answer_at_once(scope, receive, send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % size)]})
        await send({"type": "http.response.body", "body": b"x" * size})

    with serve_app(answer_at_once, make_http_protocol(5, 600)) as address, connect(address) as connection:
        connection.sendall(HEAD + b"\r\n")
        protocol, num_waiting = checks.get(timeout=60)
        num_read = 0
        while num_read < size // 2:
            num_read += len(connection.recv(1 << 19))
        protocol.loop.call_soon_threadsafe(protocol._check_reading, num_waiting)
        _, num_left = checks.get(timeout=60)  # it goes on
        assert 0 < num_left < num_waiting
        protocol.loop.call_soon_threadsafe(protocol._check_reading, 0)
        assert wait_until(protocol.transport.is_closing)
        assert num_read + count_rest(connection) < size
