"""Clients that leave: streams, and programs over HTTP with forks; programs beyond their limits; a drain of programs."""

from __future__ import annotations

import argparse
import asyncio
import signal
import threading
import time
from collections.abc import Iterator

from faults.figures import Figure, Scale, at_most, none_of, wait_until
from faults.plain_http import LONG, connect, last_error, open_stream, read_all, request, reset
from faults.served import Server, serve
from program_departures import GEN, forked_program, measure


def inflict(scale: Scale) -> Iterator[Figure]:
    with serve("--max-queue=512", has_keys=True) as server:
        canaries = server.canaries()
        yield from programs_left(server, scale)
        yield from streams_left(server, scale)
        yield none_of(
            "the same, the answers afterwards", [] if server.canaries() == canaries else ["differ"], 3, "differ"
        )
    with serve("--max-queue=64", "--max-requests-per-key=4", "--drain-timeout=1", has_keys=True) as server:
        yield from programs_beyond_limits(server)
        yield from drained_program(server)


def programs_left(server: Server, scale: Scale) -> Iterator[Figure]:
    count = scale.count(400, 40)
    left = asyncio.run(measure(server.address, argparse.Namespace(programs=count, branches=6, stay=2.0, seed=1)))
    fault = f"{count} programs of 6 branches whose clients leave"
    yield at_most(f"{fault}: calls end", left.ended_ms, 250, "ms", is_timed=True)
    held = left.counts["used_pages"] + left.lost_pages + left.in_flight
    yield at_most(f"{fault}: pages and requests left", held, 0, "")
    worst = max(left.other_ms, default=float("inf"))
    served = f"{len(left.other_ms)} of its requests served meanwhile; this is the slowest"
    yield at_most(f"{fault}: another key is served", worst, 5000, "ms", served, is_timed=True)


def streams_left(server: Server, scale: Scale) -> Iterator[Figure]:
    times = []
    count = scale.count(200, 10)
    for _ in range(count):
        connection, _ = open_stream(server.port, LONG, server.key)
        reset(connection)
        times.append(1000 * wait_until(lambda: not server.counts()["running_calls"], 10))
    yield at_most(f"{count} streams left after their first token: calls end", max(times), 250, "ms", is_timed=True)
    counts = server.counts()
    lost = counts["total_pages"] - counts["free_pages"] - counts["cached_pages"]
    yield at_most("the same: pages not freed", lost, 0, "")


def programs_beyond_limits(server: Server) -> Iterator[Figure]:
    """40 programs of 126 branches beyond the limits of their key, whose clients hang up at once."""
    body = {"program": [{"text": "Once"}, {"fork": {"branches": [[GEN]] * 126}}], "stream": True}
    most_waiting = 0
    for _ in range(40):
        connection = connect(server.port)
        connection.sendall(request("/v1/programs", body, server.key))
        reset(connection)
        most_waiting = max(most_waiting, server.counts()["waiting_calls"])
    yield at_most("40 programs of 126 branches, a key's limit being 4: calls waiting", most_waiting, 4, "calls")
    start = time.perf_counter()
    is_served = server.complete().status_code == 200
    elapsed = time.perf_counter() - start if is_served else float("inf")
    yield at_most("the same: the key is served again", elapsed, 2, "s", is_timed=True)


def drained_program(server: Server) -> Iterator[Figure]:
    """SIGTERM while a forked program streams, which lasts longer than --drain-timeout."""
    program = {"program": forked_program(2), "stream": True}
    connection = connect(server.port, timeout_s=60)
    connection.sendall(request("/v1/programs", program, server.key))
    received = [connection.recv(4096)]
    reader = threading.Thread(target=lambda: received.append(read_all(connection, 30)), daemon=True)
    reader.start()
    time.sleep(0.5)
    server.process.send_signal(signal.SIGTERM)
    reader.join(40)
    code = last_error(b"".join(received))
    kept = code == "aborted" and server.process.wait(30) == 0
    outcome = f"{code or 'cut'}, exit code {server.process.wait(30)}"
    yield Figure("SIGTERM while a program streams", "its error event, exit code 0", outcome, kept)
