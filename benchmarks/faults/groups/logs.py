"""Logs that nobody reads, or that cannot be written."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

from faults.figures import Figure, Scale, at_most, none_of
from faults.served import serve

LONG_PATH = "/" + "x" * 200  # a request of it has a long line


def inflict(scale: Scale) -> Iterator[Figure]:
    yield from unread_pipe(scale.count(20_000, 6000))
    yield full_device(scale.count(2000, 100))


def unread_pipe(count: int) -> Iterator[Figure]:
    read_end, write_end = os.pipe()
    try:
        with serve(log=write_end) as server:
            os.close(write_end)
            canaries = server.canaries()
            before = server.memory()["http"]
            failures, slowest = [], 0.0
            for number in range(count):
                start = time.perf_counter()
                code = server.http.get(LONG_PATH).status_code
                slowest = max(slowest, time.perf_counter() - start)
                if code != 404:
                    failures.append(f"request {number}: {code}")
            dropped = int(metric(server.http.get("/metrics").text, "plait_log_lines_dropped_total"))
            yield none_of("a log pipe that nobody reads: requests", failures, count, "failed")
            yield Figure("the same: dropped lines are counted", "> 0", f"{dropped:,} lines", dropped > 0)
            yield at_most("the same: the slowest request", 1000 * slowest, 1000, "ms", is_timed=True)
            yield at_most("the same: the HTTP process grows", server.memory()["http"] - before, 8, "MiB")
            yield server.same_answers("the same: answers", canaries)
            start = time.perf_counter()
            server.process.send_signal(signal.SIGTERM)
            code = server.process.wait(60)
            ended = time.perf_counter() - start if code == 0 else float("inf")
            yield at_most("the same: SIGTERM ends the server", ended, 5, "s", is_timed=True)
    finally:
        os.close(read_end)


def metric(text: str, name: str) -> float:
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def full_device(count: int) -> Figure:
    with open("/dev/full", "w") as full, serve(log=full) as server:
        failures = [f"{code}" for code in (server.http.get(LONG_PATH).status_code for _ in range(count)) if code != 404]
        failures += [] if server.complete().status_code == 200 else ["a completion failed"]
    return none_of("a log on a full device: requests", failures, count + 1, "failed")
