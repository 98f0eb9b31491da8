"""Clients that are slow, rude or silent: late bodies, slow heads, unread streams, disconnects within a body."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from common.http import LONG, connect, head, open_stream, read_all, reset
from faults.figures import Figure, Scale, at_most, none_of, wait_until
from faults.served import Server, serve

UNREAD = {**LONG, "logprobs": 20}
GIANT = 13 << 20


def inflict(scale: Scale) -> Iterator[Figure]:
    limits = ("--body-timeout=3", "--write-timeout=5", "--idle-timeout=4") if scale.is_short else ("--idle-timeout=10",)
    with serve(*limits) as server:
        canaries = server.canaries()
        yield from unread_streams(server, scale.count(8, 2))
        yield from slow_senders(server, 3 if scale.is_short else 30, 4 if scale.is_short else 10)
        yield refused_giants(server, scale.count(10, 2))
        yield from clients_that_leave_in_their_body(server, scale.count(100, 10))
        yield server.same_answers("after all of these: the answers", canaries)


def unread_streams(server: Server, count: int) -> Iterator[Figure]:
    """Streams with 20 logprobs a token, of which clients read the first event."""
    server.complete("warm up", 64, logprobs=20)
    before, start = server.memory()["http"], time.perf_counter()
    grown = 0.0
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(open_stream(server.port, UNREAD, receive_buffer=4096)[0])

        def is_over() -> bool:
            nonlocal grown
            grown = max(grown, server.memory()["http"] - before)
            time.sleep(0.1)
            return not server.http.get("/status").json()["in_flight"]

        wait_until(is_over, 100)
        elapsed = time.perf_counter() - start
    yield at_most(f"{count} unread streams with 20 logprobs: ended", elapsed, 35, "s", is_timed=True)
    yield at_most("the same: memory of one", grown / count, 1.5, "MiB")


def slow_senders(server: Server, body_timeout_s: float, idle_timeout_s: float) -> Iterator[Figure]:
    """A body of which a byte arrives, and heads of which a byte arrives every half second. Both at once."""

    def drip(start: bytes, is_dripping: bool) -> tuple[float, bytes]:
        with connect(server.port) as connection:
            begun, answer = time.perf_counter(), b""
            connection.sendall(start)
            connection.settimeout(0.5)
            while time.perf_counter() - begun < 100:
                try:
                    if is_dripping:
                        connection.sendall(b"x")
                    part = connection.recv(4096)
                except TimeoutError:
                    continue
                except OSError:
                    break
                if not part:
                    break
                answer += part
            return time.perf_counter() - begun, answer

    with ThreadPoolExecutor(2) as pool:
        slow_body = pool.submit(drip, head("/v1/completions", 100) + b"{", False)
        slow_head = pool.submit(drip, b"GET /health HTTP/1.1\r\nx-slow: ", True)
    elapsed, answer = slow_body.result()
    is_told = answer.startswith(b"HTTP/1.1 408 ") and b"connection: close" in answer.lower()
    measured = f"{elapsed:.1f} s, {answer[:12].decode()!r}"
    kept = is_told and elapsed < body_timeout_s + 3
    yield Figure(f"a body that stops, --body-timeout {body_timeout_s}", "408 and closed in time", measured, kept)
    elapsed, _ = slow_head.result()
    yield at_most(
        "a head with a byte every 0.5 s: closed", elapsed, idle_timeout_s + 3, "s", f"--idle-timeout {idle_timeout_s}"
    )


def refused_giants(server: Server, count: int) -> Figure:
    """13 MiB in chunks, from a client that reads when it has sent everything."""
    failures = []
    for _ in range(count):
        with connect(server.port) as connection:
            try:
                connection.sendall(head("/v1/completions", None))
                for _ in range(GIANT >> 20):
                    connection.sendall(b"100000\r\n" + b"x" * (1 << 20) + b"\r\n")
                connection.sendall(b"0\r\n\r\n")
                connection.shutdown(socket.SHUT_WR)
            except OSError as error:
                failures.append(str(error))
                continue
            answer = read_all(connection, 20)
            if not answer.startswith(b"HTTP/1.1 413 "):
                failures.append(f"{answer[:30]!r}")
    return none_of("bodies of 13 MiB in chunks: the answer 413", failures, count, "lost")


def clients_that_leave_in_their_body(server: Server, count: int) -> Iterator[Figure]:
    for _ in range(count):
        connection = connect(server.port)
        connection.sendall(head("/v1/completions", 100) + b"{")
        reset(connection)
    left = wait_until(lambda: not server.http.get("/status").json()["in_flight"], 20)
    yield at_most(f"{count} clients that leave in their body: requests forgotten", left, 2, "s", is_timed=True)
    yield at_most("the same: tracebacks in the log", server.num_tracebacks(), 0, "")
