"""Connections that flood: pipelined requests, endless heads and trailers, many connections, malformed bodies."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator

import httpx
from common.http import connect, head, read_all, send_until_closed
from faults.figures import Figure, Scale, at_most, none_of
from faults.served import Server, serve

MIB = 1 << 20
CHUNKED = head("/v1/completions", None) + b"1\r\n{\r\n"
ENDLESS = {
    "pipelined GET /health": (b"", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 4000),
    "trailers of a chunked body": (CHUNKED + b"0\r\n", b"x-trailer: " + b"y" * 65_000 + b"\r\n"),
    "a chunk's extension": (CHUNKED + b"1;e=", b"y" * 65_000),
    "headers": (b"GET /health HTTP/1.1\r\n", b"x-header: " + b"y" * 65_000 + b"\r\n"),
    "a path": (b"GET /", b"y" * 65_000),
}
VALID = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "temperature": 0}
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: localhost\r\n\r\n"
AMBIGUOUS = [
    b"content-length: 4\r\ntransfer-encoding: chunked\r\n",
    b"transfer-encoding: chunked\r\ncontent-length: 4\r\n",
    b"content-length: 4\r\ncontent-length: 5\r\n",
    b"content-length: +4\r\n",
    b"content-length: 0x4\r\n",
    b"content-length: -1\r\n",
    b"content-length: 4,4\r\n",
    b"transfer-encoding: identity, chunked\r\ncontent-length: 4\r\n",
    b"transfer-encoding: xchunked\r\ncontent-length: 4\r\n",
    b"transfer-encoding : chunked\r\ncontent-length: 4\r\n",
    b"transfer-encoding:\x0bchunked\r\ncontent-length: 4\r\n",
    b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n",
]
PATHS = ["/../etc/passwd", "/..%2f..%2fetc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/page/../../x.py"]
PATHS += ["/app.js/../../app.py", "/.%00/etc/passwd", "/..\\..\\etc\\passwd", "/static/%252e%252e/etc/passwd"]


def inflict(scale: Scale) -> Iterator[Figure]:
    with serve(has_keys=True) as server:
        canaries = server.canaries()
        yield from endless_input(server, scale)
        yield from many_connections(server, scale)
        yield smuggled_requests(server)
        yield traversed_paths(server)
        yield malformed_bodies(server, scale.count(5000, 200))
        kept = server.canaries() == canaries and not server.num_tracebacks()
        yield none_of("after all of these: the answers", [] if kept else ["differ, or tracebacks"], 3, "differ")


def endless_input(server: Server, scale: Scale) -> Iterator[Figure]:
    """Without a key. The memory is read while the connection is open."""
    for name, (start, block) in ENDLESS.items():
        before = server.memory()["http"]
        with connect(server.port) as connection:
            connection.sendall(start)
            num_sent = send_until_closed(connection, block, scale.count(256, 32) * MIB, 1.5)
            grown = server.memory()["http"] - before
        note = f"{num_sent / MIB:.1f} MiB sent"
        yield at_most(f"a connection without a key sends endless {name}: memory", grown, 4, "MiB", note)


def many_connections(server: Server, scale: Scale) -> Iterator[Figure]:
    """Connections that hold as much as they can without a key."""
    count = scale.count(300, 30)
    before = server.memory()["http"]
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            connection = stack.enter_context(connect(server.port))
            connection.sendall(b"GET /health HTTP/1.1\r\nx-header: " + b"y" * 60_000)
        elapsed = server.seconds_to_serve()
        grown = (server.memory()["http"] - before) / count
    yield at_most(f"{count} connections with half a head: memory of one", grown, 1, "MiB")
    yield at_most("the same: a request with a key meanwhile", elapsed, 2, "s", is_timed=True)


def smuggled_requests(server: Server) -> Figure:
    """Two lengths for one body: no part of the body may be answered as a request."""
    failures = []
    for headers in AMBIGUOUS:
        with connect(server.port, timeout_s=5) as connection:
            connection.sendall(b"POST /health HTTP/1.1\r\nhost: localhost\r\n" + headers + b"\r\n0\r\n\r\n" + SMUGGLED)
            answer = read_all(connection, 2)
        statuses = [line.split()[1] for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
        if len(statuses) > 1 and b"404" in statuses[1:]:
            failures.append(f"{headers!r}: {statuses}")
    return none_of("requests with two lengths (smuggling)", failures, len(AMBIGUOUS), "second requests answered")


def traversed_paths(server: Server) -> Figure:
    failures = []
    for path in PATHS:
        with connect(server.port) as connection:
            connection.sendall(head(path, 0, server.key, "GET").replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
            answer = read_all(connection, 5)
        if not answer.startswith(b"HTTP/1.1 4"):
            failures.append(f"{path}: {answer[:60]!r}")
    return none_of("paths out of the page's folder", failures, len(PATHS), "answered")


def malformed_bodies(server: Server, count: int) -> Figure:
    """Mutated chat requests: a 4xx, or an answer where the mutant is valid."""
    draw, failures = random.Random(1), []
    values = [None, -1, 0, 2**63, 1e308, "", "\x00", [], {}, [[]], "x" * 5000, True, {"type": "json_schema"}, ["("]]
    fields = [
        "model",
        "messages",
        "max_tokens",
        "temperature",
        "top_p",
        "stop",
        "n",
        "tools",
        "response_format",
        "seed",
    ]
    fields += ["regex", "logit_bias", "stream_options", "tool_choice", "choices", "logprobs", "timeout", "priority"]
    for _ in range(count):
        body = json.dumps(VALID | {draw.choice(fields): draw.choice(values)}).encode()
        if draw.random() < 0.6:
            place = draw.randrange(len(body))
            body = body[:place] + draw.randbytes(draw.randint(0, 3)) + body[place + draw.randint(0, 9) :]
        try:
            answer = server.http.post(
                "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
            )
            if answer.status_code >= 500:
                failures.append(f"{answer.status_code} for {body[:80]!r}")
        except httpx.HTTPError as error:
            failures.append(f"{type(error).__name__} for {body[:80]!r}")
    return none_of("malformed chat requests", failures, count, "answers of 5xx")
