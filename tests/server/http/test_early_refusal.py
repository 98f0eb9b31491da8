"""Refusals for lack of capacity are answered from the headers, without a task, and as the middleware would."""

from __future__ import annotations

import asyncio
import logging
import socket

import httpx
import pytest

from plait.runtime.server.http.api_keys import digest
from plait.runtime.server.in_flight import RequestRecord
from plait.runtime.server.ops import request_log
from plait.runtime.server.ops.request_log import MAX_REFUSAL_LINES_PER_S, RequestLog

BODY = {"model": "default", "prompt": "One, two,", "max_tokens": 2}
PATHS = ["/v1/completions", "/v1/messages", "/api/chat", "/nothing"]


@pytest.fixture
def full(serve):
    """A server of which `admitted` fills the queue. Yields its address, its state and the requests that its app got."""
    address, state = serve(max_running=1, max_queue=0, api_keys={"alice": digest(b"a-key")}, max_body_bytes=2048)
    admitted = RequestRecord("POST", "/", tenant="alice")
    state.admission.admit(admitted)
    yield address, state
    state.in_flight.end(admitted)
    state.admission.queue.end(admitted)


def ask_app(app, path, headers):
    """The response of the middleware alone."""

    async def go():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.post(path, json=BODY, headers=headers)

    return asyncio.run(go())


def comparable(response):
    names = {"date", "server", "x-request-id"}  # date and server: added by uvicorn
    body = response.text.replace(response.headers["x-request-id"], "ID")
    return response.status_code, {k: v for k, v in response.headers.items() if k not in names}, body


@pytest.fixture
def seen(full, monkeypatch):
    """The paths of the requests that reach the application, for which a task was started."""
    from plait.runtime.server.ops.request_context import RequestContextMiddleware

    paths, handle = [], RequestContextMiddleware.__call__

    async def recorded(self, scope, receive, send):
        paths.append(scope["path"])
        await handle(self, scope, receive, send)

    monkeypatch.setattr(RequestContextMiddleware, "__call__", recorded)
    return paths


@pytest.mark.parametrize("path", PATHS)
def test_a_refusal_starts_no_task_and_is_that_of_the_middleware(full, seen, path) -> None:
    address, state = full
    headers = {"x-api-key": "a-key", "x-request-id": "mine"}
    early = httpx.post(address + path, json=BODY, headers=headers, timeout=60)
    assert early.status_code == 503 and seen == []
    late = ask_app(state_app(state), path, headers)
    assert seen == [path] and comparable(early) == comparable(late)
    assert early.headers["x-request-id"].startswith("req-") and early.headers["date"]
    assert early.headers["x-request-id"] != late.headers["x-request-id"]


def state_app(state):
    """An application with the same admission as the served one."""
    from plait.runtime.server.app import create_app

    app = create_app(state.backend, state.settings)
    app.state.plait.admission.queue.control = state.admission.queue.control
    return app


@pytest.mark.parametrize(
    ("headers", "content", "status"),
    [
        ({}, b"{}", 401),
        ({"x-api-key": "a-key", "origin": "http://evil.example"}, b"{}", 403),
        ({"x-api-key": "a-key"}, b" " * 2049, 413),
        ({"x-api-key": "a-key"}, b"{}", 503),
    ],
)
def test_what_is_checked_before_the_capacity_is_answered_first(full, headers, content, status) -> None:
    address, _ = full
    assert httpx.post(f"{address}/v1/completions", content=content, headers=headers, timeout=60).status_code == status


def test_a_refusal_is_counted_and_forgotten(full) -> None:
    address, state = full
    before = state.metrics.rejections.values.get(("queue_full",), 0)
    for _ in range(3):
        httpx.post(f"{address}/v1/completions", json=BODY, headers={"x-api-key": "a-key"}, timeout=60)
    assert state.metrics.rejections.values["queue_full",] == before + 3
    assert state.metrics.requests.counts["/v1/completions", "503"]
    assert len(state.in_flight.records) == 0


def test_a_draining_server_refuses_early(full, seen) -> None:
    address, state = full
    state.admission.is_draining = True
    response = httpx.post(f"{address}/v1/completions", json=BODY, headers={"x-api-key": "a-key"}, timeout=60)
    assert (response.status_code, response.json()["error"]["code"], seen) == (503, "draining", [])


def exchange(address, data):
    """Everything that the server answers to `data` until it closes the connection."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer


def test_a_pipelined_request_is_refused_after_the_one_before_it(full) -> None:
    address, _ = full
    head = b"host: localhost\r\nx-api-key: a-key\r\n"
    post = b"POST /v1/completions HTTP/1.1\r\n" + head + b"content-length: 4\r\n\r\n"
    get = b"GET /health HTTP/1.1\r\n" + head + b"\r\n"
    answer = exchange(address, get + post + b"{  }" + get)
    assert answer.count(b"HTTP/1.1 ") == 2, "the connection is closed after the refusal"
    assert answer.index(b"HTTP/1.1 200") < answer.index(b"HTTP/1.1 503")


def test_a_body_in_parts_does_not_lose_the_refusal(full) -> None:
    address, _ = full
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-api-key: a-key\r\n")
        connection.sendall(b"content-length: 2000\r\n\r\n" + b" " * 500)
        answer = connection.recv(65536)
        connection.sendall(b" " * 1500)
    assert b"HTTP/1.1 503" in answer and b"queue_full" in answer


def test_refusals_beyond_ten_a_second_are_counted_in_the_next_line(monkeypatch) -> None:
    now, lines = [100.25], []
    monkeypatch.setattr(request_log.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(request_log.log, "handle", lambda line: lines.append(line.fields))
    monkeypatch.setattr(request_log.log, "isEnabledFor", lambda level: level == logging.INFO)
    requests = RequestLog()

    def add(count, code, status):
        for _ in range(count):
            requests.add(RequestRecord("POST", "/v1/completions", status=status, code=code, end_time=1.0))

    add(MAX_REFUSAL_LINES_PER_S + 5, "queue_full", 503)
    assert len(lines) == MAX_REFUSAL_LINES_PER_S
    add(1, None, 200)
    assert lines[-1]["unlogged_refusals"] == 5 and lines[-1]["status"] == 200
    now[0] = 101.0
    add(1, "rate_limit_exceeded", 429)
    assert len(lines) == MAX_REFUSAL_LINES_PER_S + 2 and "unlogged_refusals" not in lines[-1]
    add(MAX_REFUSAL_LINES_PER_S + 20, "invalid_value", 400)
    assert len(lines) == 2 * MAX_REFUSAL_LINES_PER_S + 22, "only refusals for lack of capacity are limited"
