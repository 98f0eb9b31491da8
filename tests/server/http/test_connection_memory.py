"""What a connection holds of input that no request has taken: pipelined requests, heads, trailers and chunks."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest
from asgi_server import serve_app
from waiting import wait_until

from plait.runtime.server.http import connection_limits
from plait.runtime.server.http.connection_limits import MAX_HEAD_BYTES, SLICE_BYTES, make_http_protocol

GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
SHORTEST = b"GET / HTTP/1.1\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n"
READ_BYTES = 1 << 18  # the most that an event loop reads at once


class App:
    """An application that reads the body, waits for `may_answer`, and answers with the number of the request."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.headers: list[list[tuple[bytes, bytes]]] = []
        self.bodies: list[int] = []

    async def __call__(self, scope, receive, send) -> None:
        self.headers.append(scope["headers"])
        num_bytes, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.bodies.append(-1)
                return
            num_bytes, more = num_bytes + len(message["body"]), message["more_body"]
        self.bodies.append(num_bytes)
        watching = asyncio.create_task(receive())  # as every endpoint does that waits for a disconnect
        while not self.may_answer.is_set():
            await asyncio.sleep(0.005)
        watching.cancel()
        body = b"%d;" % len(self.bodies)
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@pytest.fixture
def server():
    """An App, a function that opens a connection, and the protocol of each connection."""
    app, protocols = App(), []

    class Recorded(make_http_protocol(60, 60)):
        def connection_made(self, transport) -> None:
            protocols.append(self)
            super().connection_made(transport)

    with serve_app(app, Recorded) as address:
        host, port = address.removeprefix("http://").split(":")
        connections = []

        def connect():
            connections.append(socket.create_connection((host, int(port))))
            connections[-1].settimeout(60)
            return connections[-1]

        yield app, connect, protocols
        app.may_answer.set()
        for connection in connections:
            connection.close()


def read_until(connection, condition) -> bytes:
    answer = b""
    while not condition(answer):
        part = connection.recv(65536)
        assert part, f"the connection was closed after {answer[-500:]!r}"
        answer += part
    return answer


def send_until_full(connection, data: bytes, num_bytes: int) -> int:
    """Sends up to `num_bytes` until the server does not take any for half a second. Returns how many it took."""
    connection.settimeout(0.5)
    num_sent = 0
    try:
        while num_sent < num_bytes:
            num_sent += connection.send(data)
    except TimeoutError:
        pass
    connection.settimeout(60)
    return num_sent


@pytest.mark.parametrize("request_head", [GET, SHORTEST])
def test_pipelined_requests_wait_outside_of_the_process(server, request_head) -> None:
    app, connect, protocols = server
    connection = connect()
    block = request_head * 4000
    num_sent = send_until_full(connection, block, 64 << 20)
    assert num_sent < 64 << 20  # the server has stopped to read
    assert wait_until(lambda: protocols and protocols[0].flow.read_paused and app.bodies)
    (protocol,) = protocols
    assert len(protocol.pipeline) <= SLICE_BYTES // len(SHORTEST) + 1
    assert len(protocol._unparsed) <= MAX_HEAD_BYTES + READ_BYTES
    assert len(app.bodies) == 1


def test_pipelined_requests_are_all_answered_in_order(server) -> None:
    app, connect, _ = server
    connection = connect()
    count = 2000  # more than one read, and more than a slice
    body_request = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5000\r\n\r\n" + b"x" * 5000
    requests = (GET * 99 + body_request) * (count // 100)
    threading.Thread(target=connection.sendall, args=(requests,), daemon=True).start()
    assert wait_until(lambda: app.bodies)
    app.may_answer.set()
    answer = read_until(connection, lambda answer: answer.endswith(b"\r\n\r\n%d;" % count))
    numbers = [int(part.split(b";")[0]) for part in answer.split(b"\r\n\r\n")[1:]]
    assert numbers == list(range(1, count + 1))
    assert app.bodies == ([0] * 99 + [5000]) * (count // 100)


def test_trailers_are_dropped_and_small_ones_accepted(server) -> None:
    app, connect, _ = server
    app.may_answer.set()
    connection = connect()
    connection.sendall(CHUNKED + b"0\r\nx-trailer: y\r\nauthorization: Bearer k\r\n\r\n")
    assert b" 200 " in read_until(connection, lambda answer: answer.endswith(b"1;"))
    assert [name for name, _ in app.headers[0]] == [b"host", b"transfer-encoding"]


ENDLESS = {
    "trailers": (CHUNKED + b"0\r\n", b"x-trailer: " + b"y" * 1000 + b"\r\n"),
    "one trailer": (CHUNKED + b"0\r\nx-trailer: ", b"y" * 1000),
    "short trailers": (CHUNKED + b"0\r\n", b"a:\r\n" * 250),
    "a chunk extension": (CHUNKED + b"1;e=", b"y" * 1000),
    "headers": (b"GET / HTTP/1.1\r\n", b"x-header: " + b"y" * 1000 + b"\r\n"),
    "short headers": (b"GET / HTTP/1.1\r\n", b"a:\r\n" * 250),
    "a path": (b"GET /", b"y" * 1000),
    "empty lines": (b"", b"\r\n" * 500),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_input_of_a_head_or_trailer_gets_431(server, monkeypatch, name) -> None:
    monkeypatch.setattr(connection_limits, "MAX_DISCARDED_BYTES", 1 << 22)
    app, connect, protocols = server
    connection = connect()
    start, more = ENDLESS[name]
    connection.sendall(start)
    connection.settimeout(60)
    num_sent = 0
    answers = []
    reader = threading.Thread(target=lambda: answers.append(read_all(connection)))
    reader.start()
    try:
        while num_sent < 64 << 20:
            connection.sendall(more)
            num_sent += len(more)
    except OSError:
        pass  # the server has closed the connection
    reader.join(60)
    assert num_sent < 64 << 20
    assert answers[0].startswith(b"HTTP/1.1 431 "), answers[0][:200]
    (protocol,) = protocols
    assert not protocol._unparsed and not protocol.pipeline
    assert len(protocol.headers or ()) <= 256
    if start.startswith(CHUNKED):
        assert wait_until(lambda: app.bodies == [-1])


def read_all(connection) -> bytes:
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except OSError:
        pass
    return b"".join(parts)


def test_too_large_headers_behind_a_running_request_end_the_connection(server) -> None:
    """A 431 would be taken for the response of the running request."""
    _, connect, _ = server
    connection = connect()
    connection.sendall(GET + b"GET / HTTP/1.1\r\nx: " + b"y" * (MAX_HEAD_BYTES + 2 * SLICE_BYTES))
    assert b"431" not in read_all(connection)
